"""The engine's line every so many steps: how many lines there are, and what they say."""

from __future__ import annotations

import pytest
from support.programs import start, text
from support.scripted import Rig

from sgl.lang.graph import Gen, Sampling
from sgl.runtime.step_log import StepLog


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_a_line_every_so_many_steps(caplog: pytest.LogCaptureFixture, level: str) -> None:
    rig = Rig(hook=lambda plan: rig.advance(0.5))
    steps = StepLog(4, lambda: rig.time)
    with caplog.at_level(level, "sgl.worker"):
        for program in (1, 2):
            gen = Gen(id=1, name="x", sampling=Sampling(max_new_tokens=30, temperature=0.0, ignore_eos=True))
            start(rig, program, text(0, "a" * 30), gen)
            steps.wake()
            for _ in range(6):
                assert rig.core.step()
                steps.stepped(rig.core.scheduler)
            rig.run()
            steps.rest()
            rig.advance(100.0)  # while nobody asks for anything
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (3 if level == "INFO" else 0)
    for line in lines:
        assert line.startswith("4 steps: 1 rows running, 0 queued, ")
        assert float(line.split(", ")[2].removesuffix(" tokens/s")) > 0.1
    if lines:
        assert ", 0.0% of 30 prompt tokens cached, " in lines[0]
        assert ", 96.7% of 30 prompt tokens cached, " in lines[1]
        assert ", no prompt tokens, " in lines[2]
