"""The arrows between rooms, and the few things no room may do, read from the source with `ast`.

DESIGN: leaves import the standard library and msgspec; `lang` sees of the grammars only their torch-free parts; the
runtime sees of `lang` only the graph; nothing imports the outside (`sgl.cli`, `sgl.bench`, `sgl.doctor`) from within.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("lang", "runtime", "kernels", "grammars")

LEAVES = ("sgl.errors", "sgl.limits", "sgl.environment")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "kernels": (*LEAVES, "sgl.kernels"),
    "grammars": (*LEAVES, "sgl.grammars"),
    "lang": (*LEAVES, "sgl.lang", "sgl.grammars.spec", "sgl.grammars.types", "sgl.grammars.formats"),
    "runtime": (*LEAVES, "sgl.runtime", "sgl.lang.graph", "sgl.kernels", "sgl.grammars"),
}
"""Prefixes of `sgl` modules that each room may name. `sgl/` itself may name all."""

LEAF_FILES = ("sgl/errors.py", "sgl/limits.py", "sgl/environment.py")
LANG_FORBIDS = ("torch", "transformers", "llguidance", "xgrammar", "numpy")
NO_TORCH = ("runtime/text", "runtime/messages.py", "runtime/stats.py", "runtime/config.py")
"""Parts of the runtime that the client half uses: torch stays out of them."""

PRINTS = ("sgl/cli", "sgl/bench", "tutorials")
EXECUTES = ("sgl/cli/run.py",)
ASSERTS = "tutorials/"
"""Scripts whose claims are checked where they stand."""
FORBIDDEN_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal")


def source_files() -> list[Path]:
    """Every Python file of the package and the tutorials, each under its real path once."""
    found = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    found += [path for path in (ROOT / "sgl").rglob("*.py") if path.resolve() == path]
    return sorted(found + list((ROOT / "tutorials").rglob("*.py")))


def imports(tree: ast.AST, module: str = "") -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported, also inside functions and `TYPE_CHECKING`; `from a import b` gives
    `a.b` as well as `a`, since `b` may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, base] if base else package)
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def is_within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def arrow_faults(path: str, source: str) -> list[str]:
    """What is wrong with the imports of the file at `path` (relative to the root, with the room as first part)."""
    tree = ast.parse(source)
    room = path.split("/")[0]
    module = ".".join(["sgl", *Path(path).with_suffix("").parts]) if room in ROOMS else ""
    faults = []
    for line, name in imports(tree, module):
        top = name.split(".")[0]
        if top in ROOMS:
            faults.append(f"{path}:{line} imports {name}; write sgl.{name}")
        if top in FORBIDDEN_MODULES:
            faults.append(f"{path}:{line} imports {name}: nothing here is pickled")
        if path in LEAF_FILES and top not in (*sys.stdlib_module_names, "msgspec") and not is_within(name, LEAVES):
            faults.append(f"{path}:{line} imports {name}: a leaf needs the standard library and msgspec only")
        if room in MAY_IMPORT and top == "sgl" and name != "sgl":
            # `from sgl.lang import graph` also yields the bare package, which carries no code of its own.
            parent_of_allowed = any(allowed.startswith(name + ".") for allowed in MAY_IMPORT[room])
            if not is_within(name, MAY_IMPORT[room]) and not parent_of_allowed:
                faults.append(f"{path}:{line} imports {name}: not among the arrows of {room}/")
        if room == "lang" and top in LANG_FORBIDS:
            faults.append(f"{path}:{line} imports {name}: the language runs without engines")
        if any(path == part or path.startswith(part + "/") for part in NO_TORCH) and top in ("torch", "transformers"):
            faults.append(f"{path}:{line} imports {name}: the client half runs without torch")
    return faults


def habit_faults(path: str, source: str) -> list[str]:
    """Calls and statements that have no place in the package."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert) and not path.startswith(ASSERTS):
            faults.append(f"{path}:{node.lineno} assert: raise a typed error instead")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("eval", "exec") and path not in EXECUTES:
                faults.append(f"{path}:{node.lineno} {node.func.id}(): program text is never executed")
            if node.func.id == "print" and not any(path.startswith(place) for place in PRINTS):
                faults.append(f"{path}:{node.lineno} print(): return it, log it, or leave it to the CLI")
        elif isinstance(node, ast.ExceptHandler):
            catches_all = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            if catches_all and all(isinstance(step, (ast.Pass, ast.Continue)) for step in node.body):
                faults.append(f"{path}:{node.lineno} swallows every exception")
    return faults


