"""The default backend: one automatic one at a time, whatever is set in between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import sgl
from sgl.errors import ConfigError
from sgl.lang import defaults


class Automatic(sgl.MockBackend):
    """Counts how often it is started and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = True
        self.num_shutdowns = 0

    def shutdown(self) -> None:
        self.num_shutdowns += 1
        self.alive = False
        super().shutdown()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Automatic]]:
    """Every automatic backend that was started."""
    found: list[Automatic] = []

    def start() -> Automatic:
        found.append(Automatic())
        return found[-1]

    sgl.default_backend  # noqa: B018 - registers the engine's factory, which is put back afterwards
    before = defaults._factory
    monkeypatch.setattr(defaults, "_automatic", None)
    defaults.register_default_backend(start)
    yield found
    defaults.register_default_backend(before)
    sgl.set_default_backend(None)


def test_going_back_uses_the_one_that_runs(started: list[Automatic]) -> None:
    first = sgl.default_backend()
    mock = sgl.MockBackend()
    sgl.set_default_backend(mock)
    assert sgl.default_backend() is mock
    sgl.set_default_backend(None)
    assert sgl.default_backend() is first
    assert len(started) == 1
    assert started[0].num_shutdowns == 0


def test_none_is_started_while_one_is_set(started: list[Automatic]) -> None:
    sgl.set_default_backend(sgl.MockBackend())
    sgl.default_backend()
    assert started == []


def test_a_dead_one_is_ended_and_replaced(started: list[Automatic]) -> None:
    sgl.default_backend()
    started[0].alive = False
    assert sgl.default_backend() is started[1]
    assert sgl.default_backend() is started[1]
    assert [backend.num_shutdowns for backend in started] == [1, 0]


def test_programs_use_it(started: list[Automatic]) -> None:
    @sgl.function
    def program(s: sgl.ProgramState) -> None:
        s += sgl.gen("x")

    program.run()
    assert len(started[0].graphs) == 1


def test_without_a_factory(started: list[Automatic]) -> None:
    defaults.register_default_backend(None)
    with pytest.raises(ConfigError, match="no backend"):
        sgl.default_backend()
