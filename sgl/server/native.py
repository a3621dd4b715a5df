"""SGLang's own routes: `/generate` and those around it.

Owns their bodies. `/generate` is `Engine.generate` over HTTP, field for field; what the two say of a request is the
same text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import msgspec

import sgl
from sgl.errors import Cancelled, EngineBusy, InvalidParameter, Unsupported
from sgl.grammars.spec import PARAMETERS
from sgl.lang.graph import DeltaEvent, Gen, ProgramOptions, ValueEvent, sampling_from_mapping
from sgl.runtime import offline
from sgl.runtime.offline import Output, generate_options, make_calls
from sgl.runtime.rendering import ModelRenderer
from sgl.server.bodies import check_count
from sgl.server.call import Call, Place
from sgl.server.config import effective
from sgl.server.openai.logprobs import check_logprobs, most_logprobs, num_logprobs, token_text
from sgl.server.openai.types import Int64
from sgl.server.routes import Routes
from sgl.server.running import Running, merged

routes = Routes()

MAX_PROMPTS = 1024
"""Prompts of one request: each is a program."""
MAX_TEXTS = 2**14
"""Texts of one `/tokenize`, lists of one `/detokenize`: some 0.3 s of work on a thread."""


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /generate`: a prompt or a list of them; `rid` is for all, or a list with one for each prompt."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    token_ids_logprob: list[int] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    cache_salt: str | None = None
    priority: Int64 | None = None
    # --- refused by name ---
    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    lora_path: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: bool = False
    return_routed_experts: bool = False


_REFUSED = {
    "input_embeds": "tensors are not taken",
    "image_data": "images are not served by this engine yet",
    "audio_data": "audio is not served by this engine",
    "video_data": "videos are not served by this engine yet",
    "lora_path": "adapters are not served here",
    "return_hidden_states": "hidden states are not returned",
    "return_routed_experts": "routed experts are not returned",
}


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /tokenize`: a text or a list of them (`text` and `prompt` are the same).

    Attributes:
        add_special_tokens: begin as a prompt of plain text does, with BOS where the model has one there.
    """

    text: str | list[str] | None = None
    prompt: str | list[str] | None = None
    model: str | None = None
    add_special_tokens: bool = False


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /detokenize`: token ids, or a list of lists."""

    tokens: list[Any]
    model: str | None = None
    skip_special_tokens: bool = True


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /abort_request`: one request by its id, or all of them."""

    rid: str = ""
    abort_all: bool = False


class StartProfileRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /start_profile`: see `sgl.Engine.start_profile`; `output_dir` is a name below `--profiler-dir`."""

    output_dir: str | None = None
    num_steps: int | None = None
    start_step: int | None = None
    activities: list[str] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None


@routes.post("/generate", "user", GenerateRequest)
async def generate(call: Call, body: GenerateRequest) -> Any:
    """Continue prompts (see `sgl.Engine.generate`)."""
    for name, why in _REFUSED.items():
        if getattr(body, name):
            raise Unsupported(f"{name}: {why}", hint="leave it out", param=name)
    if (body.text is None) == (body.input_ids is None):
        raise InvalidParameter("pass exactly one of text and input_ids", param="text")
    if not isinstance(body.rid, list):
        call.name(body.rid)
    call.constraint = _constraint_field(body.sampling_params)
    if body.custom_logit_processor is not None and not isinstance(body.custom_logit_processor, str):
        raise InvalidParameter(
            "custom_logit_processor must be the name of a registered processor", param="custom_logit_processor"
        )
    asked = {
        "return_logprob": body.return_logprob,
        "logprob_start_len": body.logprob_start_len,
        "top_logprobs_num": body.top_logprobs_num,
        "token_ids_logprob": body.token_ids_logprob,
        "custom_logit_processor": body.custom_logit_processor,
    }
    base = sampling_from_mapping(call.server.engine.sampling_defaults())
    calls, single = await call.apart(make_calls, body.text, body.input_ids, body.sampling_params, asked, base)
    if len(calls) > MAX_PROMPTS:
        raise InvalidParameter(
            f"{len(calls)} prompts in one request; at most {MAX_PROMPTS} are allowed", hint="send several", param="text"
        )
    rids = _rids(call, body.rid, len(calls))
    context_len = call.server.context_len
    check_logprobs(sum(most_logprobs(each.sampling, len(each.prompt), context_len) for each in calls))
    options = msgspec.structs.replace(
        generate_options(stream=body.stream, cache_salt=call.salt(body.cache_salt)), priority=body.priority or 0
    )
    renderer = await call.server.renderer() if body.return_text_in_logprobs else None
    batch = _Batch(call, calls, single, options, rids, renderer)
    if body.stream:
        return call.stream(batch.stream())
    return await call.while_connected(batch.whole())