def test_files_are_found_once_and_in_every_room() -> None:
    files = source_files()
    assert len({path.resolve() for path in files}) == len(files)
    assert {path.relative_to(ROOT).parts[0] for path in files} >= {*ROOMS, "sgl"}


def test_links_are_relative_and_lead_to_the_rooms() -> None:
    for room in ROOMS:
        link = ROOT / "sgl" / room
        assert link.is_symlink(), f"sgl/{room} must be a link in the repository"
        assert link.readlink() == Path("..") / room


def test_arrows() -> None:
    faults = [
        fault
        for path in source_files()
        for fault in arrow_faults(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert not faults, "\n".join(faults)


def test_habits() -> None:
    faults = [
        fault
        for path in source_files()
        for fault in habit_faults(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("lang/x.py", "import torch"),
        ("lang/x.py", "from sgl.grammars.matcher import Matcher"),
        ("lang/x.py", "from sgl.grammars import compiler"),
        ("lang/x.py", "from sgl.runtime.engine import Engine"),
        ("lang/sub/x.py", "from ...runtime import engine"),
        ("runtime/x.py", "from sgl.lang.interpreter import run"),
        ("runtime/x.py", "def late():\n    from sgl.lang import backend"),
        ("runtime/x.py", "import sgl.cli"),
        ("runtime/x.py", "import pickle"),
        ("runtime/text/x.py", "import torch"),
        ("kernels/x.py", "from sgl.runtime.plan import StepPlan"),
        ("grammars/x.py", "from sgl.lang.graph import Graph"),
        ("sgl/errors.py", "import numpy"),
        ("sgl/limits.py", "from sgl.lang.graph import Graph"),
        ("sgl/x.py", "from kernels.registry import get"),
    ],
)
def test_a_wrong_import_is_caught(path: str, line: str) -> None:
    assert arrow_faults(path, line)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("lang/x.py", "from sgl.grammars.spec import Regex\nfrom sgl.lang import graph\nimport msgspec, sgl.errors"),
        ("lang/x.py", "from sgl.grammars import spec"),
        ("runtime/x.py", "from sgl.lang.graph import Graph\nfrom sgl.kernels import registry\nimport torch"),
        ("runtime/x.py", "from sgl.lang import graph"),
        ("sgl/errors.py", "from typing import Any\nimport msgspec"),
    ],
)
def test_a_right_import_passes(path: str, line: str) -> None:
    assert arrow_faults(path, line) == []


@pytest.mark.parametrize(
    "line",
    [
        "assert x > 0",
        "eval('1')",
        "exec('1')",
        "print('x')",
        "try:\n    f()\nexcept Exception:\n    pass",
        "for _ in x:\n    try:\n        f()\n    except:\n        continue",
    ],
)
def test_a_bad_habit_is_caught(line: str) -> None:
    assert habit_faults("runtime/x.py", line)


def test_places_that_may_print_or_execute() -> None:
    assert habit_faults("sgl/cli/x.py", "print('x')") == []
    assert habit_faults("tutorials/x.py", "assert x > 0") == []
    assert habit_faults("runtime/x.py", "model.eval()\nre.compile('x')") == []


@pytest.mark.parametrize("module", ["sgl.errors", "sgl.limits", "sgl.grammars.spec", "sgl.lang.graph"])
def test_contracts_import_without_engines(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'llguidance', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
