"""The page about faults names tests that exist, and has every row."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
PAGE = (HERE / "README.md").read_text()
ROWS = 76


@cache
def functions_in(file: Path) -> frozenset[str]:
    """The test functions of a file, of its classes too."""
    nodes = ast.walk(ast.parse(file.read_text()))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in nodes if isinstance(node, kinds) and node.name.startswith("test_"))


def files() -> dict[str, Path]:
    """Short names of files, as the page's head gives them."""
    head = PAGE.split("\n| row |")[0].replace("\n", " ")
    return {short: HERE / name for short, name in re.findall(r"`([A-Z])`(?: is)? `(test_\w+\.py)`", head)}


def named(text: str) -> list[tuple[Path, str]]:
    """The tests that a text names."""
    short = files()
    found = re.findall(r"`([\w/.]+)::(test_\w+)`", text)
    return [(short[place] if place in short else HERE.parent / place, test) for place, test in found]


def test_every_row_is_there_once_and_in_order_with_a_test() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, ROWS + 1))
    assert not [number for number, _, tests in rows if not named(tests)]
    assert len({fault for _, fault, _ in rows}) == ROWS


def test_every_test_that_is_named_exists() -> None:
    assert files()
    missing = [
        f"{file.name}::{test}" for file, test in named(PAGE) if not file.exists() or test not in functions_in(file)
    ]
    assert not missing


def test_every_test_that_names_a_row_is_in_that_row() -> None:
    """So that none is forgotten here."""
    table = {int(row): tests for row, tests in re.findall(r"^\| (\d+) \|[^|]+\| (.+) \|$", PAGE, re.MULTILINE)}
    files_with_rows = sorted(HERE.glob("test_*.py"))
    missing = []
    for file in files_with_rows:
        for test in sorted(functions_in(file)):
            found = re.match(r"test_rows?_((?:\d\d_)+)", test)
            rows = [int(row) for row in found[1].split("_") if row] if found else []
            missing += [f"row {row}: {test}" for row in rows if f"::{test}`" not in table[row]]
    assert not missing