def _rids(call: Call, given: str | list[str] | None, num: int) -> list[str | None]:
    """The client's own id of each prompt; those of a list are claimed here."""
    if not isinstance(given, list):
        return [given] * num
    if len(given) != num or len(set(given)) != num:
        raise InvalidParameter(
            f"rid has {len(set(given))} different ids for {num} prompts", hint="give one for each", param="rid"
        )
    for rid in given:
        call.claim(rid)
    return [*given]


def _constraint_field(params: dict[str, Any] | list[dict[str, Any]] | None) -> str:
    """Where the constraint of a request is; of several with one each, the list."""
    if isinstance(params, list):
        return "sampling_params"
    name = next((name for name in PARAMETERS if (params or {}).get(name) is not None), None)
    return "sampling_params" if name is None else f"sampling_params.{name}"


class _Batch:
    """The running calls of one request."""

    def __init__(
        self,
        call: Call,
        calls: Sequence[offline.Call],
        single: bool,
        options: ProgramOptions,
        rids: Sequence[str | None],
        renderer: ModelRenderer | None,
    ) -> None:
        self._call = call
        self._calls = calls
        self._single = single
        self._rids = rids
        self._renderer = renderer
        self._start = time.monotonic()
        self._programs: list[Running] = []
        self._samples: list[dict[int, offline.Sample]] = []
        index = 0
        for each, rid in zip(calls, rids, strict=True):
            graph = each.graph()
            self._programs.append(call.start(graph, options, rid=rid))
            own = {}
            for node in graph.nodes:
                if isinstance(node, Gen):
                    own[node.id] = offline.Sample(index)
                    index += 1
            self._samples.append(own)

    async def whole(self) -> Any:
        """All outputs; the one output of a single prompt."""
        num = 0
        async for index, event in merged(self._programs):
            if isinstance(event, ValueEvent):
                self._samples[index][event.node].value = event
                num += num_logprobs(event)
        self._call.weigh(num)
        return await self._call.apart(self._outputs)

    def _outputs(self) -> Any:
        outputs = [self._output(index, node) for index, own in enumerate(self._samples) for node in own]
        return outputs[0] if self._single else outputs

    async def stream(self) -> AsyncGenerator[Any, None]:
        """Outputs as they grow; `text` is all of it so far."""
        async for index, event in merged(self._programs):
            match event:
                case DeltaEvent():
                    sample = self._samples[index][event.node]
                    sample.text += event.text
                    sample.ids += event.token_ids
                    if event.text:
                        yield self._numbered(self._named(sample.partial(), index), sample.index)
                case ValueEvent():
                    sample = self._samples[index][event.node]
                    sample.value = event
                    yield self._numbered(self._output(index, event.node), sample.index)
                case _:
                    pass

    def _named(self, output: Output, prompt: int) -> Output:
        if (rid := self._rids[prompt]) is not None:
            output["meta_info"]["id"] = rid
        return output

    def _numbered(self, output: Output, index: int) -> Output:
        return output if self._single else {**output, "index": index}

    def _output(self, index: int, node: int) -> Output:
        sample = self._samples[index][node]
        output = self._named(sample.output(self._calls[index].sampling, time.monotonic() - self._start), index)
        if self._renderer is not None:
            for name, value in output["meta_info"].items():
                if name.endswith("_logprobs") and value:
                    output["meta_info"][name] = _with_text(value, self._renderer)
        return output


def _with_text(entries: Any, renderer: ModelRenderer) -> Any:
    """Triples (logprob, token id, None), nested in lists as they may be, with their tokens' texts."""
    if isinstance(entries, tuple):
        return (entries[0], entries[1], token_text(renderer, entries[1])[0])
    return [_with_text(entry, renderer) for entry in entries]


@routes.post("/tokenize", "user", TokenizeRequest)
async def tokenize(call: Call, body: TokenizeRequest) -> Any:
    """The token ids of a text; special tokens in it are plain characters."""
    call.server.check_model(body.model)
    texts = body.text if body.text is not None else body.prompt
    if texts is None or (body.text is not None and body.prompt is not None):
        raise InvalidParameter("give one of text and prompt", param="text")
    many = [texts] if isinstance(texts, str) else texts
    check_count("text" if body.prompt is None else "prompt", len(many), MAX_TEXTS)
    tokenizer = (await call.server.renderer()).tokenizer
    first = [tokenizer.bos_id] if body.add_special_tokens and tokenizer.add_bos else []
    ids = await asyncio.to_thread(lambda: [[*first, *tokenizer.encode(text)] for text in many])
    count = [len(each) for each in ids]
    is_single = isinstance(texts, str)
    return {
        "tokens": ids[0] if is_single else ids,
        "count": count[0] if is_single else count,
        "max_model_len": call.server.context_len,
    }


