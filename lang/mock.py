"""`MockBackend`: runs programs without a model, for tests. Ships to users.

Owns scripted answers, and executes request graphs on a thread of its own, like a real backend. It records every graph
and prompt. With `model` its prompts are token for token those of an engine on that model; without one, tokens are words
with the space before them (`max_new_tokens` counts those) and roles are `<|im_start|>role` lines. What it does not
imitate: a cache, constraints, the tokens in which a model would have written the answer, and probabilities (the chosen
option has 1).
"""

from __future__ import annotations

import re
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

from sgl.errors import EngineDead, GenerationError, InternalError, InvalidParameter, SglError
from sgl.grammars.formats import message_parser, reasoning_format
from sgl.grammars.spec import Choices, Regex
from sgl.lang import defaults
from sgl.lang.backend import EventSink
from sgl.lang.executor import Branch, GraphSession
from sgl.lang.graph import (
    ChoiceScore,
    DeltaEvent,
    Gen,
    Graph,
    Media,
    ProgramOptions,
    Sampling,
    Select,
    StateText,
    TextEvent,
    TokenLogprob,
    Tokens,
    Usage,
    ValueEvent,
)
from sgl.lang.rendering import PlainRenderer, RenderedState, Renderer, words
from sgl.lang.serial import Workers
from sgl.lang.stops import first_stop

Answer: TypeAlias = Callable[[str, Gen], str]
Answers: TypeAlias = Iterable[str] | Mapping[str, str | list[str]] | Answer

_WORDS = PlainRenderer("words", words, exact=True)
_SAMPLES = ("0", "0.5", '"text"', "True", "a", "A", "")


class MockBackend:
    """A backend with scripted answers.

    Args:
        answers: what generations give: a list in order, a dict by name (a list value is used up in order), or a
            function of the prompt and the node. Cut at stops and at `max_new_tokens` words. Without an answer a
            generation gives `<name>`, or something simple that matches its regex.
        choices: per name of a select, the option to take; the first option otherwise.
        errors: per name of a generation or select, the error to fail with there.
        die_at: the backend dies when it reaches this name: every open program fails with `EngineDead`.
        delay_s: seconds that every generation takes (a cancel ends the wait). The mock executes one after the other, so
            those of forks and rows add up.
        model: the name or path of a model whose tokenizer and chat template the mock uses, without its weights: prompts
            and their token ids are then those of an engine on that model. Without one a token is a word.

    Attributes:
        graphs: every submitted graph; `prompts`: (name, prompt text) of every generation and select executed.

    Example:
        >>> import sgl
        >>> mock = sgl.MockBackend({"city": "Paris. And"})
        >>> @sgl.function
        ... def capital(s):
        ...     s += "France: " + sgl.gen("city", stop=".")
        >>> capital.run(backend=mock)["city"], mock.prompts, len(mock.graphs)
        ('Paris', [('city', 'France: ')], 1)
    """

    def __init__(
        self,
        answers: Answers = (),
        *,
        choices: Mapping[str, str] | None = None,
        errors: Mapping[str, Exception] | None = None,
        die_at: str | None = None,
        delay_s: float = 0.0,
        model: str | None = None,
    ) -> None:
        if model is not None and not isinstance(model, str):
            raise InvalidParameter(f"model is {model!r}; expected the name or path of a model", param="model")
        self._renderer = defaults.renderer_for(model) if model is not None else _WORDS
        self.graphs: list[Graph] = []
        self.prompts: list[tuple[str, str]] = []
        self.epoch = uuid.uuid4().hex
        self._function: Answer | None = answers if callable(answers) else None
        self._by_name: dict[str, str | deque[str]] = {}
        self._in_order: deque[str] | None = None
        if isinstance(answers, Mapping):
            self._by_name = {key: v if isinstance(v, str) else deque(v) for key, v in answers.items()}
        elif not callable(answers):
            listed = list(answers)
            self._in_order = deque(listed) if listed else None
        self._choices = dict(choices or {})
        self._errors = dict(errors or {})
        self._die_at = die_at
        self.delay_s = delay_s
        self._lock = threading.Lock()
        self._sessions: set[MockSession] = set()
        self._workers = Workers("sgl-mock")
        self._dead: SglError | None = None

    # --- the protocol ---

    def open(self, sink: EventSink, options: ProgramOptions) -> MockSession:
        """Start a program.

        Raises:
            EngineDead: the backend died or was shut down.
        """
        with self._lock:
            if self._dead is not None:
                raise EngineDead(self._dead.message, hint="make a new backend")
            session = MockSession(self, sink, options)
            self._sessions.add(session)
        return session

    def flush_cache(self) -> bool:
        """There is no cache: False."""
        return False

    def server_info(self) -> Mapping[str, Any]:
        """That this is the mock, and how many programs are open."""
        with self._lock:
            return {"backend": "mock", "epoch": self.epoch, "num_open": len(self._sessions)}

    def renderer(self) -> Renderer:
        """What counts as the mock does."""
        return self._renderer

    def shutdown(self) -> None:
        """End; open programs fail with `EngineDead`. Idempotent."""
        self.die(EngineDead("the mock backend was shut down"))

    def __enter__(self) -> MockBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def die(self, error: SglError | None = None) -> None:
        """End like a crash: every open program fails with `EngineDead`."""
        with self._lock:
            if self._dead is not None:
                return
            self._dead = error or EngineDead("the mock backend died")
            sessions = list(self._sessions)
        for session in sessions:
            session.stop.set()
            self._workers.post(partial(session.fail, self._dead))

    # --- answers ---

    def _answer(self, node: Gen, prompt: str) -> str:
        if self._function is not None:
            return self._function(prompt, node)
        if self._in_order is not None:
            if not self._in_order:
                raise GenerationError(f"the mock has no answer left for {node.name!r}", hint="give it more answers")
            return self._in_order.popleft()
        found = self._by_name.get(node.name)
        if isinstance(found, str):
            return found
        if found is not None:
            if not found:
                raise GenerationError(f"the mock has no answer left for {node.name!r}", hint="give it more answers")
            return found.popleft()
        match node.constraint:
            case Regex(pattern=pattern):
                return next((sample for sample in _SAMPLES if re.fullmatch(pattern, sample)), f"<{node.name}>")
            case Choices(options=options):
                return options[0]
            case None:
                return f"<{node.name}>"
            case _:
                return "{}"


