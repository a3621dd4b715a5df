"""The adapters of llama.cpp and vLLM against doubles of their packages, and the folder that is made of a GGUF file."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sgl.bench.peers.llamacpp_adapter import LlamaCppAdapter
from sgl.bench.peers.messages import Load
from sgl.bench.peers.vllm_adapter import VllmAdapter
from sgl.errors import BenchError, InvalidParameter

LOAD = Load(model_path="m.gguf", dtype="bfloat16", device="cpu", num_threads=2)


class Handler(BaseHTTPRequestHandler):
    """llama.cpp's server as far as the adapter knows it: continues by counting up, answers in any order."""

    protocol_version = "HTTP/1.1"

    loading = False

    def do_GET(self) -> None:
        if self.path == "/health" and self.loading:
            self._answer({"error": "loading model"}, 503)
            return
        self._answer({"data": [{"meta": {"n_vocab": 512}}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        params = self.server.params  # type: ignore[attr-defined]
        if any(len(prompt) + asked["n_predict"] > params.n_ctx / params.n_parallel for prompt in asked["prompt"]):
            self.send_error(400, "too long")
            return
        rows = [
            {"index": i, "tokens": [prompt[-1] + n + 1 for n in range(asked["n_predict"])]}
            for i, prompt in enumerate(asked["prompt"])
        ]
        self._answer(rows[0] if len(rows) == 1 else rows[::-1])

    def _answer(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A package `xllamacpp`; the parameters of each server that was started."""
    made: list[Any] = []
    servers: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def server(params: Any) -> Any:
        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        http.daemon_threads = True
        http.params = params  # type: ignore[attr-defined]
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        servers.append((http, thread))
        made.append(params)
        return SimpleNamespace(listening_address=f"http://127.0.0.1:{http.server_port}")

    package: Any = ModuleType("xllamacpp")
    package.Server = server
    package.CommonParams = lambda: SimpleNamespace(
        model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()
    )
    package.llama_flash_attn_type = SimpleNamespace(LLAMA_FLASH_ATTN_TYPE_ENABLED=1, LLAMA_FLASH_ATTN_TYPE_DISABLED=0)
    package.llama_load_mode = SimpleNamespace(LLAMA_LOAD_MODE_NONE=0)
    package.get_system_info = lambda: "CPU : AVX2 = 1 "
    monkeypatch.setitem(sys.modules, "xllamacpp", package)
    yield made
    for http, thread in servers:
        http.shutdown()
        thread.join()
        http.server_close()


def test_llamacpp_gets_slots_for_the_call_and_answers_in_order(started: list[Any]) -> None:
    adapter = LlamaCppAdapter(LOAD)
    loaded = adapter.loaded()
    assert (loaded.vocab_size, loaded.dtype, loaded.quantization) == (512, "float16", "gguf")
    assert adapter.generate([[5, 6]], 3) == [[7, 8, 9]]
    assert len(started) == 1
    assert adapter.generate([[5, 6], [20, 21], [30, 31]], 2) == [[7, 8], [22, 23], [32, 33]]
    assert [params.n_parallel for params in started] == [1, 3]
    assert adapter.preferred([[1, 2, 9, 10]], 1) == [[3, 10, 11]]
    last = started[-1]
    assert (last.cpuparams.n_threads, last.cpuparams_batch.n_threads, last.kv_unified) == (2, 2, False)
    adapter.close()
    with pytest.raises(BenchError, match="server is closed"):
        adapter.generate([[5]], 1)


def test_llamacpp_tunes_what_is_open_and_keeps_room_for_whole_outputs(started: list[Any]) -> None:
    adapter = LlamaCppAdapter(Load(model_path="m.gguf", num_threads=2, settings={"flash": "off"}))
    one, two = adapter.tune([[1] * 8], 4), adapter.tune([[1] * 8] * 2, 4)
    assert list(one.tried) == ["flash off, unified no"]
    assert list(two.tried) == ["flash off, unified no", "flash off, unified yes"]
    assert two.chosen == {"flash": "off", "unified": two.chosen["unified"], "ubatch": "512"}
    assert started[-1].kv_unified == (two.chosen["unified"] == "yes")
    servers = len(started)
    assert len(adapter.generate([[1] * 8] * 2, 200)[0]) == 200
    assert len(started) == servers, "a longer output after tuning must not start a server inside a measurement"
    adapter.close()


def test_llamacpp_is_asked_over_a_connection_that_its_server_has_not_dropped(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("sgl.bench.peers.llamacpp_adapter.time.monotonic", lambda: clock[0])
    adapter = LlamaCppAdapter(LOAD)
    assert adapter._connection is not None
    kept = adapter._connection.sock
    adapter.generate([[5]], 1)
    assert adapter._connection.sock is kept
    clock[0] += 6.0  # the other side's turn
    kept.shutdown(socket.SHUT_RDWR)
    assert adapter.generate([[5]], 2) == [[6, 7]]
    assert adapter._connection.sock is not kept
    adapter._connection.sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(BenchError, match="with 1 slots of 2048 tokens dropped the connection"):
        adapter.generate([[5]], 1)
    adapter.close()


def test_a_llamacpp_that_never_gets_ready_is_an_error(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "loading", True)
    monkeypatch.setattr("sgl.bench.peers.llamacpp_adapter._READY_S", 0.02)
    with pytest.raises(BenchError, match="was not ready in"):
        LlamaCppAdapter(LOAD)


def test_what_llamacpp_refuses_is_an_error(started: list[Any]) -> None:
    adapter = LlamaCppAdapter(LOAD)
    started[0].n_ctx = 1
    with pytest.raises(BenchError, match="answered 400"):
        adapter.generate([[5, 6]], 3)
    adapter.close()


@pytest.mark.parametrize("kind", [LlamaCppAdapter, VllmAdapter])
def test_a_wrong_setting_is_refused_before_anything_is_imported(kind: type[Any]) -> None:
    with pytest.raises(InvalidParameter, match="known are"):
        kind(Load(model_path="m", num_threads=1, settings={"speed": "high"}))


def test_vllm_is_run_without_tokenizer_and_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class LLM:
        def __init__(self, **options: Any) -> None:
            made.append(options)
            config = SimpleNamespace(get_vocab_size=lambda: 512, dtype="torch.bfloat16")
            self.llm_engine = SimpleNamespace(model_config=config)

        def generate(self, prompts: list[dict[str, list[int]]], how: Any, use_tqdm: bool) -> list[Any]:
            last = [prompt["prompt_token_ids"][-1] for prompt in prompts]
            rows = [[token + n + 1 for n in range(how.max_tokens)] for token in last]
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=row)]) for row in rows]

    package: Any = ModuleType("vllm")
    package.LLM = LLM
    package.SamplingParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    adapter = VllmAdapter(Load(model_path="m", dtype="bfloat16", num_threads=2, settings={"eager": "yes"}))
    (options,) = made
    assert options["skip_tokenizer_init"]
    assert options["enforce_eager"]
    assert not options["enable_prefix_caching"]
    assert adapter.loaded().dtype == options["dtype"] == "bfloat16"
    assert adapter.generate([[1, 2], [8]], 2) == [[3, 4], [9, 10]]
