"""`sgl bench ...`: the commands that measure this machine.

Owns their flags; the measuring is done by the modules of `sgl.bench`, each imported by its own command. Nothing here
loads torch: engines and peers run in processes of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from sgl.cli.console import Json, download_bar, guarded, say, show_json, show_table
from sgl.cli.options import engine_options, flag_of
from sgl.errors import ConfigError
from sgl.runtime.config import config_from_mapping
from sgl.runtime.loading.sources import locate

bench = typer.Typer(
    help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)

PEER = "Against a peer"
PREFILL_LEN = 512
"""Prompt of the prefill measurement when there is no peer."""
PROMPT_LEN = 128
"""Prompt of every case against a peer."""

Model = Annotated[str | None, typer.Argument(help="The model, instead of --model-path.", show_default=False)]
Repeats = Annotated[int, typer.Option(min=1, help="Samples of each measurement.")]
Save = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write the report as JSON, raw times included.", rich_help_panel="Output"),
]


@bench.command(short_help="Speed of start, prompts and decoding; peers with --peer.")
@guarded
@engine_options
def latency(
    model: Model = None,
    *,
    as_json: Json = False,
    save: Save = None,
    repeats: Repeats = 3,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompts decoded together; may repeat. [default: 1 8]")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt. [default: 512, with --peer 128]", show_default=False)
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens that continue each prompt.")] = 64,
    peer: Annotated[
        str | None,
        typer.Option(
            help="Compare with this engine: transformers, llamacpp, vllm, or sgl for the harness's own error.",
            rich_help_panel=PEER,
        ),
    ] = None,
    peer_python: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Interpreter of the peer's own environment.", show_default=False, rich_help_panel=PEER
        ),
    ] = None,
    mixed: Annotated[
        bool,
        typer.Option("--mixed", help="Let the sides keep weights in different forms.", rich_help_panel=PEER),
    ] = False,
    peer_setting: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Fix a setting of the peer.", rich_help_panel=PEER)
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Clean pairs that a figure needs.", rich_help_panel=PEER)] = 5,
    attempts: Annotated[
        int | None,
        typer.Option(min=1, help="Pairs tried at most. [default: 4 * pairs]", show_default=False, rich_help_panel=PEER),
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a quiet machine before a pair.", rich_help_panel=PEER)
    ] = 10.0,
    max_foreign: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of the cores that others may use in a clean pair.", rich_help_panel=PEER
        ),
    ] = 0.02,
    max_steal: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share that the hypervisor may take in a clean pair.", rich_help_panel=PEER),
    ] = 0.05,
    seed: Annotated[int, typer.Option(help="Of the order of turns and of the prompts.", rich_help_panel=PEER)] = 0,
    startup: Annotated[
        bool, typer.Option(help="Compare process start to first token, too.", rich_help_panel=PEER)
    ] = True,
    engine: dict[str, Any],
) -> None:
    """Start, prefill and decode speed; with --peer as ratios from paired runs. Nothing is compared with a target."""
    fields = fetched(engine, model)
    batches = tuple(batch or (1, 8))
    if peer is None:
        from sgl.bench.latency import run

        report = run(
            fields,
            repeats=repeats,
            prefill_len=prompt_tokens or PREFILL_LEN,
            decode_len=new_tokens,
            batches=batches,
            progress=lambda what: say(f"measuring: {what}"),
        )
        if output(report, as_json, save):
            from sgl.cli.bench_view import show_samples

            print(f"model {report.model}", *(f"{name} {value}" for name, value in report.engine.items()), sep=", ")
            print(*(f"{name} {version}" for name, version in report.versions.items()), sep=", ")
            show_samples(report.measured)
        return

    from sgl.bench.comparison import Case, compare
    from sgl.bench.harness import PairPlan
    from sgl.bench.load import CleanRule

    comparison = compare(
        fields,
        peer,
        cases=[Case(batch=each, prompt_tokens=prompt_tokens or PROMPT_LEN, new_tokens=new_tokens) for each in batches],
        plan=PairPlan(
            pairs=pairs,
            attempts=attempts,
            seed=seed,
            patience_s=patience,
            rule=CleanRule(max_foreign=max_foreign, max_steal=max_steal),
        ),
        peer_settings=settings(peer_setting or [], "peer-setting"),
        peer_python=None if peer_python is None else str(peer_python.absolute()),
        mixed=mixed,
        startup=startup,
        progress=say,
    )
    if output(comparison, as_json, save):
        from sgl.cli.bench_view import show_comparison

        show_comparison(comparison)


@bench.command(short_help="From import and process start to the first token.")
@guarded
@engine_options
def startup(
    model: Model = None,
    *,
    as_json: Json = False,
    save: Save = None,
    repeats: Repeats = 3,
    engine: dict[str, Any],
) -> None:
    """Import, process start to ready and to first token, with the tokenizer cache filled and empty."""
    from sgl.bench.startup import run

    report = run(fetched(engine, model), repeats=repeats, progress=lambda what: say(f"measuring: {what}"))
    if output(report, as_json, save):
        from sgl.cli.bench_view import show_samples

        print(f"model {report.model}", *(f"{name} {version}" for name, version in report.versions.items()), sep=", ")
        show_samples(report.measured)


def fetched(engine: dict[str, Any], model: str | None) -> dict[str, Any]:
    """The engine's fields, with the model in the cache."""
    if model is not None:
        if engine.get("model_path", model) != model:
            raise ConfigError(
                f"the model is {model} and --model-path is {engine['model_path']}", hint="give one of the two"
            )
        engine = {**engine, "model_path": model}
    config = config_from_mapping(engine)
    with download_bar(f"Fetching {config.model_path}") as progress:
        locate(config.model_path, load_format=config.load_format, offline=config.offline, progress=progress)
    return engine


