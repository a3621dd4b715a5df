"""`sgl bench gpu`: whether an engine is right on this GPU and how near it comes to what the GPU can do, in one go.

Owns the list of parts, what each measures and the goals beside the figures; the measuring is that of the other modules
here. Parts run one after another in this process and its engines' workers, each within a time of its own; what fails or
runs out of time is told in its place, and the next part goes on. The report is handed out after every part, so that a
run that is ended keeps what it had.

Models are shapes with random weights, whose vocabularies are as large as the real ones'; `correct` reads the model that
was given. Floors follow from what has to be moved and computed, and from the ceilings of the same run.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgspec

from sgl.bench.ceilings import Ceilings, measure_ceilings
from sgl.bench.floors import SHAPES, mixed_floor_s, mixed_lengths, prefill_flops
from sgl.bench.harness import PairPlan
from sgl.bench.load import CleanRule
from sgl.bench.products import ProductRate, compare_products, shapes_of_8b
from sgl.bench.provenance import Provenance, provenance
from sgl.bench.quality import TEXT
from sgl.bench.steps import HOST_CALLS, StepBench, StepTimes
from sgl.errors import ConfigError, ModelError, SglError
from sgl.runtime.config import config_from_mapping
from sgl.runtime.engine import Engine
from sgl.runtime.loading.facts import cpu_count
from sgl.runtime.loading.sources import locate


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured. The defaults are what the goals are about; tests take less, on a CPU.

    Attributes:
        large, small: names of `SHAPES`, or `dummy`.
        rows, context, steps, rounds: of decoding; each variant has its turn in every round.
        chunk: tokens of a prompt that is computed as one chunk.
        prompts, new_tokens: whose greedy tokens are compared.
        mixed: sequences of the mixed benchmark, and their longest prompt and output.
        apart: prompts that share nothing, their tokens and those of their outputs, for `cache`.
        scale: share of each workload's tokens (`sgl bench program`).
        programs_s, comparison_s: seconds of `programs`, and of one of its comparisons, at most.
        workloads: of these names; all of them for none.
        pairs: of each comparison in pairs.
    """

    large: str = "llama-3-8b"
    small: str = "qwen3-0.6b"
    device: str = "cuda"
    rows: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 1024
    steps: int = 40
    rounds: int = 3
    chunk: int = 8192
    prompts: int = 50
    new_tokens: int = 64
    mixed: tuple[int, int, int] = (256, 1024, 1024)
    apart: tuple[int, int, int] = (96, 512, 160)
    scale: float = 0.02
    programs_s: float = 210.0
    comparison_s: float = 20.0
    workloads: tuple[str, ...] = ()
    pairs: int = 3


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number; `goal` is what it should be at least, or with `at_most` at most."""

    what: str
    value: float
    unit: str = ""
    goal: float | None = None
    at_most: bool = False

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is reached; `None` without one."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """A part that ran, or why it ended early (`error`; figures until then are kept)."""

    name: str
    seconds: float
    figures: tuple[Figure, ...]
    details: dict[str, Any] = {}
    error: str = ""


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `sgl bench gpu` found so far."""

    card: str
    provenance: Provenance
    sizes: Sizes
    ceilings: Ceilings | None
    parts: tuple[PartReport, ...]


def run(
    fields: Mapping[str, Any],
    *,
    parts: Sequence[str] = (),
    sizes: Sizes | None = None,
    budget_s: float = 480.0,
    ceilings: Ceilings | None = None,
    partial: Callable[[GpuReport], None] = lambda report: None,
    progress: Callable[[str], None] = lambda what: None,
) -> GpuReport:
    """Run the parts.

    Args:
        fields: of `EngineConfig`: the model of `correct`, and options of all engines.
        parts: some of `PARTS`, in that order; all by default.
        budget_s: after so many seconds no further part is begun, nor a further variant.
        ceilings: of the device; measured if not given.
        partial: gets the report after each part.

    Raises:
        ConfigError: an unknown part, or no CUDA device.
    """
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"part {part!r} is unknown", hint=f"use some of {', '.join(PARTS)}", param="part")
    sizes = sizes or Sizes()
    if sizes.device == "cuda":
        _require_gpu()
        if ceilings is None:
            progress("measuring: ceilings")
            ceilings = measure_ceilings()
    bench = _Bench(dict(fields), sizes, ceilings, time.monotonic() + budget_s, progress)
    record = provenance((), {}, ("triton",))
    found: list[PartReport] = []

    def report() -> GpuReport:
        card = ceilings.card if ceilings is not None else sizes.device
        return GpuReport(card=card, provenance=record, sizes=sizes, ceilings=ceilings, parts=tuple(found))

    for name in PARTS:
        if parts and name not in parts:
            continue
        found.append(bench.part(name))
        partial(report())
    bench.close()
    return report()


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "no CUDA device was found, and this command measures one",
            hint="run it on a machine with an NVIDIA GPU and torch's CUDA build; `sgl bench throughput` measures a CPU",
            param="device",
        )