@routes.post("/detokenize", "user", DetokenizeRequest)
async def detokenize(call: Call, body: DetokenizeRequest) -> Any:
    """The text of token ids."""
    call.server.check_model(body.model)
    tokenizer = (await call.server.renderer()).tokenizer
    single = not any(isinstance(each, list) for each in body.tokens)
    rows = [body.tokens] if single else body.tokens
    check_count("tokens", len(rows), MAX_TEXTS)

    def decoded() -> list[str]:
        for ids in rows:
            check_ids("tokens", ids, tokenizer.vocab_size)
        return [tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens) for ids in rows]

    texts = await asyncio.to_thread(decoded)
    return {"text": texts[0], "prompt": texts[0]} if single else {"text": texts}


def check_ids(name: str, ids: Any, vocab_size: int) -> None:
    """Raise `InvalidParameter` unless `ids` is a list of ids in the vocabulary."""
    if not isinstance(ids, list):
        raise InvalidParameter(f"{name} mixes token ids and lists of them", param=name)
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise InvalidParameter(
                f"{name} has {token_id!r}; expected token ids from 0 to {vocab_size - 1}", param=name
            )


@routes.get("/get_model_info", "user")
async def get_model_info(call: Call) -> Any:
    """What the model is."""
    info = call.server.info
    return {
        "model_path": info["model_path"],
        "tokenizer_path": info["resolved"].get("tokenizer_path") or info["model_path"],
        "is_generation": call.server.is_generation,
        "preferred_sampling_params": dict(info["sampling_defaults"]) or None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": info["architecture"],
        "architectures": [info["architecture"]],
        "embedding": not call.server.is_generation,
    }


@routes.get("/server_info", "user")
async def server_info(call: Call) -> Any:
    """What runs here, with which settings and why; secrets are not in it."""
    return await _server_info(call)


@routes.get("/get_server_info", "user")
async def get_server_info(call: Call) -> Any:
    """As `/server_info`."""
    return await _server_info(call)


async def _server_info(call: Call) -> dict[str, Any]:
    stats = await call.server.engine.async_stats()
    return {
        "version": sgl.__version__,
        **call.server.engine.server_info(),
        "server": effective(call.server.config),
        "stats": stats,
    }


@routes.post("/flush_cache", "admin", query=("timeout",))
async def flush_cache(call: Call) -> Any:
    """Drop what no live program holds; `?timeout=S` waits so long for an idle engine."""
    try:
        wait_s = float(call.request.query_params.get("timeout", "0"))
    except ValueError:
        raise InvalidParameter("timeout is no number", param="timeout") from None
    try:
        await call.while_connected(call.server.engine.async_flush_cache(wait_s=wait_s))
    except EngineBusy as error:
        hint = "wait for them, or give ?timeout=SECONDS (RemoteEngine's wait_s) to let the engine wait"
        raise EngineBusy(error.message, hint=hint, **error.details) from None
    return {"status": "ok"}


@routes.post("/start_profile", "admin", StartProfileRequest)
async def start_profile(call: Call, body: StartProfileRequest) -> Any:
    """Profile steps; the answer names the trace that will be written on the server's machine."""
    engine = call.server.engine
    folder = trace_folder(call.server.profiler_dir, body.output_dir)
    path = await asyncio.to_thread(
        lambda: engine.start_profile(
            str(folder),
            num_steps=body.num_steps,
            start_step=body.start_step,
            activities=("CPU", "GPU") if body.activities is None else body.activities,
            with_stack=bool(body.with_stack),
            record_shapes=bool(body.record_shapes),
        )
    )
    return {"status": "ok", "path": path}


def trace_folder(base: Path, name: str | None) -> Path:
    """Where a trace goes: `base`, or a folder below it.

    Raises:
        InvalidParameter: the name leads out of `base`; what a request says does not choose where files are made.
    """
    given = Path(name or "")
    try:
        folder = (base / given).resolve()
        is_below = not given.is_absolute() and folder.is_relative_to(base.resolve())
    except (OSError, ValueError):  # a loop of links, a NUL
        is_below = False
    if not is_below:
        raise InvalidParameter(
            f"output_dir is {name!r}; expected a relative name below the server's folder of profiles",
            hint="leave it out, or start the server with another --profiler-dir",
            param="output_dir",
        )
    return folder


@routes.post("/stop_profile", "admin")
async def stop_profile(call: Call) -> Any:
    """End a profile that has no number of steps."""
    return {"status": "ok", "path": await asyncio.to_thread(call.server.engine.stop_profile)}


@routes.post("/abort_request", "user", AbortRequest, goes_on=True)
async def abort_request(call: Call, body: AbortRequest) -> Any:
    """End a running request; no error when there is none."""
    if body.abort_all:
        raise InvalidParameter("abort_all is for administrators", hint="POST /abort_all_requests", param="abort_all")
    return {"aborted": call.server.abort(Place(call.tenant, body.rid))}


@routes.post("/abort_all_requests", "admin", goes_on=True)
async def abort_all_requests(call: Call) -> Any:
    """End every running request."""
    return {"aborted": call.server.abort_all(Cancelled("aborted by /abort_all_requests"))}
