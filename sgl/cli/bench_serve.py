"""`sgl bench serve`: load on a server, as its clients see it.

Owns the command, its flags and its tables. Imported by `sgl.cli` for the command that it registers.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sgl.cli.bench import Model, Save, bench, fetched, output, write_report
from sgl.cli.console import Json, guarded, say, show_table
from sgl.cli.options import engine_options
from sgl.environment import parse_option, read, variable_of
from sgl.errors import BenchError, ConfigError

if TYPE_CHECKING:
    from sgl.bench.attacks import Attacked, AttackReport
    from sgl.bench.serve import OfflineReport, Percentiles, ServeReport


@bench.command(short_help="Load on a server: times to tokens, goodput, attacks.")
@guarded
@engine_options
def serve(
    model: Model = None,
    *,
    url: Annotated[
        str | None,
        typer.Option(help="A server that runs already; any with OpenAI's completions. [default: a new one]"),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Of that server. [default: the first of SGL_API_KEY]", show_default=False)
    ] = None,
    requests: Annotated[int, typer.Option(min=1, max=100_000, help="Requests in all.")] = 64,
    clients: Annotated[int, typer.Option(min=1, max=4096, help="At a time (closed loop).")] = 8,
    request_rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests per second (open loop), in place of clients.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=0.01, help="Of arrivals at a rate: 1 is Poisson's, less comes in bursts, more evenly.")
    ] = 1.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 32,
    shared_tokens: Annotated[int, typer.Option(min=0, help="Of a prompt, those that its group shares.")] = 0,
    groups: Annotated[int, typer.Option(min=1, help="Of requests that share a beginning.")] = 1,
    stream: Annotated[bool, typer.Option(help="Read answers as they come.")] = True,
    ttft: Annotated[float | None, typer.Option(help="Objective: seconds to the first token.")] = None,
    tpot: Annotated[float | None, typer.Option(help="Objective: seconds between two tokens.")] = None,
    e2e: Annotated[float | None, typer.Option(help="Objective: seconds to the end.")] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=8, help="Ids that prompts are made of. [default: the model's]", show_default=False)
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Compare with the same requests in process, in paired runs.")
    ] = False,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            help="Compare the time to the first token with and without this attacker, in paired rounds; may repeat; "
            "`all` for each of them. [default: none]",
            show_default=False,
        ),
    ] = None,
    attack_rate: Annotated[float, typer.Option(min=0.01, help="Strikes per second of an attacker.")] = 2.0,
    pairs: Annotated[int, typer.Option(min=1, help="Clean pairs that a figure needs.")] = 5,
    attempts: Annotated[
        int | None, typer.Option(min=1, help="Pairs tried at most. [default: 4 * pairs]", show_default=False)
    ] = None,
    patience: Annotated[float, typer.Option(min=0, help="Seconds to wait for a quiet machine before a pair.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of prompts, arrivals and turns.")] = 0,
    as_json: Json = False,
    save: Save = None,
    engine: dict[str, Any],
) -> None:
    """Throughput, time to the first token, between tokens and to the end, and goodput of a server."""
    from sgl.bench.serve import Load, Objectives, compare_offline, default_vocab, measure, own_server

    load = Load(
        requests=requests,
        clients=clients,
        rate=request_rate,
        burstiness=burstiness,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        shared_tokens=min(shared_tokens, prompt_tokens),
        groups=groups,
        stream=stream,
        seed=seed,
    )
    fields = fetched(engine, model)
    if in_process or attack:
        from sgl.bench.harness import PairPlan

        plan = PairPlan(pairs=pairs, attempts=attempts, seed=seed, patience_s=patience)
    if attack:
        from sgl.bench.attackers import ATTACKS
        from sgl.bench.attacks import compare_attacks

        if url is not None or not stream:
            raise ConfigError("--attack starts a server of its own and streams", hint="leave --url and --no-stream out")
        names = list(ATTACKS) if "all" in attack else attack
        attacked = compare_attacks(
            fields,
            names,
            load,
            plan,
            rate=attack_rate,
            progress=say,
            measured=lambda report: write_report(report, save),  # an hour of measuring may be cut short
        )
        if output(attacked, as_json, save):
            show_attacks(attacked)
        return
    if in_process:
        compared = compare_offline(fields, load, plan, progress=say)
        if output(compared, as_json, save):
            show_offline(compared)
        return
    vocab = vocab_size or default_vocab(fields)
    every = max(requests // 10, 1)

    def progress(done: int) -> None:
        if done % every == 0:
            say(f"{done} of {requests} answered")

    with nullcontext(url.rstrip("/").removesuffix("/v1")) if url is not None else own_server(fields) as asked:
        report = measure(
            asked,
            load,
            vocab_size=vocab,
            api_key=api_key or _key_in_environment() if url is not None else None,
            objectives=Objectives(ttft_s=ttft, token_s=tpot, whole_s=e2e),
            progress=progress,
        )
    if output(report, as_json, save):
        show(report)
    if not report.succeeded:
        raise BenchError(f"all {requests} requests failed: {report.first_error}", hint="nothing was measured")


def _key_in_environment() -> str | None:
    text = read(variable_of("api_key"))
    return parse_option(text, tuple[str, ...], variable_of("api_key"))[0] if text else None


def show(report: ServeReport) -> None:
    """The report as tables."""
    load = report.load
    how = f"{load.clients} clients" if load.rate is None else f"{load.rate:g} requests/s"
    print(f"{report.model}: {load.requests} requests of {load.prompt_tokens} + {load.new_tokens}, {how}")
    show_table(
        ("SECONDS", "MEAN", "P50", "P90", "P95", "P99"),
        [
            _row("to the first token", report.ttft_s),
            _row("between two tokens, by request", report.token_s),
            _row("between two pieces", report.piece_s),
            _row("to the end", report.whole_s),
        ],
    )
    print(
        f"\n{report.succeeded} succeeded in {report.seconds:.2f} s: {report.requests_per_s:.2f} requests/s, "
        f"{report.input_tokens_per_s:.0f} prompt and {report.output_tokens_per_s:.0f} output tokens/s; "
        f"{report.good} within the objectives ({report.good_requests_per_s:.2f}/s)"
    )
    for what, times in report.errors.items():
        print(f"failed: {times} x {what}")


def _row(name: str, times: Percentiles | None) -> tuple[str, ...]:
    if times is None:
        return (name, "-", "-", "-", "-", "-")
    return (name, *(f"{value:.4f}" for value in (times.mean, times.p50, times.p90, times.p95, times.p99)))


def show_attacks(report: AttackReport) -> None:
    """The ratios as a table."""
    load = report.load
    print(
        f"{report.model}: {load.requests} clean requests of {load.prompt_tokens} + {load.new_tokens}, "
        f"{load.clients} clients; attackers strike {report.rate:g} times a second"
    )
    print(f"{report.provenance.cpu}, cores {' '.join(map(str, report.provenance.cores))}")
    show_table(
        ("ROW", "ATTACK", "P99 TTFT S", "WITH IT", "RATIO", "INTERVAL", "CLEAN"),
        [_attack_row(each) for each in report.attacks],
    )


def _attack_row(attacked: Attacked) -> tuple[str, ...]:
    result, head = attacked.result, (str(attacked.row), attacked.name)
    clean = f"{result.clean} of {result.attempted}"
    if result.ratio is None:
        return (*head, "-", "-", "not measured", "-", clean)
    ratio = result.ratio
    interval = f"{ratio.interval.low:.2f} to {ratio.interval.high:.2f}"
    return (*head, f"{ratio.a_s:.4f}", f"{ratio.b_s:.4f}", f"{ratio.median:.2f}", interval, clean)


def show_offline(report: OfflineReport) -> None:
    """The comparison as a line."""
    load, result = report.load, report.result
    print(
        f"{report.model}: {load.requests} requests of {load.prompt_tokens} + {load.new_tokens}, {load.clients} at once"
    )
    print(f"{report.provenance.cpu}, cores {' '.join(map(str, report.provenance.cores))}")
    if result.ratio is None:
        print(f"not measured: {result.clean} of {result.attempted} pairs were clean, {result.needed} are needed")
        return
    ratio = result.ratio
    print(
        f"HTTP has {ratio.median:.3f} of the throughput in process "
        f"[{ratio.interval.low:.3f}, {ratio.interval.high:.3f}], {result.clean} of {result.attempted} pairs clean"
    )
