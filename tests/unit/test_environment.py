"""`SGL_*`: every engine option, typed, below flags and above defaults; one module reads the environment."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from sgl import environment
from sgl.cli.doctor_view import show_report
from sgl.cli.options import engine_options
from sgl.doctor import examine
from sgl.errors import ConfigError, ModelNotFound
from sgl.runtime import engine
from sgl.runtime.config import EngineConfig, config_from_mapping

ROOT = Path(__file__).resolve().parents[2]
READER = "sgl/environment.py"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in environment.table(EngineConfig):
        monkeypatch.delenv(variable.name, raising=False)


def config(**given: object) -> EngineConfig:
    return config_from_mapping(environment.with_environment(given, EngineConfig))


class Tuples(msgspec.Struct):
    """Fields of types that `EngineConfig` may get."""

    words: tuple[str, ...] = ()
    numbers: tuple[int, ...] | None = None
    text: str | None = None


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("page_size", "16", 16),
        ("max_total_tokens", "4096", 4096),
        ("mem_fraction_static", "0.25", 0.25),
        ("offline", "true", True),
        ("offline", "1", True),
        ("offline", "0", False),
        ("dtype", "bfloat16", "bfloat16"),
        ("model_path", "a/b c", "a/b c"),
        ("model_path", "123", "123"),
        ("json_model_override_args", '{"rope_theta": 5}', '{"rope_theta": 5}'),
    ],
)
def test_a_variable_is_an_option(monkeypatch: pytest.MonkeyPatch, field: str, text: str, value: object) -> None:
    monkeypatch.setenv(f"SGL_{field.upper()}", text)
    assert config() == EngineConfig(**{field: value})


def test_every_option_has_a_variable_with_its_meaning() -> None:
    table = {variable.name: variable for variable in environment.table(EngineConfig)}
    for field in EngineConfig.__struct_fields__:
        assert table[f"SGL_{field.upper()}"].meaning
    assert "SGL_CACHE" in table


def test_arguments_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_PAGE_SIZE", "16")
    monkeypatch.setenv("SGL_RANDOM_SEED", "7")
    assert config(page_size=2) == EngineConfig(page_size=2, random_seed=7)
    assert config(random_seed=None, page_size=1) == EngineConfig()
    monkeypatch.setenv("SGL_PAGE_SIZE", "")  # set to nothing is not set
    assert config() == EngineConfig(random_seed=7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a", ("a",)), ("a,b", ("a", "b")), ('["a", "b,c"]', ("a", "b,c"))],
)
def test_tuples_are_commas_or_json(monkeypatch: pytest.MonkeyPatch, text: str, expected: tuple[str, ...]) -> None:
    monkeypatch.setenv("SGL_WORDS", text)
    monkeypatch.setenv("SGL_NUMBERS", "1,2")
    assert environment.with_environment({}, Tuples) == {"words": expected, "numbers": (1, 2)}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("SGL_PAGE_SIZE", "four", "SGL_PAGE_SIZE is 'four'"),
        ("SGL_PAGE_SIZE", "0", "SGL_PAGE_SIZE is '0'.*>= 1"),
        ("SGL_DTYPE", "float8", "SGL_DTYPE is 'float8'"),
        ("SGL_OFFLINE", "perhaps", "SGL_OFFLINE is 'perhaps'"),
        ("SGL_MEM_FRACTION_STATIC", "2", "SGL_MEM_FRACTION_STATIC is '2'"),
    ],
)
def test_a_wrong_value_names_the_variable(monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=message) as caught:
        config()
    assert name in (caught.value.hint or "")
    assert caught.value.param == name.removeprefix("SGL_").lower()


def test_a_wrong_list_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_WORDS", "[1,")
    with pytest.raises(ConfigError, match="SGL_WORDS is "):
        environment.with_environment({}, Tuples)


def test_unknown_variables_are_named_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_MODEL_PTH", "x")
    monkeypatch.setenv("SGL_QQQQQQ", "x")
    found = dict(environment.unknown_variables(EngineConfig))
    assert found["SGL_MODEL_PTH"] == "SGL_MODEL_PATH"
    assert found["SGL_QQQQQQ"] is None


def test_an_engine_warns_of_unknown_variables(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGL_PAGE_SISE", "16")
    with pytest.raises(ModelNotFound):
        engine.Engine("no-such-model")
    assert "SGL_PAGE_SISE is no variable of sgl and changes nothing; did you mean SGL_PAGE_SIZE?" in caplog.text


def test_an_engine_and_a_command_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_MODEL_PATH", "no-such-model")
    with monkeypatch.context() as patch:
        patch.setattr(engine, "WorkerClient", lambda *arguments: pytest.fail("a worker was started for a wrong name"))
        with pytest.raises(ModelNotFound, match="no-such-model"):
            engine.Engine()
    monkeypatch.setenv("SGL_PAGE_SIZE", "4")

    @engine_options
    def command(*, engine: dict[str, object]) -> dict[str, object]:
        return engine

    assert command(model_path=None, page_size=None) == {"model_path": "no-such-model", "page_size": 4}
    assert command(model_path="dummy", page_size=8)["page_size"] == 8


def test_a_tuple_is_a_flag_that_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()

    @app.command()
    @engine_options
    def show(*, engine: dict[str, object]) -> None:
        sys.stdout.write(repr(engine.get("logit_processors")))

    flags = ["--logit-processors", "a:b", "--logit-processors", "c:d"]
    assert CliRunner().invoke(app, flags).stdout == "('a:b', 'c:d')"
    assert CliRunner().invoke(app, []).stdout == "None"
    monkeypatch.setenv("SGL_LOGIT_PROCESSORS", "x:y,z:w")
    assert CliRunner().invoke(app, []).stdout == "('x:y', 'z:w')"


def test_children_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_PROBE", "own")
    given = environment.inherited(default={"SGL_PROBE": "default", "SGL_OTHER": "default"}, TMPDIR="x")
    assert (given["SGL_PROBE"], given["SGL_OTHER"], given["TMPDIR"]) == ("own", "default", "x")


# --- the command line -----------------------------------------------------------------------------------------------


def test_doctor_shows_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SGL_MODEL_PATH", "dummy")
    monkeypatch.setenv("SGL_PAGE_SIZE", "2")
    monkeypatch.setenv("SGL_PAGE_SISE", "3")
    report = examine({})
    assert report.model.resolved is not None
    assert report.model.resolved.page_size == 2
    assert report.unknown_variables == (("SGL_PAGE_SISE", "SGL_PAGE_SIZE"),)
    shown = json.loads(msgspec.json.encode(report, enc_hook=str))
    values = {row["name"]: row["value"] for row in shown["environment"]}
    assert (values["SGL_PAGE_SIZE"], values["SGL_CACHE"]) == ("2", None)
    items = shown["model"]["resolved"]["memory"]["items"]
    assert {item["what"] for item in items} >= {"weights", "KV pool", "logits"}
    show_report(report)
    text = capsys.readouterr().out
    assert "SGL_PAGE_SISE is not known; did you mean SGL_PAGE_SIZE?" in text
    assert all(item["why"] in text for item in items)
    assert shown["machine"]["memory_limits"][0]["source"] in text


# --- nobody else ----------------------------------------------------------------------------------------------------


def reads(source: str) -> list[int]:
    """Lines that touch the environment."""
    names = ("environ", "environb", "getenv", "putenv", "unsetenv")
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in names and getattr(node.value, "id", "") == "os":
            found.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "os" and {alias.name for alias in node.names} & {*names}:
            found.append(node.lineno)
    return found


def test_one_module_reads_the_environment() -> None:
    files = [path for room in ("lang", "runtime", "kernels", "grammars") for path in (ROOT / room).rglob("*.py")]
    files += [path for path in (ROOT / "sgl").rglob("*.py") if path.resolve() == path]
    others = [path for path in files if path != ROOT / READER]
    assert len(others) < len(files)
    found = [f"{path.relative_to(ROOT)}:{line}" for path in others for line in reads(path.read_text(encoding="utf-8"))]
    assert not found, f"read the environment through sgl.environment: {', '.join(found)}"


@pytest.mark.parametrize(
    "source",
    ["import os\nos.environ['X']", "from os import environ", "import os\nx = {**os.environ}", "os.getenv('X')"],
)
def test_a_reader_is_caught(source: str) -> None:
    assert reads(source)
