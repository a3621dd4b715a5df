"""The command line without an engine: flags, messages, exit codes, and how a program file is run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import sgl
from sgl.cli import main
from sgl.cli.options import flag_of, parameters_of
from sgl.runtime.config import EngineConfig, config_from_mapping


class Outcome(msgspec.Struct):
    """How a command ended."""

    code: int
    out: str
    err: str


class Command:
    """Runs `sgl ARGS` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: str) -> Outcome:
        with pytest.raises(SystemExit) as ended:
            main(args)
        printed = self._capsys.readouterr()
        return Outcome(int(ended.value.code or 0), printed.out, printed.err)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setattr(sys, "argv", ["sgl"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")
    return Command(capsys)


def write(folder: Path, text: str, name: str = "program.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


# --- the command line itself ----------------------------------------------------------------------------------------


def test_version(command: Command) -> None:
    assert command("--version") == Outcome(0, f"sgl {sgl.__version__}\n", "")


def test_no_command_shows_help(command: Command) -> None:
    shown = command()
    for name in ("run", "pull", "list", "doctor", "bench"):
        assert f"  {name} " in shown.out + shown.err


@pytest.mark.parametrize(
    ("args", "suggestion"),
    [
        (("rnu", "x.py"), "run"),
        (("docter",), "doctor"),
        (("bench", "latencey"), "latency"),
        (("run", "--modle-path", "dummy", "x.py"), "--model-path"),
        (("list", "--jsn"), "--json"),
        (("doctor", "--page-sise", "2"), "--page-size"),
    ],
)
def test_a_wrong_name_suggests_the_right_one(command: Command, args: tuple[str, ...], suggestion: str) -> None:
    ended = command(*args)
    assert ended.code == 2
    assert suggestion in ended.err
    assert "Traceback" not in ended.err


def test_flags_are_the_fields_of_engine_config(command: Command) -> None:
    text = command("run", "--help").out
    for field in EngineConfig.__struct_fields__:
        assert flag_of(field) in text
    names = [parameter.name for parameter in parameters_of(EngineConfig, "Engine")]
    assert names == list(EngineConfig.__struct_fields__)


def test_flag_that_is_not_given_stays_with_the_config() -> None:
    assert all(parameter.default is None for parameter in parameters_of(EngineConfig, "Engine"))
    assert config_from_mapping({}) == EngineConfig()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--page-size", "0"), "page_size"),
        (("--page-size", "four"), "--page-size"),
        (("--dtype", "float8"), "'float32', 'bfloat16'"),
        (("--mem-fraction-static", "1.5"), "mem_fraction_static"),
    ],
)
def test_a_wrong_value_is_bad_usage(command: Command, tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    ended = command("run", *flags, write(tmp_path, "raise SystemExit(7)"))
    assert ended.code == 2
    assert message in ended.err


# --- sgl run --------------------------------------------------------------------------------------------------------


def test_program_sees_its_own_arguments_and_folder(command: Command, tmp_path: Path) -> None:
    write(tmp_path, "WORD = 'beside'", "neighbour_of_program.py")
    file = write(tmp_path, "import sys, neighbour_of_program as n\nprint(__name__, sys.argv[1:], n.WORD)")
    ended = command("run", file, "--page-size", "x", "-h")
    assert ended == Outcome(0, "__main__ ['--page-size', 'x', '-h'] beside\n", "")


def test_exit_status_of_the_program_is_kept(command: Command, tmp_path: Path) -> None:
    assert command("run", write(tmp_path, "raise SystemExit(7)")).code == 7


def test_missing_file_names_the_nearest(command: Command, tmp_path: Path) -> None:
    write(tmp_path, "", "tutorial.py")
    ended = command("run", str(tmp_path / "tutoriel.py"))
    assert ended.code == 2
    assert "no file" in ended.err
    assert "tutorial.py" in ended.err.splitlines()[-1]


def test_a_folder_is_no_program(command: Command, tmp_path: Path) -> None:
    write(tmp_path, "", "inside.py")
    ended = command("run", str(tmp_path))
    assert ended.code == 2
    assert "is a folder" in ended.err
    assert "inside.py" in ended.err


@pytest.mark.parametrize("text", ["def f(:\n    pass\n", "x = 'open\n", "a = 1\n  b = 2\n"])
def test_syntax_error_shows_the_line_and_no_traceback(command: Command, tmp_path: Path, text: str) -> None:
    ended = command("run", write(tmp_path, text))
    assert ended.code == 1
    assert "program.py" in ended.err
    assert "Error" in ended.err
    assert "Traceback" not in ended.err


def test_a_file_that_is_not_text(command: Command, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_bytes(b"\x00\xff\xfe")
    ended = command("run", str(tmp_path / "program.py"))
    assert (ended.code, "Traceback" in ended.err) == (1, False)
    assert ended.err.strip()


def test_error_of_the_user_keeps_its_traceback(command: Command, tmp_path: Path) -> None:
    ended = command("run", write(tmp_path, "def f():\n    return {}['key']\n\nf()\n"))
    assert ended.code == 1
    assert "KeyError: 'key'" in ended.err
    assert "in f" in ended.err
    assert "runpy" not in ended.err


RAISES = (
    "from sgl.errors import InvalidParameter\n\n\ndef go():\n"
    "    raise InvalidParameter('top_p is 3.0', hint='set it to 1', param='top_p')\n\n\ngo()\n"
)


def test_error_of_sgl_is_one_message_with_line_and_hint(command: Command, tmp_path: Path) -> None:
    file = write(tmp_path, RAISES)
    ended = command("run", file)
    assert ended.code == 1
    assert ended.err == f"error: top_p is 3.0\n  at {file}:5 in go\n  hint: set it to 1\n"


def test_debug_lets_the_traceback_through(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sgl.cli", "run", "--debug", write(tmp_path, RAISES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "InvalidParameter: top_p is 3.0" in done.stderr


def test_interrupt_is_one_line(command: Command, tmp_path: Path) -> None:
    ended = command("run", write(tmp_path, "raise KeyboardInterrupt"))
    assert ended == Outcome(130, "", "interrupted\n")


# --- models and machine ---------------------------------------------------------------------------------------------


def test_list_as_table_and_json(command: Command, clean_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", clean_env["HOME"])
    monkeypatch.setenv("XDG_CACHE_HOME", clean_env["XDG_CACHE_HOME"])
    monkeypatch.delenv("SGL_CACHE", raising=False)
    shown = command("list")
    assert shown.code == 0
    assert "smollm2-135m" in shown.out
    rows = {row["name"]: row for row in json.loads(command("list", "--json").out)}
    assert rows["smollm2-135m"]["cached"] is False


def test_pull_of_an_unknown_name(command: Command) -> None:
    ended = command("pull", "smollm2-135x")
    assert ended.code == 1
    assert "smollm2-135m" in ended.err
    assert "Traceback" not in ended.err


def test_doctor_explains_the_dummy_model(command: Command) -> None:
    report = json.loads(command("doctor", "--model-path", "dummy", "--page-size", "2", "--json").out)
    assert report["model"]["local"] is True
    assert report["model"]["resolved"]["page_size"] == 2
    assert {choice["op"] for choice in report["kernels"]} >= {"rms_norm"}
    assert report["machine"]["usable_cpus"] >= 1
    assert {row["name"] for row in report["limits"]} >= {"max_stops", "max_json_depth"}
    text = command("doctor", "--model-path", "dummy", "--max-queue", "4").out
    assert re.search(r"max_queue +4 +--max-queue ", text)
    assert "dtype" in text
    assert "float32" in text


def test_doctor_reports_a_model_that_cannot_be_used(command: Command) -> None:
    ended = command("doctor", "--model-path", "no-such-model", "--json")
    assert ended.code == 1
    assert json.loads(ended.out)["model"]["error"]["code"] == "model_not_found"


# --- with an engine on the dummy model ------------------------------------------------------------------------------


def test_run_applies_engine_flags_to_the_default_engine(tmp_path: Path) -> None:
    text = (
        "import sgl\n\n\n@sgl.function\ndef p(s):\n    s += 'x' + sgl.gen('a', max_tokens=2)\n\n\n"
        "p.run()\nprint(sgl.get_server_info()['resolved']['num_pages'])\n"
    )
    flags = ["--model-path", "dummy", "--max-total-tokens", "512", "--page-size", "4"]
    command = [sys.executable, "-m", "sgl.cli", "run", *flags, write(tmp_path, text)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "128\n", "")


def test_run_applies_engine_flags_to_engines_that_the_program_starts(tmp_path: Path) -> None:
    text = (
        "import sgl\nfor given in ({}, {'page_size': 2}):\n    with sgl.Engine(**given) as engine:\n"
        "        resolved = engine.server_info()['resolved']\n"
        "        print(resolved['num_pages'], resolved['page_size'])\n"
    )
    flags = ["--model-path", "dummy", "--max-total-tokens", "512", "--page-size", "4"]
    command = [sys.executable, "-m", "sgl.cli", "run", *flags, write(tmp_path, text)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "128 4\n256 2\n", "")


def test_run_on_a_model_that_does_not_exist(tmp_path: Path) -> None:
    text = "import sgl\n\n\n@sgl.function\ndef p(s):\n    s += 'x' + sgl.gen('a')\n\n\np.run()\n"
    command = [sys.executable, "-m", "sgl.cli", "run", "--model-path", "dumy", write(tmp_path, text)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no model 'dumy'")
    assert "did you mean 'dummy'" in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_latency_measures_everything(command: Command) -> None:
    ended = command("bench", "latency", "--model-path", "dummy", "--repeats", "2", "--json")
    report = json.loads(ended.out)
    assert (report["model"], report["repeats"], report["engine"]["dtype"]) == ("dummy", 2, "float32")
    assert [row["what"] for row in report["measured"]] == [
        "import sgl",
        "engine start to first token",
        "prefill, 512 tokens",
        "decode, batch 1",
        "decode, batch 8",
    ]
    assert all(len(row["samples"]) == 2 and row["median"] > 0 for row in report["measured"])
