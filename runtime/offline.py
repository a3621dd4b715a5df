"""Plain prompts on an engine: what `Engine.generate` was asked, and its outputs in the shapes of SGLang's engine.

Owns the reading of prompts and parameters into `Call`s (everything wrong is raised there, before anything is started)
and the running ones. A call is a program of its own: its prompt and one generation, or n of them on the same prompt.
Its outputs are flattened in order: prompt by prompt, sample by sample. The samples of a prompt are admitted together or
not at all, and one that fails ends the others of its prompt.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec

from sgl.errors import EmptyPrompt, InternalError, InvalidParameter, SglError
from sgl.grammars.formats import reasoning_format
from sgl.grammars.spec import OPTIONS, PARAMETERS, Constraint, constraint_of
from sgl.lang.graph import (
    DeltaEvent,
    DoneEvent,
    Event,
    FailedEvent,
    Gen,
    Graph,
    LiteralText,
    Node,
    ProgramOptions,
    Sampling,
    StateText,
    Text,
    Tokens,
    ValueEvent,
    lower_samples,
    meta_info,
    plain,
    sampling_from_mapping,
)
from sgl.limits import DEFAULT_LIMITS

Prompt = str | Sequence[int]
Output = dict[str, Any]


class OpenProgram(Protocol):
    """A program under way on the engine: `EngineSession`."""

    def submit(self, graph: Graph, *, finish: bool = False) -> None:
        """Execute it."""

    def read_state(self, branch: int) -> Future[StateText]:
        """The state of a branch after everything submitted so far."""

    def cancel(self) -> None:
        """Stop it."""


class Opener(Protocol):
    """The engine, as far as this module knows it."""

    def open(self, sink: Callable[[Event], None], options: ProgramOptions) -> OpenProgram:
        """Start a program."""


class Call(msgspec.Struct, frozen=True):
    """One prompt with what is asked of it; `before` are the ids that stand before the prompt (of a session's turns).

    `reasoning` is the format of the model's reasoning, behind which the constraint begins.
    """

    prompt: Prompt
    sampling: Sampling
    constraint: Constraint | None
    reasoning: str | None = None
    before: tuple[int, ...] = ()

    def graph(self) -> Graph:
        """The call as a program; its generations stand in the order of the samples."""
        nodes: list[Node] = [Tokens(id=0, token_ids=self.before)] if self.before else []
        if isinstance(self.prompt, str):
            nodes.append(Text(id=len(nodes), segments=(LiteralText(self.prompt),)))
        else:
            nodes.append(Tokens(id=len(nodes), token_ids=tuple(self.prompt)))
        gen = Gen(
            id=len(nodes), name="text", sampling=self.sampling, constraint=self.constraint, reasoning=self.reasoning
        )
        num = self.sampling.n
        return Graph(nodes=(*nodes, *([gen] if num == 1 else lower_samples(gen, range(1, num + 1)))))


def make_calls(
    prompt: str | Sequence[str] | None,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    asked: Mapping[str, Any],
    base: Sampling,
) -> tuple[list[Call], bool]:
    """One call per prompt, and whether the answer is a single output.

    Args:
        asked: sampling fields that hold for every prompt, below its own; `None` is not given.
        base: the engine's defaults.

    Raises:
        InvalidRequest: a wrong prompt or parameter, or more of them than `sgl.limits` allows.
    """
    prompts, single = _prompts(prompt, input_ids)
    if isinstance(sampling_params, Mapping) or sampling_params is None:
        what = _asked(sampling_params or {}, asked, base)
        calls = [Call(each, *what) for each in prompts]
    else:
        params = _as_list("sampling_params", sampling_params)
        if not all(isinstance(each, Mapping) for each in params):
            raise InvalidParameter("sampling_params must be a mapping, or a list of mappings", param="sampling_params")
        if len(params) != len(prompts):
            raise InvalidParameter(
                f"{len(params)} sampling_params for {len(prompts)} prompts",
                hint="pass one mapping for all, or one per prompt",
                param="sampling_params",
            )
        calls = [Call(each, *_asked(own, asked, base)) for each, own in zip(prompts, params, strict=True)]
    if (num := sum(call.sampling.n for call in calls)) > DEFAULT_LIMITS.max_prompts:
        raise _too_many(f"{num} samples", DEFAULT_LIMITS.max_prompts)
    return calls, single and calls[0].sampling.n == 1


def _prompts(
    prompt: str | Sequence[str] | None, input_ids: Sequence[int] | Sequence[Sequence[int]] | None
) -> tuple[list[Prompt], bool]:
    """The prompts, and whether a single one was given."""
    if (prompt is None) == (input_ids is None):
        raise InvalidParameter("pass exactly one of prompt and input_ids", param="prompt")
    prompts: list[Prompt]
    if prompt is not None:
        single = isinstance(prompt, str)
        given = [prompt] if isinstance(prompt, str) else _as_list("prompt", prompt)
        _check_count(given)
        prompts = [plain(each) for each in given]
        if any(not isinstance(each, str) for each in prompts):
            raise InvalidParameter("prompt must be a string or a list of strings", param="prompt")
    else:
        given = _as_list("input_ids", input_ids)
        single = not any(isinstance(each, Iterable) for each in given)
        rows = [given] if single else given
        _check_count(rows)
        prompts = [[plain(i) for i in _as_list("input_ids", ids)] for ids in rows]
        for ids in prompts:
            if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31 for i in ids):
                raise InvalidParameter("input_ids must be lists of non-negative integers", param="input_ids")
    if not prompts or any(len(each) == 0 for each in prompts):
        raise EmptyPrompt("a prompt is empty", hint="pass some text, or at least one token id")
    size = sum(len(each.encode("utf-8", "surrogatepass")) if isinstance(each, str) else len(each) for each in prompts)
    if size > DEFAULT_LIMITS.max_call_tokens:
        raise _too_many(f"prompts of {size} tokens or bytes", DEFAULT_LIMITS.max_call_tokens)
    return prompts, single


def _check_count(prompts: Sequence[Any]) -> None:
    if len(prompts) > DEFAULT_LIMITS.max_prompts:
        raise _too_many(f"{len(prompts)} prompts", DEFAULT_LIMITS.max_prompts)


def _too_many(what: str, most: int) -> InvalidParameter:
    return InvalidParameter(
        f"{what} in one call; at most {most} are allowed", hint="split it into several calls", param="prompt"
    )


def _asked(
    own: Mapping[str, Any], asked: Mapping[str, Any], base: Sampling
) -> tuple[Sampling, Constraint | None, str | None]:
    fields = {**{name: value for name, value in asked.items() if value is not None}, **own}
    constraint = _constraint(fields)
    reasoning = fields.pop("reasoning", None)
    name = reasoning_format(reasoning).name if reasoning is not None else None
    sampling = sampling_from_mapping(fields, base)
    if sampling.return_logprob and sampling.max_new_tokens == 0 and sampling.logprob_start_len == -1:
        sampling = msgspec.structs.replace(sampling, logprob_start_len=0)  # there are none but the prompt's
    return sampling, constraint, name


_KINDS = {
    "prompt": "a string or a list of strings",
    "input_ids": "a list of token ids, or a list of such lists",
    "sampling_params": "a mapping, or a list of mappings",
}


def _as_list(name: str, value: Any) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidParameter(f"{name} is {value!r}; expected {_KINDS[name]}", param=name)
    return list(value)


def _constraint(fields: dict[str, Any]) -> Constraint | None:
    """Take the constraint out of the sampling parameters."""
    return constraint_of({name: fields.pop(name) for name in (*PARAMETERS, *OPTIONS) if name in fields})


# --- running --------------------------------------------------------------------------------------------------------


class Sample:
    """One output of a running call: what there is of it, and all of it once it is done.

    Attributes:
        index: in the flattened outputs.
        value: its event, once it is complete.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.id = uuid.uuid4().hex
        self.value: ValueEvent | None = None
        self.text = ""
        self.ids: tuple[int, ...] = ()

    def partial(self) -> Output:
        """What there is now."""
        meta = {"id": self.id, "finish_reason": None, "completion_tokens": len(self.ids)}
        return {"text": self.text, "output_ids": list(self.ids), "meta_info": meta}

    def output(self, sampling: Sampling, latency_s: float) -> Output:
        """All of it.

        Raises:
            InternalError: the backend ended without its value.
        """
        if self.value is None:
            raise InternalError("the generation ended without a value")
        meta = {"id": self.id, **meta_info(self.value), "e2e_latency": latency_s}
        ids = meta.pop("output_ids")
        if sampling.return_logprob:
            meta.setdefault("output_token_logprobs", [])
        return {"text": self.value.value, "output_ids": ids, "meta_info": meta}


Notify = Callable[["Run", Sample], object]


class Run:
    """One running call: collects its events.

    Attributes:
        samples: its outputs, in order.
        result: the complete outputs, or the error.
    """

    def __init__(self, call: Call, index: int, options: ProgramOptions) -> None:
        self.call = call
        self.samples = [Sample(index + i) for i in range(call.sampling.n)]
        self.result: Future[list[Output]] = Future()
        self.session: OpenProgram | None = None
        self._options = options
        self._started = 0.0
        self._by_node: dict[int, Sample] = {}
        self._notify: Notify | None = None

    def start(self, engine: Opener, notify: Notify | None = None) -> None:
        """Begin; `notify` is called with each sample that has something new, on a thread of the engine."""
        self._notify = notify
        self._started = time.monotonic()
        self.result.set_running_or_notify_cancel()  # a cancelled task cancels the program, not this future
        graph = self.call.graph()
        nodes = [node.id for node in graph.nodes if isinstance(node, Gen)]
        self._by_node = dict(zip(nodes, self.samples, strict=True))
        self.session = engine.open(self._on_event, self._options)
        self._submit(self.session, graph)

    def _submit(self, session: OpenProgram, graph: Graph) -> None:
        session.submit(graph, finish=True)

    def cancel(self) -> None:
        """Stop it, unless it has ended."""
        if self.session is not None and not self.result.done():
            self.session.cancel()

    def _on_event(self, event: Event) -> None:
        match event:
            case DeltaEvent():
                sample = self._by_node[event.node]
                sample.text += event.text
                sample.ids += event.token_ids
                if event.text:
                    self._tell(sample)
            case ValueEvent():
                self._by_node[event.node].value = event
            case FailedEvent():
                self.result.set_exception(SglError.from_info(event.error))
                self._tell(*self.samples)
            case DoneEvent():
                latency_s = time.monotonic() - self._started
                try:
                    self.result.set_result([sample.output(self.call.sampling, latency_s) for sample in self.samples])
                except InternalError as error:
                    self.result.set_exception(error)
                self._tell(*self.samples)
            case _:
                pass

    def _tell(self, *samples: Sample) -> None:
        if self._notify is not None:
            for sample in samples:
                self._notify(self, sample)


def make_runs(calls: Sequence[Call], *, stream: bool, cache_salt: str) -> list[Run]:
    """A run per call; samples are numbered through all of them."""
    options = generate_options(stream=stream, cache_salt=cache_salt)
    runs: list[Run] = []
    index = 0
    for call in calls:
        runs.append(Run(call, index, options))
        index += call.sampling.n
    return runs


def generate_options(*, stream: bool, cache_salt: str) -> ProgramOptions:
    """How the program of a call runs."""
    return ProgramOptions(name="generate", stream=stream, want_text=False, cache_salt=cache_salt)


class Progress:
    """What a stream yields as its runs go on."""

    def __init__(self, runs: Sequence[Run], single: bool) -> None:
        self._single = single
        self._open = {sample.index for run in runs for sample in run.samples}

    @property
    def over(self) -> bool:
        """Every sample was yielded in full."""
        return not self._open

    def outputs(self, run: Run, sample: Sample) -> list[Output]:
        """What to yield for a sample that has something new: nothing, if it was yielded in full already.

        Raises:
            SglError: the sample's run failed.
        """
        if sample.index not in self._open:
            return []
        output = sample.partial()
        if run.result.done():
            output = run.result.result()[sample.index - run.samples[0].index]
            self._open.discard(sample.index)
        return [output if self._single else {**output, "index": sample.index}]


def stream(engine: Opener, runs: Sequence[Run], single: bool) -> Iterator[Output]:
    """Outputs as they grow. Leaving the iterator cancels what still runs."""
    queue: SimpleQueue[tuple[Run, Sample]] = SimpleQueue()
    progress = Progress(runs, single)
    try:
        for run in runs:
            run.start(engine, lambda run, sample: queue.put((run, sample)))
        while not progress.over:
            yield from progress.outputs(*queue.get())
    finally:
        cancel(runs)


async def async_stream(engine: Opener, runs: Sequence[Run], single: bool) -> AsyncIterator[Output]:
    """`stream` for asyncio."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[Run, Sample]] = asyncio.Queue()
    progress = Progress(runs, single)

    def put(run: Run, sample: Sample) -> None:
        try:
            loop.call_soon_threadsafe(queue.put_nowait, (run, sample))
        except RuntimeError:  # the loop was closed: the consumer is gone, and its cancel is on the way
            return

    try:
        for run in runs:
            run.start(engine, put)
        while not progress.over:
            for output in progress.outputs(*await queue.get()):
                yield output
    finally:
        cancel(runs)


def cancel(runs: Sequence[Run]) -> None:
    """Stop the runs that have not ended."""
    for run in runs:
        run.cancel()


def flattened(results: Iterable[list[Output]], single: bool) -> Any:
    """The outputs of all runs in order; the one output for a single prompt with one sample."""
    outputs = [output for result in results for output in result]
    return outputs[0] if single else outputs