class _Bench:
    """What the parts share, and the parts."""

    def __init__(
        self,
        fields: dict[str, Any],
        sizes: Sizes,
        ceilings: Ceilings | None,
        until: float,
        progress: Callable[[str], None],
    ) -> None:
        self._fields = fields
        self._sizes = sizes
        self._ceilings = ceilings
        self._until = until
        self._progress = progress
        self._steps: tuple[str, StepBench] | None = None
        self._figures: list[Figure] = []
        self._details: dict[str, Any] = {}

    def part(self, name: str) -> PartReport:
        """Run one part; an error of its own ends it alone."""
        self._figures, self._details = [], {}
        start = time.monotonic()
        error = ""
        if start > self._until:
            error = "not begun: the time was used up"
        else:
            self._progress(f"part {name}")
            try:
                PARTS[name](self)
            except SglError as failure:
                error = f"{failure.code}: {failure.message}"
            except (RuntimeError, MemoryError) as failure:  # what torch, Triton and CUDA raise
                error = f"{type(failure).__name__}: {failure}"
        return PartReport(
            name=name,
            seconds=time.monotonic() - start,
            figures=tuple(self._figures),
            details=self._details,
            error=error,
        )

    def close(self) -> None:
        """Give the model of the steps back."""
        if self._steps is not None:
            self._steps[1].close()
            self._steps = None
            gc.collect()
            if self._sizes.device == "cuda":
                import torch

                torch.cuda.empty_cache()

    # --- parts ---

    def correct(self) -> None:
        """Greedy tokens in float32 are those of the CPU."""
        self.close()
        sizes = self._sizes
        text = files("sgl.bench").joinpath(TEXT).read_text()
        prompts = [text[i * 97 : i * 97 + 40 + 3 * i] for i in range(sizes.prompts)]
        fields = self._given_model()
        plain = {**fields, "dtype": "float32", "quantization": "none"}
        texts = []
        for device, kernels in (("cpu", "torch"), (sizes.device, "auto")):
            self._progress(f"correct: {sizes.prompts} prompts on {device}")
            with Engine(**{**plain, "device": device, "kernels": kernels}) as engine:
                greedy = {"max_new_tokens": sizes.new_tokens, "temperature": 0, "ignore_eos": True}
                texts.append([out["output_ids"] for out in engine.generate(prompts, greedy)])
        same = sum(ours == theirs for ours, theirs in zip(*texts, strict=True))
        self._figure("prompts whose greedy float32 tokens are the CPU's", same / sizes.prompts, goal=1.0)

    def logits(self) -> None:
        """Log-probabilities in float32 and bfloat16 are near those of torch's float32, on the same device."""
        from sgl.bench.quality import run as compare_quality

        self.close()
        if self._sizes.device != "cuda":
            raise ConfigError("part logits compares kernels of a GPU with torch's", hint="leave it out")
        fields = self._given_model()
        report = compare_quality(
            {**fields, "device": "cuda"},
            paths=("triton-bfloat16", "triton-float32"),
            window=512,
            max_tokens=1024,
            progress=self._progress,
        )
        self._details["quality"] = msgspec.to_builtins(report)
        for path, most in (("triton-float32", 1e-3), ("triton-bfloat16", 0.08)):
            for row in report.paths:
                if row.path == path and row.difference is not None:
                    what = f"{path}: mean difference of log-probabilities"
                    self._figure(what, row.difference, unit="nats", goal=most, at_most=True)

    def decode(self) -> None:
        """Steps of the large shape against their floor, and what overlap and chained launches are worth."""
        for rows in sorted(self._sizes.rows, reverse=True):
            self._decode(self._sizes.large, rows, {1: 0.85, 64: 0.8, 256: 0.75}.get(rows))

    def decode_small(self) -> None:
        """The same of the small shape."""
        for rows in sorted((rows for rows in self._sizes.rows if rows != 8), reverse=True):
            self._decode(self._sizes.small, rows, None)

    def prefill(self) -> None:
        """A chunk of the large shape as a share of the rate of a large product."""
        sizes = self._sizes
        bench = self._bench(sizes.large)
        bench.prefill(length=sizes.chunk, times=1)
        seconds = statistics.median(bench.prefill(length=sizes.chunk, times=2 * sizes.rounds))
        flops = prefill_flops(SHAPES.get(sizes.large, {}), sizes.chunk)
        self._figure(f"{sizes.large}, prompt of {sizes.chunk}", seconds * 1e3, unit="ms")
        if self._ceilings is not None and flops:
            share = flops / seconds / self._ceilings.flops_per_s
            self._figure(f"{sizes.large}, prompt of {sizes.chunk}: of the product's rate", share, goal=0.65)

    def mixed(self) -> None:
        """Prompts and outputs of all lengths, all at once, through an engine as a user has it."""
        self.close()
        sizes = self._sizes
        prompts, outputs = mixed_lengths(*sizes.mixed)
        pool = sum(map(len, prompts)) + sum(outputs) + 4096
        asked = [{"max_new_tokens": each, "temperature": 0.6, "ignore_eos": True} for each in outputs]
        with Engine(**self._engine(sizes.small, pool), max_running_requests=len(prompts)) as engine:
            info = engine.server_info()
            ids = [[token % info["vocab_size"] for token in prompt] for prompt in prompts]
            seconds: dict[str, list[float]] = {"overlap": [], "no overlap": []}
            gap = 0.0
            for turn in range(1 + 2 * max(1, sizes.rounds - 1)):
                way = "no overlap" if turn and turn % 2 == 0 else "overlap"
                engine.override(disable_overlap_schedule=way != "overlap", why="sgl bench gpu compares")
                engine.flush_cache(wait_s=10.0)
                before, start = engine.stats(), time.perf_counter()
                engine.generate(input_ids=ids, sampling_params=asked)
                lasted = time.perf_counter() - start
                after = engine.stats()
                if turn == 0:
                    self._figure(f"{sizes.small}, mixed: first run, steps recorded in it", lasted, unit="s")
                    continue
                seconds[way].append(lasted)
                if way == "overlap":
                    busy, idle = (after[f"device_{what}_s"] - before[f"device_{what}_s"] for what in ("busy", "idle"))
                    gap = idle / (busy + idle) if busy else 0.0
                if time.monotonic() > self._until and turn >= 2:
                    break
            weights, token = info["step_weights_bytes"], info["resolved"]["kv_bytes_per_token"]
        lasted = statistics.median(seconds["overlap"])
        self._details["seconds"] = seconds
        self._figure(f"{sizes.small}, mixed: output tokens per second", sum(outputs) / lasted, unit="tokens/s")
        self._figure(f"{sizes.small}, mixed: host gap", gap)
        if seconds["no overlap"]:
            ratio = statistics.median(seconds["no overlap"]) / lasted
            self._figure(f"{sizes.small}, mixed: without overlap, as a multiple", ratio, unit="x")
        if self._ceilings is not None:
            lengths = [len(prompt) for prompt in prompts]
            floor = mixed_floor_s(SHAPES[sizes.small], lengths, outputs, weights, token, self._ceilings)
            self._details["floor_s"] = floor
            self._figure(f"{sizes.small}, mixed: of its floor", floor / lasted, goal=0.55)

    def constrained(self) -> None:
        """Decoding steps under a JSON schema against the same without; of each, what the host does in it."""
        self._constrained(self._sizes.large)

    def constrained_small(self) -> None:
        """The same of the small shape."""
        self._constrained(self._sizes.small)

    def cache(self) -> None:
        """What the prefix cache costs when it finds nothing."""
        from sgl.bench.workloads.questions import apart

        self._forms((), apart(*self._sizes.apart), self._plan(), math.inf, math.inf)

    def programs(self) -> None:
        """Programs against the same calls as plain requests."""
        from sgl.bench.workloads import named

        sizes = self._sizes
        # Calls of both sides are as many: short turns, since one side takes several times as long.
        plan = msgspec.structs.replace(self._plan(), turn_s=0.3, quiet_s=0.25)
        until = min(self._until, time.monotonic() + sizes.programs_s)
        self._forms(named(sizes.workloads or PROGRAMS), None, plan, until, sizes.comparison_s)

    def deterministic(self) -> None:
        """What steps of deterministic mode take beside others, on the small shape."""
        self.close()
        sizes = self._sizes
        context = min(256, sizes.context)
        widths = sorted({min(sizes.rows), min(64, max(sizes.rows))})
        found: dict[bool, dict[int, float]] = {}
        for is_deterministic in (False, True):
            self._progress(f"loading {sizes.small}{', deterministic' if is_deterministic else ''}")
            pool = max(widths) * (context + 64 + 4 * sizes.steps) + 4096
            fields = self._engine(sizes.small, pool)
            bench = StepBench(
                {**fields, "max_running_requests": max(widths), "enable_deterministic_inference": is_deterministic}
            )
            try:
                found[is_deterministic] = {
                    rows: statistics.median(
                        bench.decode(rows=rows, context=context, steps=sizes.steps).median_s
                        for _ in range(sizes.rounds)
                    )
                    for rows in widths
                }
            finally:
                bench.close()
                del bench
                gc.collect()
        for rows in widths:
            plain, fixed = found[False][rows], found[True][rows]
            self._figure(f"{sizes.small}, {rows} rows: step", plain * 1e3, unit="ms")
            self._figure(f"{sizes.small}, {rows} rows, deterministic: step", fixed * 1e3, unit="ms")
            self._figure(f"{sizes.small}, {rows} rows: deterministic over plain", fixed / plain, unit="x")

    def products(self) -> None:
        """Bytes of weights per second by shape, and by how the kernel cuts the product."""
        self.close()
        rates: list[ProductRate] = []
        self._details["rates"] = rates
        for rows in (1, 16):
            compare_products(shapes_of_8b(rows), until=self._until, found=rates.append)
        for shape in dict.fromkeys(rate.shape for rate in rates):
            best = max((rate for rate in rates if rate.shape == shape), key=lambda rate: rate.bytes_per_s)
            used = next(rate for rate in rates if rate.shape == shape and rate.in_use)
            self._figure(f"{shape}: as in use", used.bytes_per_s / 1e12, unit="TB/s")
            self._figure(f"{shape}: best, {best.way}", best.bytes_per_s / 1e12, unit="TB/s")

    # --- inside ---

    def _decode(self, shape: str, rows: int, goal: float | None) -> None:
        sizes = self._sizes
        bench = self._bench(shape)
        self._progress(f"decode: {shape}, {rows} rows")
        times: dict[str, list[StepTimes]] = {"overlap": [], "no overlap": []}
        for _ in range(sizes.rounds):
            times["overlap"].append(bench.decode(rows=rows, context=sizes.context, steps=sizes.steps))
            with bench.plain_steps():
                times["no overlap"].append(bench.decode(rows=rows, context=sizes.context, steps=sizes.steps))
            if time.monotonic() > self._until:
                break
        if rows <= 16 and sizes.device == "cuda":
            times["launched plainly"] = self._launched_plainly(bench, rows)
        median = {way: statistics.median(each.median_s for each in runs) for way, runs in times.items()}
        self._details[f"{shape}, {rows}"] = {way: msgspec.to_builtins(runs) for way, runs in times.items()}
        step_s = median["overlap"]
        what = f"{shape}, {rows} rows"
        self._figure(f"{what}: step", step_s * 1e3, unit="ms")
        if self._ceilings is not None:
            # Half of what is decoded in a turn, and what came before the clock ran, is read by a step of it.
            context = sizes.context + sizes.steps // 2 + 8
            floor_s = bench.floor_bytes(rows, context) / self._ceilings.bytes_per_s
            self._figure(f"{what}: of the floor", floor_s / step_s, goal=goal)
            gap = statistics.median(each.gap for each in times["overlap"])
            self._figure(f"{what}: host gap", gap, goal=0.03 if rows == 64 else None, at_most=True)
        for way, seconds in median.items():
            if way != "overlap":
                self._figure(f"{what}: {way}, as a multiple", seconds / step_s, unit="x")
        if sizes.device == "cuda":
            steps = 4
            self._details[f"{shape}, {rows}, kernels"] = bench.while_decoding(
                rows=rows, context=sizes.context, steps=steps + 1, act=lambda step: kernel_times(step, steps)
            )

    def _constrained(self, shape: str) -> None:
        """Steps of rows in turns: free, under each schema, and under each with its forced tokens taken at once."""
        from sgl.bench.grammar import RECORDS
        from sgl.grammars.spec import JsonSchema, canonical_schema

        sizes = self._sizes
        rows = min(64, max(sizes.rows))
        bench = self._bench(shape, rows)
        constraints = {name: JsonSchema(canonical_schema(schema)) for name, schema in RECORDS.items()}
        ways: list[tuple[str, JsonSchema | None, bool]] = [("free", None, True)]
        ways += [(name, constraint, True) for name, constraint in constraints.items()]
        ways += [(f"{name}, forced tokens", constraint, False) for name, constraint in constraints.items()]
        found: dict[str, list[StepTimes]] = {way: [] for way, _, _ in ways}
        steps = 3 * sizes.steps
        for turn in range(1 + sizes.rounds):
            if turn > 1 and time.monotonic() > self._until:
                break
            for way, constraint, is_plain in ways:
                self._progress(f"constrained: {shape}, {rows} rows, {way}")
                with bench.changed(disable_forced_tokens=is_plain):
                    times = bench.decode(
                        rows=rows, context=sizes.context, steps=steps, constraint=constraint, temperature=1.0
                    )
                if turn:  # the first one compiles and warms up
                    found[way].append(times)
        self._details[f"{shape}, {rows}"] = {way: msgspec.to_builtins(runs) for way, runs in found.items()}
        rates = {way: [run.new_tokens / sum(run.step_s) for run in runs] for way, runs in found.items()}
        for way, _, is_plain in ways:
            runs, what = found[way], f"{shape}, {rows} rows, {way}"
            self._figure(f"{what}: tokens per second", statistics.median(rates[way]), unit="tokens/s")
            if way != "free":
                ratio = statistics.median(a / b for a, b in zip(rates[way], rates["free"], strict=True))
                self._figure(f"{what}: over free", ratio, unit="x", goal=0.97 if is_plain else None)
            self._figure(f"{what}: step", statistics.median(run.median_s for run in runs) * 1e3, unit="ms")
            self._figure(f"{what}: host gap", statistics.median(run.gap for run in runs))
            for call in HOST_CALLS:
                per_step = statistics.median(run.host_s[call] / len(run.step_s) for run in runs)
                self._figure(f"{what}: host, {call}", per_step * 1e3, unit="ms")

    def _launched_plainly(self, bench: StepBench, rows: int) -> list[StepTimes]:
        """The same steps, their kernels one after another."""
        from sgl.kernels.triton.chaining import plain_launches

        sizes = self._sizes
        with plain_launches():
            bench.record_anew()
            found = [bench.decode(rows=rows, context=sizes.context, steps=sizes.steps) for _ in range(sizes.rounds)]
        bench.record_anew()
        return found

    def _forms(
        self, workloads: Sequence[Any], apart: Any | None, plan: PairPlan, until: float, most_seconds: float
    ) -> None:
        from sgl.bench.program_wall import compare_forms

        self.close()
        report = compare_forms(
            workloads,
            scale=self._sizes.scale,
            seed=0,
            plan=plan,
            fields=self._engine(self._sizes.small, 200_000 if self._sizes.device == "cuda" else 4096),
            no_reuse=apart or False,
            until=until,
            most_seconds=most_seconds,
            progress=self._progress,
        )
        self._details["report"] = msgspec.to_builtins(report)
        for each in report.comparisons:
            if each.result.ratio is not None:
                goal = 0.99 if apart is not None else None
                self._figure(f"{each.workload}: {each.baseline}", each.result.ratio.median, unit="x", goal=goal)
        if report.not_reached:
            self._figure("comparisons that were not reached", len(report.not_reached))
        for mean in report.means:
            if mean.mean is not None and apart is None:
                goals = {"one by one, cache off": 3.0, "together, cache on": 1.2}
                what = f"geometric mean of {mean.measured}: {mean.baseline}"
                self._figure(what, mean.mean, unit="x", goal=goals.get(mean.baseline))

    def _plan(self) -> PairPlan:
        # Beside a GPU the host's load decides less than where the host computes itself.
        rule = CleanRule(max_foreign=0.1, max_steal=0.1)
        return PairPlan(pairs=self._sizes.pairs, attempts=2 * self._sizes.pairs, patience_s=2.0, turn_s=1.0, rule=rule)

    def _given_model(self) -> dict[str, Any]:
        """The fields that were given; with random weights of the default model's shape where its file is not here."""
        fields = {"max_total_tokens": 40_000, **self._fields}
        config = config_from_mapping(fields)
        try:
            locate(config.model_path, load_format=config.load_format, offline=config.offline)
        except ModelError as missing:
            if config.model_path not in SHAPES:
                raise
            self._details["model"] = f"random weights of {config.model_path}'s shape: {missing.message}"
            options = {name: value for name, value in fields.items() if name != "model_path"}
            return {**self._engine(config.model_path, 40_000), **options}
        return fields

    def _engine(self, shape: str, pool: int) -> dict[str, Any]:
        """Fields of an engine of a shape, with random weights."""
        options = {name: value for name, value in self._fields.items() if name != "model_path"}
        given: dict[str, Any] = {"model_path": "dummy", "max_total_tokens": pool, "device": self._sizes.device}
        if shape in SHAPES:
            given["json_model_override_args"] = msgspec.json.encode(SHAPES[shape]).decode()
        if self._sizes.device == "cuda":
            # The model needs no threads of the host; masks have what is left.
            given |= {"dtype": "bfloat16", "num_threads": max(1, cpu_count() // 4)}
        return {**given, **options}

    def _bench(self, shape: str, rows: int = 0) -> StepBench:
        """A core of a shape that decodes `rows` rows, or all that are wanted: the one that is there, if it does."""
        sizes = self._sizes
        rows = rows or max(sizes.rows)
        if (
            self._steps is not None
            and self._steps[0] == shape
            and self._steps[1].core.config.max_running_requests >= rows
        ):
            return self._steps[1]
        self.close()
        self._progress(f"loading {shape}")
        # Constrained rows may get several tokens in a step.
        new_tokens = max(rows * 2 * sizes.steps, min(64, rows) * 20 * sizes.steps)
        pool = max(sizes.chunk + 64, rows * (sizes.context + 64) + new_tokens) + 4096
        fields = {**self._engine(shape, pool), "max_running_requests": rows}
        fields["chunked_prefill_size"] = sizes.chunk
        bench = StepBench(fields)
        self._steps = (shape, bench)
        return bench

    def _figure(
        self, what: str, value: float, *, unit: str = "", goal: float | None = None, at_most: bool = False
    ) -> None:
        made = Figure(what=what, value=value, unit=unit, goal=goal, at_most=at_most)
        self._figures.append(made)
        self._progress(f"{made.what}: {made.value:.4g} {made.unit}")


PROGRAMS = (
    "tree_of_thought", "multi_turn_chat", "gsm8k", "hellaswag", "json_schema", "llm_judge", "mmlu", "react",
    "multi_document_qa", "tip_suggestion", "multi_chain_reasoning", "json_jump_forward", "generative_agents",
    "dspy_rag", "in_batch_prefix", "long_json_decode", "hierarchical_cache",
)  # fmt: skip
"""All workloads, kinds in turn, so that what is not reached in time is of every kind."""

PARTS: dict[str, Callable[[_Bench], None]] = {
    "correct": _Bench.correct,
    "logits": _Bench.logits,
    "decode": _Bench.decode,
    "prefill": _Bench.prefill,
    "decode-small": _Bench.decode_small,
    "mixed": _Bench.mixed,
    "constrained": _Bench.constrained,
    "constrained-small": _Bench.constrained_small,
    "cache": _Bench.cache,
    "deterministic": _Bench.deterministic,
    "products": _Bench.products,
    "programs": _Bench.programs,
}
"""By name, in the order in which they run."""


def kernel_times(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Microseconds per step on the device, and calls per step, of the kernels of `steps` steps, longest first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    return {
        "kernels": [
            {
                "name": event.key[:100],
                "us": round(event.self_device_time_total / steps, 2),
                "calls": event.count / steps,
            }
            for event in events[:16]
        ],
        "busy_us": round(sum(event.self_device_time_total for event in events) / steps, 1),
    }