def settings(given: list[str], flag: str) -> dict[str, str]:
    """The `NAME=VALUE` words of `--flag` as a mapping."""
    found = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigError(f"--{flag} is {word!r}; expected NAME=VALUE", param=flag.replace("-", "_"))
        found[name] = value
    return found


def write_report(report: msgspec.Struct, save: Path | None) -> None:
    """Write a report as JSON, where a file is given."""
    if save is None:
        return
    try:
        save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {save}: {error.strerror}", param="save") from None


def output(report: msgspec.Struct, as_json: bool, save: Path | None) -> bool:
    """Write and print what was asked for as JSON; whether text for people is still wanted."""
    write_report(report, save)
    if as_json:
        show_json(report)
    return not as_json


@bench.command(short_help="What a recorded load costs under other settings.")
@guarded
@engine_options
def simulate(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="A --message-log of an engine.", show_default=False)],
    *,
    as_json: Json = False,
    vary: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=V1,V2", help="A row for each value; may repeat.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Fit the seconds to this --trace-file.", show_default=False)
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Programs per second, at random. [default: all at once]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    engine: dict[str, Any],
) -> None:
    """What a recorded load would have cost under other settings: the real scheduler on virtual time.

    Model and options are those of the engine that wrote LOG; what is given here comes before them.
    """
    from sgl.bench.simulate import run as compare

    report = compare(log, engine, vary=vary or (), trace=trace, rate=rate, seed=seed)
    if as_json:
        show_json(report)
        return
    options = " ".join(f"{flag_of(name)} {value}" for name, value in report.engine.items())
    say(f"model {report.model}, {options or 'no options'}")
    say(f"{report.latency}")
    show_table(
        ("VARIANT", "MAKESPAN", "P50", "P99", "BUSY", "PROMPT", "CACHED", "DECODED", "FORWARDS", "RETRACTED", "FAILED"),
        [
            (
                " ".join(f"{name}={value}" for name, value in row.fields.items()) or "as given",
                f"{row.makespan_s:.3g} s",
                *("-" if s is None else f"{s:.3g} s" for s in (row.latency_p50_s, row.latency_p99_s)),
                f"{row.busy_share:.0%}",
                str(row.prompt_tokens),
                f"{row.cached_tokens / max(1, row.prompt_tokens):.1%}",
                str(row.decode_tokens),
                str(row.forwards),
                str(row.retractions),
                str(row.failed),
            )
            for row in report.variants
        ],
    )