class MockSession(GraphSession[RenderedState]):
    """One program on the mock. All execution happens on the backend's thread."""

    def __init__(self, backend: MockBackend, sink: EventSink, options: ProgramOptions) -> None:
        state = backend.renderer().state(options.now, options.chat_template_kwargs)
        super().__init__(sink, options, backend._workers.post, backend.epoch, state)
        self._backend = backend

    def submit(self, graph: Graph, *, finish: bool = False) -> None:
        """Execute the next fragment."""
        self._backend.graphs.append(graph)
        super().submit(graph, finish=finish)

    def copy(self, prompt: RenderedState) -> RenderedState:
        """The same state."""
        return prompt.copy()

    def state_of(self, branch: Branch[RenderedState]) -> StateText:
        """Text and ids; text that waits for what follows it has none yet."""
        return StateText(branch.prompt.text, tuple(branch.prompt.ids))

    def add_tokens(self, branch: Branch[RenderedState], node: Tokens) -> None:
        """Append them."""
        branch.prompt.add_ids(node.token_ids)

    def add_media(self, branch: Branch[RenderedState], node: Media) -> None:
        """A word that stands for it."""
        branch.prompt.add_text(f"<{node.kind} {node.digest[:8]}>")

    def ending(self) -> None:
        """The backend forgets it."""
        with self._backend._lock:
            self._backend._sessions.discard(self)

    def generate(self, branch: Branch[RenderedState], node: Gen) -> None:
        """What the script says, cut as the node says."""
        prompt = branch.prompt
        prompt.flush()
        before, num_before = prompt.text, len(prompt.ids)
        if not self._begin(node, before):
            return
        sampling = node.sampling
        text, finish, matched = self._cut(self._backend._answer(node, before), sampling)
        if self.options.stream:
            ids = iter(self._ids(prompt, text))
            for piece in self._backend.renderer().split(text):
                drawn = tuple(islice(ids, 1))
                self.emit(DeltaEvent(node.id, branch.id, node.name, piece, drawn, _logprobs(drawn, sampling)))
        token_ids = self._ids(prompt, text)
        num_thoughts = 0
        if node.reasoning is not None:
            message = message_parser(reasoning=reasoning_format(node.reasoning), prompt=before).parse(text)
            num_thoughts = len(self._ids(prompt, message.reasoning))
            prompt.add_generated(message.content)
        else:
            prompt.add_generated(text, token_ids)
        self.finish(
            branch,
            node,
            ValueEvent(
                node=node.id,
                branch=branch.id,
                name=node.name,
                value=text,
                token_ids=token_ids,
                finish=finish,
                matched=matched,
                usage=_used(num_before, len(token_ids), num_thoughts),
                logprobs=_logprobs(token_ids, sampling),
                prompt_logprobs=_prompt_logprobs(prompt.ids[:num_before], sampling),
            ),
        )

    def select(self, branch: Branch[RenderedState], node: Select) -> None:
        """The option that the script says; all others are less probable."""
        prompt = branch.prompt
        if not self._begin(node, prompt.text):
            return
        choice = self._backend._choices.get(node.name, node.choices[0])
        if choice not in node.choices:
            raise GenerationError(f"the mock is to choose {choice!r}, which is not an option of {node.name!r}")
        paths = prompt.options(node.choices).paths
        num_before = len(prompt.ids)
        taken = paths[node.choices.index(choice)]
        prompt.choose(choice, taken)
        if self.options.stream:
            self.emit(TextEvent(branch.id, choice))
        scores = tuple(
            ChoiceScore(
                option,
                tuple(path),
                tuple(0.0 if option == choice else -10.0 for _ in path),
                0.0 if option == choice else -10.0,
                1.0 if option == choice else 0.0,
            )
            for option, path in zip(node.choices, paths, strict=True)
        )
        self.finish(
            branch,
            node,
            ValueEvent(
                node=node.id,
                branch=branch.id,
                name=node.name,
                value=choice,
                token_ids=tuple(taken),
                usage=_used(num_before, 0),
                choices=scores,
            ),
        )

    def _begin(self, node: Gen | Select, prompt: str) -> bool:
        """What happens before a value: faults that were asked for, the record, the delay. False when it is over."""
        backend = self._backend
        if node.name == backend._die_at:
            backend.die()
            self.fail(backend._dead)
            return False
        if node.name in backend._errors:
            error = backend._errors[node.name]
            if isinstance(error, SglError):
                raise SglError.from_info(error.to_info())
            raise InternalError(f"{node.name!r} fails as it was told to: {type(error).__name__}: {error}") from error
        backend.prompts.append((node.name, prompt))
        if backend.delay_s:
            self.stop.wait(backend.delay_s)
        return not self.stop.is_set()

    def _ids(self, prompt: RenderedState, text: str) -> tuple[int, ...]:
        probe = prompt.copy()
        probe.add_generated(text)
        return tuple(probe.ids[len(prompt.ids) :])

    def _cut(self, text: str, sampling: Sampling) -> tuple[str, str, str | None]:
        """The answer up to the first stop or the budget of tokens; how it ended; the stop."""
        pieces = self._backend.renderer().split(text)
        finish = "stop"
        if len(pieces) > sampling.max_new_tokens:
            text, finish = "".join(pieces[: sampling.max_new_tokens]), "length"
        cut = first_stop(text, sampling, len("".join(pieces[: sampling.min_new_tokens])))
        return (cut.text, "stop", cut.matched) if cut is not None else (text, finish, None)


def _logprobs(ids: tuple[int, ...], sampling: Sampling) -> tuple[TokenLogprob, ...]:
    """Every token is certain."""
    return tuple(TokenLogprob(id, 0.0) for id in ids) if sampling.return_logprob else ()


def _used(prompt: int, completion: int, reasoning: int = 0) -> Usage:
    return Usage(prompt_tokens=prompt, prefill_tokens=prompt, completion_tokens=completion, reasoning_tokens=reasoning)


def _prompt_logprobs(ids: Sequence[int], sampling: Sampling) -> tuple[TokenLogprob, ...]:
    """Every token is certain, except the first, which nothing predicts."""
    start = sampling.logprob_start_len
    if not sampling.return_logprob or start < 0:
        return ()
    entries = [TokenLogprob(id, 0.0 if position else None) for position, id in enumerate(ids)]
    return tuple(entries[start:])
