"""One `Select` while it runs in the engine: the requests that score its options, and the option that wins.

Owns the sequences and requests of one select. The arithmetic (the trie of options, the methods) is `selection.py`; the
queue and its events are the program run's, which makes one of these for each `Select`, queues `requests`, hands each
one back to `take` when it is done, queues what `ask_more` adds, and asks for the value.
"""

from __future__ import annotations

from collections.abc import Iterable

from sgl.errors import EmptyPrompt
from sgl.lang.graph import ProgramOptions, Select, Usage, ValueEvent
from sgl.runtime.branch import Branch
from sgl.runtime.selection import Path, ScorePath, Selection, decide
from sgl.runtime.sequence import Request
from sgl.runtime.sequence import Sequence as TokenSequence
from sgl.runtime.services import Services
from sgl.runtime.text.tokenizer import Tokenizer


class OptionScoring:
    """A select whose options are being scored.

    Args:
        node: the select.
        branch: what it continues; its sequence ends with the select's last stable token.
        selection: its encoded options.
        seed: for a node that has none.

    Attributes:
        requests: what was computed so far or is being computed: the base, chains of options, unconditional options.

    Raises:
        EmptyPrompt: there is nothing to condition the options on.
    """

    def __init__(
        self,
        node: Select,
        branch: Branch,
        selection: Selection,
        services: Services,
        options: ProgramOptions,
        *,
        seed: int,
    ) -> None:
        base = branch.sequence
        if not base.token_ids:
            raise EmptyPrompt(
                "select has nothing to condition on, and this model has no beginning-of-sequence token",
                hint="append some text before selecting",
            )
        self.node = node
        self.branch = branch
        self._seed = node.seed if node.seed is not None else seed
        self.requests: list[Request] = []
        self._selection = selection
        self._scheduler = services.scheduler
        self._priority = options.priority
        self._base_len = len(base)
        self._options: list[TokenSequence] = []
        self._unconditional: dict[int, list[float]] = {}
        last = self._base_len - 1
        self.requests.append(Request(base, scores={last: selection.first_ids}, priority=self._priority))
        self._base = base
        if self._at_once:
            self._ask_chains(selection.chains())
        if node.method == "unconditional_likelihood_normalized":
            self._ask_unconditional(services.tokenizer)
        self._pending = {request.sequence.id for request in self.requests}

    @property
    def _at_once(self) -> bool:
        """Whether all options are computed; the unconditional scores leave no bound to stop by."""
        return self.node.all_scores or self.node.method == "unconditional_likelihood_normalized"

    def _ask_chains(self, chains: Iterable[ScorePath]) -> None:
        chains, last = list(chains), self._base_len - 1
        cached = self._scheduler.num_cached_behind(self._base, [chain.tokens for chain in chains])
        for part in (part for chain, known in zip(chains, cached, strict=True) for part in chain.behind(known)):
            scores = {last + k: ids for k, ids in part.wanted.items()}
            self._ask([*self._base.token_ids[: self._base_len], *part.tokens], scores, shared_len=self._base_len)

    def _ask(
        self, ids: Iterable[int], scores: dict[int, Path], *, shared_len: int = 0, option: int | None = None
    ) -> None:
        sequence = self._scheduler.new_sequence(self._base.namespace, ids, shared_len=shared_len)
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

    @property
    def steps_left(self) -> int:
        """Most steps until it ends, as far as is known: what was asked for is computed together."""
        return 1

    def finish(self) -> ValueEvent:
        """The value, once everything is scored. The winning option is in the branch's state from now on."""
        node, branch, selection = self.node, self.branch, self._selection
        best, scores = decide(
            node.choices,
            selection.paths,
            [selection.logprobs(i) for i in range(len(node.choices))],
            node.method,
            unconditional=[self._unconditional[i] for i in range(len(node.choices))] if self._unconditional else (),
            temperature=node.temperature,
            seed=self._seed,
        )
        branch.sequence.token_ids.extend(selection.paths[best])
        branch.transcript.add_text(node.choices[best])
        branch.transcript.flush()  # the same ids again: the unit and the option in one
        self.release()
        return ValueEvent(
            node=node.id,
            branch=branch.id,
            name=node.name,
            value=node.choices[best],
            token_ids=selection.paths[best],
            usage=sum((request.usage() for request in self.requests), Usage()),
            choices=scores,
        )

    def release(self) -> None:
        """Let go of the options' sequences; the base is the branch's."""
        for option in self._options:
            self._scheduler.release(option)
