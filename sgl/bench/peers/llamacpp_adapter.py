"""llama.cpp as a side, through the wheel `xllamacpp`: the same GGUF file, its own server inside the side's process.

The wheel offers llama.cpp's server and no way around it. A call of ours is one request to its own `/completion` over a
connection on the loopback: all prompts together as token ids, one slot each, tokens back. To llama.cpp's own work that
adds one JSON object each way and its detokenizer, below a millisecond a call. The connection stays open between calls
that follow each other; the server closes it after five idle seconds, as long as one turn of our side may take.

Slots and context are made for the case (`tune`): a context longer than needed would cost it time. Keys and values are
float16, llama.cpp's default and its fastest. The file is read into memory at start, not mapped, so that no page of it
is waited for later.
"""

from __future__ import annotations

import http.client
import itertools
import json
import time
from typing import Any

import msgspec

from sgl.bench.peers.adapter import Adapter
from sgl.bench.peers.messages import Load, Loaded, Tuned
from sgl.bench.peers.weights import file_digest
from sgl.errors import BenchError, InvalidParameter

_CHOICES = {"flash": ("on", "off"), "unified": ("no", "yes"), "ubatch": ("512", "1024", "2048")}
_TRIES = 2
"""Of each candidate, the best of which counts, after one that warms it up."""
_SPARE = 8
"""Tokens of a slot beyond prompt and output; the server wants some."""
_KEEP_S = 2.0
"""Idle time after which a connection is made anew: the server drops it at five seconds."""
_READY_S = 120.0
"""For a server to load the model."""


class Shape(msgspec.Struct, frozen=True):
    """What a server is made for: prompts at a time, and tokens of each with what continues it."""

    slots: int = 1
    slot_len: int = 2048

    def holds(self, prompts: list[list[int]], new_tokens: int) -> bool:
        """Whether such a call fits."""
        return len(prompts) <= self.slots and max(map(len, prompts)) + new_tokens + _SPARE <= self.slot_len


