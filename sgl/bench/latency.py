"""`sgl bench latency`: what one user waits for, as it is on this machine.

Owns four measurements: `import sgl` in a fresh process, engine start to first token, prefill, and decode at some batch
sizes. Each is repeated and reported with its median and all samples; nothing is compared with a target. Prompts are
pseudo-random token ids from a fixed seed, all different, so that the prefix cache cannot answer for the model.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import Any

import msgspec

import sgl
from sgl.bench.prompts import Prompts
from sgl.bench.samples import Sampled, import_seconds, measure
from sgl.errors import InvalidParameter
from sgl.runtime.engine import Engine

PROMPT_LEN = 32
"""Tokens of each prompt in the decode measurement."""


class LatencyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, on what."""

    model: str
    engine: dict[str, Any]
    versions: dict[str, str]
    repeats: int
    measured: tuple[Sampled, ...]


def start_seconds(fields: Mapping[str, Any]) -> float:
    """From nothing to the first token of an engine of its own (weights are in the cache by then)."""
    start = time.perf_counter()
    with Engine(**fields) as engine:
        engine.generate("Hello", {"max_new_tokens": 1, "temperature": 0})
        return time.perf_counter() - start


def generate_seconds(engine: Engine, prompts: list[list[int]], new_tokens: int) -> float:
    """All prompts together, `new_tokens` each, on an empty cache."""
    engine.flush_cache(wait_s=10.0)
    sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    start = time.perf_counter()
    engine.generate(input_ids=prompts, sampling_params=sampling)
    return time.perf_counter() - start


def run(
    fields: Mapping[str, Any],
    *,
    repeats: int = 3,
    prefill_len: int = 512,
    decode_len: int = 64,
    batches: Iterable[int] = (1, 8),
    progress: Callable[[str], None] = lambda what: None,
) -> LatencyReport:
    """Measure everything; `fields` are those of `EngineConfig`.

    Raises:
        InvalidParameter: nothing to repeat or too few tokens to measure.
        SglError: the engine's own, when it cannot start.
    """
    if repeats < 1 or prefill_len < 1 or decode_len < 2:
        raise InvalidParameter(
            f"repeats {repeats}, prefill_len {prefill_len}, decode_len {decode_len}; expected at least 1, 1 and 2",
            param="repeats",
        )
    progress("import")
    measured = [measure("import sgl", "s", repeats, import_seconds)]
    with Engine(**fields) as engine:
        info = dict(engine.server_info())
        prompts = Prompts(int(info["vocab_size"]))
        progress("prefill")
        generate_seconds(engine, prompts.take(1, PROMPT_LEN), 4)  # first use of every kernel is not what is asked for

        def prefill() -> float:
            return prefill_len / generate_seconds(engine, prompts.take(1, prefill_len), 1)

        measured.append(measure(f"prefill, {prefill_len} tokens", "tokens/s", repeats, prefill))
        for batch in batches:
            progress(f"decode at batch {batch}")

            def decode(batch: int = batch) -> float:
                first = generate_seconds(engine, prompts.take(batch, PROMPT_LEN), 1)
                whole = generate_seconds(engine, prompts.take(batch, PROMPT_LEN), decode_len)
                return batch * (decode_len - 1) / max(whole - first, 1e-9)

            measured.append(measure(f"decode, batch {batch}", "tokens/s", repeats, decode))
    progress("engine start")
    measured.insert(1, measure("engine start to first token", "s", repeats, lambda: start_seconds(fields)))
    resolved = info["resolved"]
    return LatencyReport(
        model=info["model"],
        engine={name: resolved[name] for name in ("device", "dtype", "num_threads")},
        versions={"sgl": sgl.__version__, "torch": version("torch"), "python": platform.python_version()},
        repeats=repeats,
        measured=tuple(measured),
    )
