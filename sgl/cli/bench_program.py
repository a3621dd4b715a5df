"""`sgl bench program`: the workloads of `sgl.bench.workloads`, as counters or as wall time.

Owns the command, its flags and its tables. Imported by `sgl.cli` for the command that it registers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sgl.cli.bench import Save, bench, output, settings
from sgl.cli.console import Json, guarded, say, show_table
from sgl.cli.options import engine_options
from sgl.errors import ConfigError

if TYPE_CHECKING:
    from sgl.bench.program import CounterReport
    from sgl.bench.program_peers import PeerReport
    from sgl.bench.program_wall import WallReport

COUNTERS = "Counters"
WALL = "Wall time"
PEER = "Peers"


@bench.command()
@guarded
@engine_options
def program(
    *,
    as_json: Json = False,
    save: Save = None,
    counters: Annotated[
        bool, typer.Option("--counters", help="Hit rates in a small pool, beside what was possible. [default]")
    ] = False,
    wall: Annotated[
        bool, typer.Option("--wall", help="Programs against the same calls as plain requests, in paired runs.")
    ] = False,
    workload: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Of these workloads; may repeat. [default: all]")
    ] = None,
    scale: Annotated[
        float, typer.Option(help="Share of each workload's tokens; `dummy` holds prompts up to 0.1.")
    ] = 0.01,
    seed: Annotated[int, typer.Option(help="Of the workloads, and of the order of turns.")] = 0,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Eviction policy; may repeat. [default: program lru slru]",
            rich_help_panel=COUNTERS,
        ),
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Clean pairs that a figure needs.", rich_help_panel=WALL)] = 5,
    attempts: Annotated[
        int | None,
        typer.Option(min=1, help="Pairs tried at most. [default: 4 * pairs]", show_default=False, rich_help_panel=WALL),
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a quiet machine before a pair.", rich_help_panel=WALL)
    ] = 10.0,
    turn: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds of a side's turn at least, by repeating runs.", rich_help_panel=WALL),
    ] = 2.0,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Compare with the same programs on an engine with this option, as kernels=torch; may repeat.",
            rich_help_panel=WALL,
        ),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Six tasks against plain requests (plain), transformers, outlines, guidance, llamacpp or vllm, in "
            "paired runs.",
            rich_help_panel=PEER,
        ),
    ] = None,
    peer_python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The interpreter that has the peer. [default: ours]", rich_help_panel=PEER),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Of these tasks; may repeat. [default: all]", rich_help_panel=PEER),
    ] = None,
    workloads: Annotated[
        bool,
        typer.Option(
            "--workloads", help="The 17 workloads instead, where they apply; --workload picks.", rich_help_panel=PEER
        ),
    ] = False,
    max_turn: Annotated[
        float,
        typer.Option(min=0, help="Leave out what takes the peer more seconds than this.", rich_help_panel=PEER),
    ] = 20.0,
    mixed: Annotated[
        bool,
        typer.Option(
            "--mixed", help="Each side keeps the model file in its own best form, as blocks here.", rich_help_panel=PEER
        ),
    ] = False,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a page with plots and raw JSON.", rich_help_panel=PEER)
    ] = None,
    engine: dict[str, Any],
) -> None:
    """Program workloads. Counters run on the `dummy` model, --wall and --peer on the default one, unless a model is
    given."""
    from sgl.bench.workloads import named

    if counters + wall + (peer is not None) > 1:
        raise ConfigError("--counters, --wall and --peer measure different things", hint="give one of them")
    if peer is not None:
        from sgl.bench.harness import PairPlan
        from sgl.bench.program_page import peer_page
        from sgl.bench.program_peers import compare_peer

        plan = PairPlan(pairs=pairs, attempts=attempts, seed=seed, patience_s=patience, turn_s=turn)
        compared = compare_peer(
            peer,
            task or (),
            plan=plan,
            fields=engine,
            python=peer_python,
            workloads=named(workload or []) if workloads or workload else (),
            scale=scale,
            max_turn_s=max_turn,
            mixed=mixed,
            progress=say,
        )
        if html is not None:
            Path(html).write_text(peer_page(compared), encoding="utf-8")
            say(f"page: {html}")
        if output(compared, as_json, save):
            show_peer(compared)
        return
    for flag, given in (("--peer-python", peer_python), ("--task", task), ("--workloads", workloads), ("--html", html)):
        if given:
            raise ConfigError(f"{flag} belongs to --peer", hint="give --peer as well")
    chosen = named(workload or [])
    if wall:
        from sgl.bench.harness import PairPlan
        from sgl.bench.program_wall import compare_engines, compare_forms

        if policy:
            raise ConfigError("--policy belongs to --counters", hint="give --radix-eviction-policy with --wall")
        plan = PairPlan(pairs=pairs, attempts=attempts, seed=seed, patience_s=patience, turn_s=turn)
        if against:
            timed = compare_engines(
                chosen, settings(against, "against"), scale=scale, seed=seed, plan=plan, fields=engine, progress=say
            )
        else:
            timed = compare_forms(
                chosen, scale=scale, seed=seed, plan=plan, fields=engine, no_reuse=not workload, progress=say
            )
        if output(timed, as_json, save):
            show_wall(timed)
        return
    if against:
        raise ConfigError("--against belongs to --wall", hint="give --wall as well")
    from sgl.bench.program import DEFAULT_POLICIES, count

    counted = count(
        chosen,
        policy or DEFAULT_POLICIES,
        scale=scale,
        seed=seed,
        fields=engine,
        progress=lambda what: say(f"counting: {what}"),
    )
    if output(counted, as_json, save):
        show_counters(counted)


def show_peer(report: PeerReport) -> None:
    """Every task against the peer, then the geometric mean."""
    versions = ", ".join(f"{name} {version}" for name, version in report.peer_versions.items())
    form = report.dtype if report.quantization == "none" else report.quantization
    theirs = f", the peer's {report.peer_dtype} of the same file" if report.mixed and report.peer_dtype else ""
    print(f"{report.peer} ({versions}), model {report.model}, {form}{theirs}")
    print(f"{report.provenance.cpu}, cores {' '.join(map(str, report.provenance.cores))}\n")
    rows = []
    for each in report.tasks:
        result, ratio = each.result, each.result.ratio if each.result is not None else None
        times = (f"{ratio.a_s:.3f} s", f"{ratio.b_s:.3f} s") if ratio is not None else ("", "")
        clean = f"{result.clean} of {result.attempted}" if result is not None else ""
        verdict = result.verdict if result is not None else each.why
        cost = (each.cost.prefill_tokens, each.cost.forwards) if each.cost is not None else ("", "")
        equal = f"{each.equal} of {each.num_answers}" if each.num_answers else ""
        rows.append((each.task, verdict, *times, clean, equal, *cost, each.variant))
    show_table(
        ("TASK", "RATIO", "SGL", "PEER", "CLEAN PAIRS", "EQUAL ANSWERS", "PREFILLED", "STEPS", "PEER RUNS"), rows
    )
    mean = "not measured" if report.geometric_mean is None else f"{report.geometric_mean:.2f}x"
    print(f"\ngeometric mean {mean} ({report.measured} of {len(report.tasks)} tasks measured)")
    print("ratio: time of the peer over time of the programs, median of the clean pairs; prefilled and steps are ours")


def show_counters(report: CounterReport) -> None:
    """Every workload under every policy, then the totals."""
    print(f"model {report.model}, scale {report.scale:g}, seed {report.seed}; rates are shares of prompt tokens\n")
    rows = [
        (
            workload.name,
            workload.round_trips,
            row.policy,
            row.prompt_tokens,
            workload.distinct_tokens,
            workload.capacity,
            _rate(row.hit_tokens, row.prompt_tokens),
            _rate(row.belady_tokens, row.prompt_tokens),
            _rate(row.lru_tokens, row.prompt_tokens),
            _rate(row.unbounded_tokens, row.prompt_tokens),
            f"{row.of_belady:.3f}",
            row.recomputed_tokens,
            row.forwards,
        )
        for workload in report.workloads
        for row in workload.policies
    ]
    columns = "WORKLOAD|TRIPS|POLICY|PROMPT|DISTINCT|CAPACITY|HIT|BELADY|LRU|UNBOUNDED|RATIO|RECOMPUTED|FORWARDS"
    show_table(columns.split("|"), rows)
    print()
    show_table(
        ("ALL, BY THE TOKEN", "HIT", "BELADY", "LRU", "UNBOUNDED", "RATIO", "LOWEST"),
        [
            (
                total.policy,
                f"{total.hit_rate:.3f}",
                f"{total.belady_hit_rate:.3f}",
                f"{total.lru_hit_rate:.3f}",
                f"{total.unbounded_hit_rate:.3f}",
                f"{total.of_belady:.3f}",
                f"{total.lowest:.3f}",
            )
            for total in report.totals
        ],
    )
    print("\nratio: measured hits over those of Belady's offline optimum on the same requests, order and capacity")


def _rate(part: int, whole: int) -> str:
    return f"{part / whole:.3f}"


def show_wall(report: WallReport) -> None:
    """Every workload against both baselines, then the geometric means."""
    record = report.provenance
    print(f"model {report.model}, scale {report.scale:g}, seed {report.seed}")
    print(f"{record.cpu}, cores {' '.join(map(str, record.cores))} of {record.usable_cores}\n")
    show_table(
        ("WORKLOAD", "AGAINST", "RATIO", "CLEAN PAIRS", "PREFILLED", "BY PROGRAMS", "STEPS", "BY PROGRAMS"),
        [
            (
                each.workload,
                each.baseline,
                each.result.verdict,
                f"{each.result.clean} of {each.result.attempted}",
                each.plain.prefill_tokens,
                each.programs.prefill_tokens,
                each.plain.forwards,
                each.programs.forwards,
            )
            for each in report.comparisons
        ],
    )
    print()
    for mean in report.means:
        figure = "not measured" if mean.mean is None else f"{mean.mean:.2f}x, lowest {mean.lowest:.2f}x"
        print(f"{mean.baseline}: geometric mean {figure} ({mean.measured} of {mean.asked} workloads measured)")
    print("\nratio: time of the other form over time of the programs, median of the clean pairs")