class LlamaCppAdapter(Adapter):
    """`settings`: `flash` (attention: on, off), `unified` (one KV buffer for all slots: no, yes), `ubatch` (tokens
    computed at a time: 512, 1024, 2048). Flash attention and buffer are tuned unless given."""

    def __init__(self, load: Load) -> None:
        self._fixed = _checked(load.settings)
        self._load = load
        self._chosen = {"flash": "on", "unified": "no", "ubatch": "512", **self._fixed}
        self._shape = Shape()
        self._server: Any = None
        self._connection: http.client.HTTPConnection | None = None
        self._used_at = 0.0
        self._start()

    def loaded(self) -> Loaded:
        """As the server was started; it has no way to be asked. `dtype` is that of keys and values."""
        import xllamacpp

        return Loaded(
            vocab_size=self._vocab_size(),
            dtype="float16",
            device="cpu",
            num_threads=self._load.num_threads,
            quantization="gguf",
            details={**self._chosen, "system": xllamacpp.get_system_info().strip()},
        )

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """One request. The prompt cache is off, and end-of-sequence is ignored."""
        if not self._shape.holds(prompts, new_tokens):
            self._fit(prompts, new_tokens)
        request = {
            "prompt": prompts,
            "n_predict": new_tokens,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "return_tokens": True,
            "cache_prompt": False,
        }
        told = self._ask("POST", "/completion", request)
        return [row["tokens"] for row in sorted(_rows(told), key=lambda row: row["index"])]

    def tune(self, prompts: list[list[int]], new_tokens: int) -> Tuned:
        """Make a server for this case with each of the settings that are open, and keep the fastest."""
        options = {**_CHOICES, **{name: (value,) for name, value in self._fixed.items()}}
        if len(prompts) == 1:
            options["unified"] = (self._chosen["unified"],)
        tried: dict[str, float] = {}
        candidates = {
            f"flash {flash}, unified {unified}": {**self._chosen, "flash": flash, "unified": unified}
            for flash, unified in itertools.product(options["flash"], options["unified"])
        }
        # Room for whole outputs: those that are tuned with may be shorter.
        room = max(new_tokens, 256)
        for name, self._chosen in candidates.items():
            self._fit(prompts, room)
            self.generate(prompts, min(new_tokens, 2))
            tried[name] = min(self._seconds(prompts, new_tokens) for _ in range(_TRIES))
        best = min(tried, key=tried.__getitem__)
        if self._chosen is not candidates[best]:
            self._chosen = candidates[best]
            self._fit(prompts, room)
        return Tuned(dict(self._chosen), tried)

    def weights_digest(self) -> str:
        """Of the file: its blocks are what is computed with."""
        return file_digest(self._load.model_path)

    def close(self) -> None:
        """End the server."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._server = None  # its destructor ends its threads

    def _seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        start = time.perf_counter()
        self.generate(prompts, new_tokens)
        return time.perf_counter() - start

    def _fit(self, prompts: list[list[int]], new_tokens: int) -> None:
        """A new server in the place of the one that runs, with what is chosen, and made for such calls."""
        self._shape = Shape(len(prompts), max(map(len, prompts)) + new_tokens + _SPARE)
        self.close()
        self._start()

    def _start(self) -> None:
        import xllamacpp

        params = server_params(
            self._load.model_path,
            self._load.num_threads,
            self._shape.slots,
            self._shape.slot_len,
            flash=self._chosen["flash"] == "on",
        )
        params.n_ubatch = int(self._chosen["ubatch"])
        params.kv_unified = self._chosen["unified"] == "yes"
        params.cache_ram_mib = 0  # no prompt is kept for later
        self._server = xllamacpp.Server(params)
        self._connection = http.client.HTTPConnection(self._server.listening_address.removeprefix("http://"))
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        """The server answers 503 while it loads."""
        deadline = time.monotonic() + _READY_S
        while self._exchange("GET", "/health")[0] != http.HTTPStatus.OK:
            if time.monotonic() > deadline:
                raise BenchError(
                    f"llama.cpp's server with {self._shape.slots} slots of {self._shape.slot_len} tokens was not ready "
                    f"in {_READY_S:.0f} s"
                )
            time.sleep(0.01)

    def _vocab_size(self) -> int:
        (model,) = self._ask("GET", "/v1/models")["data"]
        return int(model["meta"]["n_vocab"])

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        status, text = self._exchange(method, path, body)
        if status != http.HTTPStatus.OK:
            raise BenchError(f"llama.cpp answered {status}: {text[:200]!r}")
        return json.loads(text)

    def _exchange(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """One request; its status and what came back."""
        connection = self._connection
        if connection is None:
            raise BenchError("llama.cpp's server is closed")
        if time.monotonic() - self._used_at > _KEEP_S:
            connection.close()  # the next request opens another
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise BenchError(
                f"llama.cpp's server with {self._shape.slots} slots of {self._shape.slot_len} tokens dropped the "
                f"connection: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._used_at = time.monotonic()


def server_params(path: str, threads: int, slots: int, slot_len: int, *, flash: bool) -> Any:
    """`xllamacpp.CommonParams` of a server with so many slots of so many tokens each."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel = slots
    params.n_ctx = slots * slot_len
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads = threads
    kind = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = kind.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else kind.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE
    params.fit_params = False
    params.ui = False
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.verbosity = -1
    return params


def _rows(told: Any) -> list[dict[str, Any]]:
    """One prompt gives an object, several give a list."""
    rows: list[dict[str, Any]] = told if isinstance(told, list) else [told]
    return rows


def _checked(settings: dict[str, Any]) -> dict[str, str]:
    for name, value in settings.items():
        if value not in _CHOICES.get(name, ()):
            raise InvalidParameter(
                f"peer setting {name}={value}; known are "
                + ", ".join(f"{each}={'|'.join(values)}" for each, values in _CHOICES.items()),
                param="peer_setting",
            )
    return settings
