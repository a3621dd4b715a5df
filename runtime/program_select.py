"""One `Select` while it runs in the engine: the requests that score its options, and the option that wins.

Owns the sequences and requests of one select. The arithmetic (the trie of options, the methods) is `selection.py`; the
branch and its events are the program run's, which makes one of these for each `Select`, queues `requests` and hands
each one back to `take` when it is done, and queues what `ask_more` adds.
"""

from __future__ import annotations

from collections.abc import Iterable

from sgl.errors import EmptyPrompt
from sgl.lang.graph import ChoiceScore, Select, Usage
from sgl.runtime.scheduler import Scheduler
from sgl.runtime.selection import Path, ScorePath, Selection, decide
from sgl.runtime.sequence import Request
from sgl.runtime.sequence import Sequence as TokenSequence
from sgl.runtime.text.tokenizer import Tokenizer


class OptionScoring:
    """A select whose options are being scored.

    Args:
        node: the select.
        base: the branch's sequence, ending with the select's last stable token.
        selection: its encoded options.
        scheduler, tokenizer: of the engine.
        priority: of the program.

    Attributes:
        requests: what was computed so far or is being computed: the base, chains of options, unconditional options.

    Raises:
        EmptyPrompt: there is nothing to condition the options on.
    """

    def __init__(
        self,
        node: Select,
        base: TokenSequence,
        selection: Selection,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        *,
        priority: int = 0,
    ) -> None:
        if not base.token_ids:
            raise EmptyPrompt(
                "select has nothing to condition on, and this model has no beginning-of-sequence token",
                hint="append some text before selecting",
            )
        self.node = node
        self.requests: list[Request] = []
        self._selection = selection
        self._scheduler = scheduler
        self._namespace = base.namespace
        self._priority = priority
        self._base_len = len(base)
        self._options: list[TokenSequence] = []
        self._unconditional: dict[int, list[float]] = {}
        last = self._base_len - 1
        self.requests.append(Request(base, scores={last: selection.first_ids}, priority=priority))
        self._base = base
        if self._at_once:
            self._ask_chains(selection.chains())
        if node.method == "unconditional_likelihood_normalized":
            self._ask_unconditional(tokenizer)
        self._pending = {request.sequence.id for request in self.requests}

    @property
    def _at_once(self) -> bool:
        """Whether all options are computed; the unconditional scores leave no bound to stop by."""
        return self.node.all_scores or self.node.method == "unconditional_likelihood_normalized"

    def _ask_chains(self, chains: Iterable[ScorePath]) -> None:
        last = self._base_len - 1
        for chain in chains:
            scores = {last + k: ids for k, ids in chain.wanted.items()}
            self._ask([*self._base.token_ids[: self._base_len], *chain.tokens], scores, shared_len=self._base_len)

    def _ask(
        self, ids: Iterable[int], scores: dict[int, Path], *, shared_len: int = 0, option: int | None = None
    ) -> None:
        sequence = self._scheduler.new_sequence(self._namespace, ids, shared_len=shared_len)
        self._options.append(sequence)
        self.requests.append(Request(sequence, scores=scores, priority=self._priority, score_only=True, option=option))

    def _ask_unconditional(self, tokenizer: Tokenizer) -> None:
        """Each option's tokens without the prompt; a first token with nothing before it scores 0."""
        start = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        for i, path in enumerate(self._selection.paths):
            ids = [*start, *path]
            scores: dict[int, Path] = {position: (ids[position + 1],) for position in range(len(ids) - 1)}
            self._unconditional[i] = [] if start else [0.0]
            if scores:
                self._ask(ids[:-1], scores, option=i)

    def take(self, request: Request) -> bool:
        """Take the log-probabilities of a request that is done; whether all that were asked for are there."""
        if request.option is not None:
            values = [request.logprobs[position][0] for position in sorted(request.logprobs)]
            self._unconditional[request.option].extend(values)
        else:
            for position, logprobs in request.logprobs.items():
                prefix: Path = tuple(request.sequence.token_ids[self._base_len : position + 1])
                self._selection.put(prefix, logprobs)
        self._pending.discard(request.sequence.id)
        return not self._pending

    def ask_more(self) -> list[Request]:
        """Requests that it still takes to know the best option; none when it can be decided."""
        if self._at_once:
            return []
        known = len(self.requests)
        self._ask_chains(self._selection.next_wave(self.node.method))
        self._pending = {request.sequence.id for request in self.requests[known:]}
        return self.requests[known:]

    def decide(self, seed: int) -> tuple[str, Path, tuple[ChoiceScore, ...]]:
        """The winning option, its tokens after the base, and every option's score."""
        node, selection = self.node, self._selection
        best, scores = decide(
            node.choices,
            selection.paths,
            [selection.logprobs(i) for i in range(len(node.choices))],
            node.method,
            unconditional=[self._unconditional[i] for i in range(len(node.choices))] if self._unconditional else (),
            temperature=node.temperature,
            seed=seed,
        )
        return node.choices[best], selection.paths[best], scores

    def usage(self) -> Usage:
        """Tokens of all requests."""
        return sum((request.usage() for request in self.requests), Usage())

    def release(self) -> None:
        """Let go of the options' sequences; the base is the branch's."""
        for option in self._options:
            self._scheduler.release(option)
