"""`sgl serve`: one model for programs and for OpenAI's clients.

Owns the command, and how a TOML file joins flags and environment: flags first, then `SGL_<OPTION>`, then the file, then
the defaults. The file has the names of the flags, with `_`, in one table.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from sgl.cli.console import guarded, say, show_json
from sgl.cli.options import engine_options, server_options
from sgl.environment import read, variable_of
from sgl.errors import ConfigError
from sgl.runtime.config import EngineConfig, config_from_mapping


@guarded
@server_options
@engine_options
def serve(
    model: Annotated[str | None, typer.Argument(help="As --model-path.", show_default=False)] = None,
    *,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Options as in the flags; flags and environment go first.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print what would hold, as JSON, and end.")
    ] = False,
    engine: dict[str, Any],
    server: dict[str, Any],
) -> None:
    """Serve a model to programs and OpenAI clients, until SIGTERM or Ctrl-C."""
    from sgl.server.config import ServerConfig, effective, server_config

    if config is not None:
        in_file = read_toml(config)
        own = {name for name in in_file if name in EngineConfig.__struct_fields__}
        check_names(config, set(in_file) - own, [*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__])
        engine = {**{name: in_file[name] for name in own}, **engine}
        server = {**{name: value for name, value in in_file.items() if name not in own}, **server}
    if model is not None:
        is_flag = config is None and read(variable_of("model_path")) is None  # which go behind the argument
        if is_flag and engine.get("model_path", model) != model:
            raise ConfigError(
                f"the model is {model!r}, and --model-path is {engine['model_path']!r}",
                hint="give one of them",
                param="model_path",
            )
        engine = {**engine, "model_path": model}
    settings = server_config(server)
    config_from_mapping(engine)
    if print_config:
        show_json({"engine": {**msgspec.structs.asdict(EngineConfig()), **engine}, "server": effective(settings)})
        return
    from sgl.server.serve import logging_to_stderr
    from sgl.server.serve import serve as run

    logging_to_stderr("info")
    raise typer.Exit(run(settings, engine, say))


def check_names(path: Path, names: Collection[str], known: Sequence[str]) -> None:
    """Raise `ConfigError` for a name in a file that is no option."""
    for name in sorted(set(names) - set(known)):
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            f"config file {path}: there is no option {name!r}",
            hint=f"did you mean {near[0]!r}?" if near else "see sgl serve --help",
            param=name,
        )


def read_toml(path: Path) -> dict[str, Any]:
    """The options in a file.

    Raises:
        ConfigError: it cannot be read, or has tables.
    """
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"config file {path}: {error.strerror}", hint="give a file that exists", param="config"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is no TOML: {error}", param="config") from None
    options = {name.replace("-", "_"): value for name, value in found.items()}
    if nested := next((name for name, value in options.items() if isinstance(value, dict)), None):
        if nested == "radix_eviction_policy_config":
            return options
        raise ConfigError(
            f"config file {path} has the table [{nested}]", hint="write the options without tables", param="config"
        )
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
