"""The engine is a backend like any other: the conformance suite, on the toy model in a real worker."""

from __future__ import annotations

import pytest
from support.backend_conformance import BackendConformance

from sgl.lang.backend import Backend
from sgl.runtime.engine import Engine


class TestEngine(BackendConformance):
    @pytest.fixture
    def backend(self, dummy_engine: Engine) -> Backend:
        return dummy_engine
