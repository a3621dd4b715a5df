"""Log records: below `sgl`, a worker's at the user's handlers or on standard error, and the root logger untouched."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl.runtime import logs
from sgl.runtime.messages import Log

ROOT = Path(__file__).resolve().parents[2]


class Keeper(logging.Handler):
    """Keeps what it gets."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.kept: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record)


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    handler = Keeper()
    logging.getLogger("sgl").addHandler(handler)
    yield handler
    logging.getLogger("sgl").removeHandler(handler)


def test_a_workers_record_reaches_the_users_handler(keeper: Keeper, capsys: pytest.CaptureFixture[str]) -> None:
    logs.deliver(Log(logging.DEBUG, "sgl.worker", "100 %s"))
    (record,) = keeper.kept
    assert (record.name, record.levelno, record.getMessage()) == ("sgl.worker", logging.DEBUG, "100 %s")
    assert capsys.readouterr().err == ""


def test_the_users_handler_keeps_its_level(keeper: Keeper) -> None:
    keeper.setLevel(logging.ERROR)
    logs.deliver(Log(logging.WARNING, "sgl.worker", "not for you"))
    assert keeper.kept == []


def test_without_a_handler_it_is_a_line_on_standard_error() -> None:
    code = (
        "import sgl, logging; from sgl.runtime import logs; from sgl.runtime.messages import Log;"
        "logs.deliver(Log(logging.WARNING, 'sgl.worker', 'hot'));"
        "logging.basicConfig(format='root: %(message)s'); logs.deliver(Log(logging.WARNING, 'sgl.worker', 'heard'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "sgl.worker: warning: hot\nroot: heard\n"


@pytest.fixture
def worker_loggers() -> Iterator[None]:
    """Puts back what a worker sets up for its process."""
    loggers = [logging.getLogger(name) for name in (logs.ROOT, "py.warnings")]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    logging.captureWarnings(False)
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers


@pytest.mark.usefixtures("worker_loggers")
def test_a_worker_forwards_records_and_warnings_of_its_level() -> None:
    woken: list[int] = []
    handler = logs.forward_worker_logs("info", lambda: woken.append(1))
    log = logging.getLogger("sgl.runtime.thing")
    log.debug("too low")
    log.info("loaded %d", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("a kernel is slow", stacklevel=1)
    try:
        raise ValueError("deep")
    except ValueError:
        log.exception("failed")
    first, second, third = handler.drain()
    assert (first.level, first.logger, first.text) == (logging.INFO, "sgl.runtime.thing", "loaded 3")
    assert (second.level, second.logger) == (logging.WARNING, "sgl.worker")
    assert "a kernel is slow" in second.text
    assert "ValueError: deep" in third.text
    assert len(woken) == 3
    assert handler.drain() == []
    logs.set_worker_level("error")
    log.warning("too low now")
    assert handler.drain() == []


def test_an_engine_logs_to_sgl_and_leaves_the_root_alone() -> None:
    """In a process of its own: import, a run at level info with a handler on `sgl`, and a change of the level."""
    code = """
import logging
root = logging.getLogger()
before = (root.level, list(root.handlers), logging.raiseExceptions)
import sgl
class Keeper(logging.Handler):
    def emit(self, record):
        print(record.levelname, record.name, record.getMessage().split(":")[0])
logging.getLogger("sgl").addHandler(Keeper())
with sgl.Engine(model_path="dummy", log_level="info", max_total_tokens=256) as engine:
    engine.generate("x", {"max_new_tokens": 1})
    engine.override(log_level="error", why="quiet")
    engine.override(max_queue=7, why="not told")
assert (root.level, list(root.handlers), logging.raiseExceptions) == before
assert logging.getLogger("sgl").level == logging.NOTSET
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "INFO sgl.worker memory plan of dummy\n"


# --- the rules, from the source ---------------------------------------------------------------------------------------

MAY_PRINT = ("sgl/cli", "sgl/bench")


def logging_faults(path: str, source: str) -> list[str]:
    """Uses of the root logger or of everybody's handlers, names outside of `sgl`, and prints."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in ("logging.basicConfig", "logging.disable", "logging.config.dictConfig", "logging.root"):
            found.append(f"{path}:{node.lineno} {name}: handlers are the user's")
        if name.startswith("logging.") and name.split(".")[1] in ("debug", "info", "warning", "error", "exception"):
            found.append(f"{path}:{node.lineno} {name}: logs to the root logger")
        if name in ("logging.getLogger", "getLogger"):
            given = node.args[0] if node.args else None
            literal = given.value if isinstance(given, ast.Constant) else None
            if given is None or (literal is not None and literal != "sgl" and not str(literal).startswith("sgl.")):
                found.append(f"{path}:{node.lineno} {ast.unparse(node)}: loggers are named below sgl")
        if name == "print" and not path.startswith(MAY_PRINT):
            found.append(f"{path}:{node.lineno} print")
    return found


def test_the_library_keeps_the_logging_rules() -> None:
    files = [path for room in ("lang", "runtime", "kernels", "grammars") for path in (ROOT / room).rglob("*.py")]
    files += [path for path in (ROOT / "sgl").rglob("*.py") if path.resolve() == path]
    found = [
        fault
        for path in files
        for fault in logging_faults(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "logging.basicConfig()",
        "logging.warning('x')",
        "logging.getLogger()",
        "logging.getLogger('mine')",
        "print('x')",
    ],
)
def test_a_broken_rule_is_caught(line: str) -> None:
    assert logging_faults("runtime/x.py", line)


def test_sgl_has_a_handler_that_does_nothing() -> None:
    import sgl

    assert sgl.__version__
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("sgl").handlers)
