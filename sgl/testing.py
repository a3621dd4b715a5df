"""For tests of programs: a pytest plugin, which comes with the package (`pytest --fixtures` shows it).

Owns the fixture `sgl_mock`. Importing this needs pytest; nothing else of the package does.

    def test_capital(sgl_mock):
        mock = sgl_mock({"city": "Paris. And"})
        assert capital.run("France")["city"] == "Paris"
        assert mock.prompts == [("city", "The capital of France is ")]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import pytest

import sgl


class MakeMock(Protocol):
    """What `sgl_mock` is: makes a mock (see `sgl.MockBackend`), which programs of the test use without naming it."""

    def __call__(self, answers: Any = (), **options: Any) -> sgl.MockBackend:
        """A mock with these answers, the default backend from now on."""


@pytest.fixture
def sgl_mock() -> Iterator[MakeMock]:
    """Make a scripted backend and let programs use it: `mock = sgl_mock({"name": "answer"})`.

    Takes what `sgl.MockBackend` takes. After the test the default backend is what it was without one.
    """
    made: list[sgl.MockBackend] = []

    def make(answers: Any = (), **options: Any) -> sgl.MockBackend:
        mock = sgl.MockBackend(answers, **options)
        made.append(mock)
        sgl.set_default_backend(mock)
        return mock

    yield make
    if made:
        sgl.set_default_backend(None)
    for mock in made:
        mock.shutdown()
