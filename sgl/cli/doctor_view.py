"""A doctor's report as text for people."""

from __future__ import annotations

from sgl.cli.console import bytes_text, show_table
from sgl.doctor import ModelReport, Report


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
            ("memory", f"{bytes_text(machine.memory_bytes)}, {bytes_text(machine.available_bytes)} available"),
            ("gpu", ", ".join(machine.gpus) or "none"),
            ("torch threads", machine.torch_threads),
        ],
    )
    _section("packages")
    show_table(("name", "version"), [(name, version or "not installed") for name, version in report.packages.items()])
    _section("models")
    cached = [(model.name, f"{bytes_text(model.size_bytes)}  {model.path}") for model in report.cached_models]
    show_table(("cache", report.cache_folder), cached)
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
    _section("limits")
    show_table(("name", "value", "meaning"), [(row.name, row.value, row.meaning) for row in report.limits])


def _show_model(model: ModelReport) -> None:
    if model.error is not None:
        print(f"cannot start: {model.error.message}")
        if model.error.hint:
            print(f"  hint: {model.error.hint}")
    elif model.resolved is None:
        print(f"not fetched yet; `sgl pull {model.model}` does, and so does the first program")
    else:
        why = {reason.field: reason.why for reason in model.resolved.reasons}
        resolved = model.resolved
        rows = [
            ("device", resolved.device, why.get("device")),
            ("dtype", resolved.dtype, why.get("dtype")),
            ("context_length", resolved.context_len, why.get("context_length")),
            ("max_total_tokens", resolved.pool_tokens, why.get("max_total_tokens")),
            ("page_size", resolved.page_size, None),
            ("max_running_requests", resolved.max_running_requests, why.get("max_running_requests")),
            ("chunked_prefill_size", resolved.chunked_prefill_size, why.get("chunked_prefill_size")),
            ("num_threads", resolved.num_threads, why.get("num_threads")),
            ("random_seed", resolved.random_seed, why.get("random_seed")),
        ]
        show_table(("option", "value", "why"), [(name, value, reason or "as given") for name, value, reason in rows])
        print(
            f"weights {bytes_text(resolved.weights_bytes)}, KV cache {bytes_text(resolved.kv_bytes_per_token)} a token"
        )


def _section(name: str) -> None:
    print(f"\n[{name}]")
