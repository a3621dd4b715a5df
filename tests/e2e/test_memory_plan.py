"""The memory plan against what a worker really holds, and an engine in two gigabytes.

Stated margin: under a load that fills the pool, the worker's peak is at most the plan, and at least 70 % of what the
plan says is held whatever is asked (weights, libraries, the full pool). The rest of the plan, the largest step, counts
every row as scored and every sequence as long as the context, which no load does at once.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.memory import PeakOfChildren, held

from sgl import environment
from sgl.runtime.engine import Engine
from sgl.runtime.memory_plan import GiB, MiB

LEAST_SHARE = 0.7
HELD = ("weights", "libraries", "KV pool")


@pytest.mark.parametrize(("model", "pool"), [("dummy", 8192), ("smollm2-135m", 1200)])
def test_the_worker_stays_within_its_plan(model: str, pool: int) -> None:
    with PeakOfChildren() as children, Engine(model_path=model, dtype="float32", max_total_tokens=pool) as engine:
        plan = engine.server_info()["resolved"]["memory"]
        context = min(pool // 2, 1500)  # prompts of several steps each
        prompts = [[(7 * row + token) % 400 + 1 for token in range(context - 8)] for row in range(pool // context)]
        engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 2, "temperature": 0})
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        engine.generate(["x"] * 16, {"max_new_tokens": 2, "temperature": 1.0, "json_schema": schema})
        assert engine.stats()["pages_free"] < 0.1 * pool  # the pool was really used
        assert held(engine.worker_pid) > 0
    needed = max(plan["loading_bytes"], plan["serving_bytes"])
    least = LEAST_SHARE * sum(item["bytes"] for item in plan["items"] if item["what"] in HELD)
    figures = f"{least / MiB:.0f} <= peak {children.peak_bytes / MiB:.0f} <= plan {needed / MiB:.0f} MiB"
    assert least <= children.peak_bytes <= needed, figures


def test_the_readme_program_runs_in_two_gigabytes(tmp_path: Path, root: Path) -> None:
    """With RLIMIT_DATA as the wall: it counts what is written to, resident or not, and so is stricter than a control
    group. SmolLM2 in float32, said in the environment; everything else as decided."""
    readme = (root / "README.md").read_text()
    program = readme.split("```python\n")[1].split("```")[0]
    (tmp_path / "demo.py").write_text(
        program + "\nresolved = sgl.get_server_info()['resolved']\n"
        "print(resolved['dtype'], resolved['memory']['available_source'], resolved['num_pages'])\n"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (2 * GiB, 2 * GiB))

    with PeakOfChildren() as children:
        done = subprocess.run(
            [sys.executable, str(tmp_path / "demo.py")],
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=limit,
            env=environment.inherited(SGL_DTYPE="float32"),
        )
    assert (done.returncode, done.stderr) == (0, "")
    answer, decided = done.stdout.splitlines()
    dtype, source, num_pages = decided.split()
    assert (answer, dtype, source) == ("negative 2", "float32", "RLIMIT_DATA")
    assert int(num_pages) >= 4096
    assert children.peak_bytes < 2 * GiB
