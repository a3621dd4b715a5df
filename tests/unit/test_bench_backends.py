"""The two backends of the program bench are backends like any other: the conformance suite, on the toy model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.backend_conformance import BackendConformance

from sgl.bench.plain import PlainBackend
from sgl.bench.stepped import SteppedEngine
from sgl.lang.backend import Backend


@pytest.fixture(scope="module")
def stepped() -> Iterator[SteppedEngine]:
    with SteppedEngine(model_path="dummy", num_threads=1, max_total_tokens=4096) as engine:
        yield engine


class TestStepped(BackendConformance):
    @pytest.fixture
    def backend(self, stepped: SteppedEngine) -> Backend:
        return stepped


class TestPlain(BackendConformance):
    """One by one, so that requests queue; without a bound it runs in the tests of the workloads."""

    has_handles = False

    @pytest.fixture
    def backend(self, stepped: SteppedEngine) -> Backend:
        return PlainBackend(stepped, in_flight=1)
