"""Every tutorial and the README's programs run as a reader would run them, and do what they promise.

The numbered scripts share one engine on the embedded model and run in this process, each in an empty folder. They check
their own claims with `assert`; here is what cannot be checked from within: what they print, which files they leave, and
that everything they name exists.
"""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sgl
from sgl.kernels import registry
from sgl.runtime.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tutorials"
TUTORIALS = sorted(FOLDER.glob("[0-9]*.py"))
BY_ITSELF = {"00_tour"}
"""Run by `sgl run`, with an engine of its own; this is what `make demo` does."""

PRINTS = {
    "01_first_program": r"value: .+\nwhole text:\n(?s:.+)attempts: \d\n(?s:.+)error: nothing is captured as 'town'",
    "02_chat": r"(\w+ +.+\n){5}---\n<\|im_start\|>system\n(?s:.+)\d+ prompt tokens, of which \d+ were there",
    "03_types": r"\d+ (True|False) (small|large)\nReview\(dish='\w+', stars=[1-5], mood=.+\)\n(?s:.+)even: \d\d\n",
    "04_choices": r"steps for 2 options: (\d+)  for 26: \1\n",
    "05_fork_and_join": r"prompt \d+ = cached \d+ \+ computed \d+\n(?s:.+)prefilled as plain requests +\d+",
    "06_agents_and_tools": r"called (weather|add) (?s:.+)raised: LookupError\n(?s:.+)Act: ",
    "07_streaming_and_async": r"begin: line \d+, \d+ tokens(?s:.+)40 labels: (?s:.+)cancelled: ",
    "08_batches": r"'forwards': \d+(?s:.+)refused: row 1: ",
    "09_serving": r"number: \d\d (?s:.+)remote:  (positive|negative)(?s:.+)refused with 400(?s:.+)ended with ",
    "10_speculation": r"\d+ tokens in \d+ steps, without speculation in \d+\ndrafted: \d+ accepted: \d+\n",
    "11_explain_and_trace": r"prefilled: predicted (\d+), measured \1\n(?s:.+)line \d+: (?s:.+)\d+ steps\n",
    "12_testing": r"failed as told, at line \d+\ndied as told(?s:.+)replayed: (?s:.+)differs: ",
    "13_moving": r"\['system', .+'assistant'\]\n(kind|brave) \d\d\n(yes|no) name='(Ann|Bob)'",
    "14_adding_a_kernel": r"largest error: .+\ncalls: \d+ rows of the first: \d+ tokens equal: True\n",
    "15_adding_a_grammar_backend": r"compiled by WordsGrammar and \w+\n(?s:.+)refused: ",
    "16_reading_the_engine": r"step 1: sequence \d+ computes \d+ at \d+(?s:.+)DoneEvent(?s:.+)held: 0\n",
}
"""What each script prints, as a pattern: structure and counters, and never the model's wording."""


def run(file: Path, cwd: Path) -> str:
    """What `sgl run FILE` prints; it has to end well and say nothing on standard error."""
    command = [sys.executable, "-m", "sgl.cli", "run", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, stdin=subprocess.DEVNULL, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture
def shared(smollm2: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The shared engine as the default one, an empty folder to work in, and the table of kernels as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_table", {op: list(rows) for op, rows in registry._table.items()})
    sgl.set_default_backend(smollm2)
    yield
    sgl.set_default_backend(None)


@pytest.mark.parametrize("file", [file for file in TUTORIALS if file.stem not in BY_ITSELF], ids=lambda file: file.stem)
def test_tutorial(file: Path, shared: None, capfd: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(file), run_name="__main__")
    printed, complaints = capfd.readouterr()
    assert re.search(PRINTS[file.stem], printed), printed
    assert complaints == ""


def test_the_tour(tmp_path: Path) -> None:
    [file] = [file for file in TUTORIALS if file.stem in BY_ITSELF]
    printed = run(file, tmp_path)
    titles = re.findall(r'^title\("(.+)"\)', file.read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"^== (.+)", printed, re.MULTILINE) == titles
    counted = {name: int(number) for name, number in re.findall(r"^(\w+) +(\d+)$", printed, re.MULTILINE)}
    assert counted["prompt_tokens"] == counted["cached_tokens"] + counted["prefill_tokens"]
    assert counted["cached_tokens"] > 0


def test_every_script_is_checked_and_in_the_index() -> None:
    assert {file.stem for file in TUTORIALS} == set(PRINTS) | BY_ITSELF
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w.]+)\)", index))
    assert {file.name for file in FOLDER.iterdir() if file.is_file()} - {"README.md"} == linked


def prose(file: Path) -> str:
    """The text of a tutorial without its code: docstring and comments of a script, all of a page."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    comments = "\n".join(line.removeprefix("#") for line in text.splitlines() if line.startswith("#"))
    return (ast.get_docstring(ast.parse(text)) or "") + "\n" + comments


@pytest.mark.parametrize("file", [*TUTORIALS, *FOLDER.glob("*.md")], ids=lambda file: file.name)
def test_files_and_links_of_the_prose_exist(file: Path) -> None:
    text = prose(file)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (FOLDER / target).exists(), target
    for path in re.findall(r"`((?:lang|runtime|grammars|kernels|sgl|tests|deploy|tutorials)/[\w/.]+?)/?`", text):
        assert (ROOT / path).exists() or "NAME" in path, path


def test_reading_the_engine_names_what_is_there() -> None:
    """Names in backticks that look like classes, methods or functions are defined in the files that are named."""
    text = prose(FOLDER / "16_reading_the_engine.py")
    files = [ROOT / path for path in re.findall(r"`((?:lang|runtime|grammars|kernels|sgl)/[\w/]+\.py)`", text)]
    assert len(files) > 25
    defined: set[str] = set()
    for file in {*files, ROOT / "runtime/core.py"}:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                defined.add(node.name)
            if isinstance(node, ast.ClassDef):
                defined |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    named = set(re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", text)) | {"open", "submit", "cancel", "step", "encode", "to_json"}
    assert len(named) > 20
    assert named <= defined, named - defined


def blocks(kind: str) -> list[str]:
    """Fenced blocks of the README."""
    return re.findall(rf"```{kind}\n(.+?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_program_of_the_readme(shared: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The README shows what its program prints, to the character."""
    [program], [output] = blocks("python"), blocks("text")
    (tmp_path / "program.py").write_text(program)
    runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
    assert capfd.readouterr().out == output


def test_pictures_are_there_and_small() -> None:
    """Those that the README shows, as PNG; `.ci/pictures.py` takes them anew."""
    shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown
    for picture in shown:
        data = (ROOT / picture).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) < 100_000, picture
