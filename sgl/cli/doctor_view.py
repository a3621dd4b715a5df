"""A doctor's report as text for people."""

from __future__ import annotations

from sgl.cli.console import bytes_text, show_table
from sgl.cli.options import flag_of
from sgl.doctor import ModelReport, NativeReport, Report
from sgl.runtime.encoder_start import ResolvedEncoder
from sgl.runtime.memory_plan import USABLE_SHARE, MemoryPlan, size_text
from sgl.runtime.models.encoder_config import EncoderConfig


def show_report(report: Report) -> None:
    """Print the report in sections on standard output."""
    machine = report.machine
    _section("sgl")
    show_table(("version", report.sgl), [("from", report.location), ("python", f"{report.python} {report.executable}")])
    _section("machine")
    show_table(
        ("system", machine.system),
        [
            ("cpu", machine.cpu),
            ("usable cores", machine.usable_cpus),
            ("cpu flags", " ".join(machine.cpu_flags) or "none of those that matter here"),
            ("memory", f"{size_text(machine.memory_bytes)}, {size_text(machine.available_bytes)} available"),
            *((f"  by {limit.source}", size_text(limit.bytes)) for limit in machine.memory_limits),
            ("gpu", ", ".join(machine.gpus) or "none"),
            ("torch threads", machine.torch_threads),
        ],
    )
    _section("packages")
    show_table(("name", "version"), [(name, version or "not installed") for name, version in report.packages.items()])
    _section("models")
    cached = [(model.name, f"{bytes_text(model.size_bytes)}  {model.path}") for model in report.cached_models]
    show_table(("cache", report.cache_folder), cached)
    print(f"architectures: {' '.join(report.architectures)}")
    _section("native kernels")
    _show_native(report.native)
    _section("kernels")
    show_table(
        ("op", "chosen", "passed over"),
        [
            (choice.op, choice.chosen, "; ".join(f"{name}: {why}" for name, why in choice.rejected) or "-")
            for choice in report.kernels
        ],
    )
    _section(f"engine on {report.model.model}")
    _show_model(report.model)
    _section("environment")
    set_now = [variable for variable in report.environment if variable.value is not None]
    show_table(("variable", "value"), [(variable.name, variable.value) for variable in set_now])
    print(f"known: {' '.join(variable.name for variable in report.environment)}")
    for name, near in report.unknown_variables:
        print(f"{name} is not known" + (f"; did you mean {near}?" if near else ""))
    _section("limits")
    rows = [(row.name, row.value, flag_of(row.name) if row.option else "fixed", row.meaning) for row in report.limits]
    show_table(("name", "value", "set by", "meaning"), rows)
    if report.model.error is not None:
        print()
        _show_model(report.model)  # once more, where it is read


def _show_native(native: NativeReport) -> None:
    if native.obstacle:
        print(f"cannot be built: {native.obstacle}")
        return
    state = "not built yet; `sgl doctor --build` does, and so does the first engine that uses them"
    if native.built:
        state = f"built in {native.build_s:g} s" if native.build_s else "built"
    rows = [("compiler", native.compiler), ("library", native.path), ("state", state)]
    show_table(("instruction set", native.instruction_set), rows)


def _show_model(model: ModelReport) -> None:
    if model.error is not None:
        print(f"cannot start: {model.error.message}")
        if model.error.hint:
            print(f"  hint: {model.error.hint}")
    elif model.encoder is not None and model.runs is not None:
        _show_encoder(model.encoder, model.runs)
    elif model.resolved is None:
        print(f"not fetched yet; `sgl pull {model.model}` does, and so does the first program")
    else:
        why = {reason.field: reason.why for reason in model.resolved.reasons}
        resolved = model.resolved
        rows = [
            ("model_impl", resolved.model_impl, why.get("model_impl") or "sgl has layers for it"),
            ("device", resolved.device, why.get("device")),
            ("dtype", resolved.dtype, why.get("dtype")),
            ("quantization", resolved.quantization, why.get("quantization")),
            ("kernels", resolved.kernels, why.get("kernels")),
            ("context_length", resolved.context_len, why.get("context_length")),
            ("max_total_tokens", resolved.pool_tokens, why.get("max_total_tokens")),
            ("page_size", resolved.page_size, None),
            ("max_running_requests", resolved.max_running_requests, why.get("max_running_requests")),
            ("chunked_prefill_size", resolved.chunked_prefill_size, why.get("chunked_prefill_size")),
            ("num_threads", resolved.num_threads, why.get("num_threads")),
            ("random_seed", resolved.random_seed, why.get("random_seed")),
        ]
        show_table(("option", "value", "why"), [(name, value, reason or "as given") for name, value, reason in rows])
        if resolved.memory is not None:
            _section("memory plan")
            _show_memory(resolved.memory)


def _show_encoder(encoder: EncoderConfig, runs: ResolvedEncoder) -> None:
    why = {reason.field: reason.why for reason in runs.reasons}
    gives = f"one of {encoder.num_labels} labels, by {encoder.activation}"
    if not encoder.num_labels:
        gives = f"a vector of {encoder.hidden_size}, pooled by {encoder.pooling}" + ", normalized" * encoder.normalize
    show_table(
        ("option", "value", "why"),
        [
            ("gives", gives, "the model's own files"),
            ("device", runs.device, why.get("device", "as given")),
            ("dtype", runs.dtype, why.get("dtype", "as given")),
            ("context_length", runs.context_len, why.get("context_length", "as given")),
            ("chunked_prefill_size", runs.max_batch_tokens, why.get("chunked_prefill_size", "as given")),
            ("num_threads", runs.num_threads, why.get("num_threads", "as given")),
            ("weights", size_text(runs.weights_bytes), "together"),
        ],
    )


def _show_memory(plan: MemoryPlan) -> None:
    show_table(
        ("what", "size", "when", "why"),
        [
            *((item.what, size_text(item.bytes), item.when, item.why) for item in plan.items),
            ("together", size_text(plan.loading_bytes), "loading", "must fit"),
            ("together", size_text(plan.serving_bytes), "serving", "must fit, with the pool full"),
            ("available", size_text(plan.available_bytes), "now", plan.available_source),
            ("usable", size_text(int(plan.available_bytes * USABLE_SHARE)), "now", f"{USABLE_SHARE:.0%} of that"),
        ],
    )


def _section(name: str) -> None:
    print(f"\n[{name}]")
