"""How long the state machines of tests/property walk: seconds in the suite, 10,000 operations each with SGL_LONG=1."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

LONG = os.environ.get("SGL_LONG") == "1"
LONG_EXAMPLES, LONG_STEPS = 130, 100


def walks(examples: int, steps: int) -> settings:
    """`examples` walks of up to `steps` operations; in the long run 130 of up to 100: above 10,000 operations."""
    if LONG:
        examples, steps = LONG_EXAMPLES, LONG_STEPS
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
