"""Explain and trace: what a program will cost, what it did cost, and where the time went.

Three tools, for three questions. `explain` predicts a run without a model's forward. `to_html` shows a run that was.
`sgl trace` writes the engine's timeline, step by step.
"""

import json
import subprocess
import sys
from pathlib import Path

import sgl

# ## Before a run
#
# `trace` is what the body appends, with arguments left open: the request graph, in short. `explain` counts it, with the
# model's own tokenizer.

INSTRUCTIONS = "You sort letters to a town hall by what they are about. " * 6


@sgl.function
def route(s, letter):
    s += INSTRUCTIONS
    s += f"\nLetter: {letter}\nAbout: "
    s += sgl.gen("topic", max_tokens=4, min_tokens=4, ignore_eos=True, temperature=0)
    s += "\nUrgent: " + sgl.select("urgent", choices=["yes", "no"])


print(route.trace())

LETTERS = ["The lamp in our street is broken.", "When is the library open?", "My bin was not emptied."]
plan = route.explain(rows=[{"letter": letter} for letter in LETTERS])
print(plan)

# ## Measured beside predicted
#
# `measure` runs the rows and puts what was counted beside the prediction. Here all lengths are known before (four
# tokens each, two options), so both are equal to the token.

sgl.flush_cache()
plan.measure()
print(f"prefilled: predicted {plan.predicted.prefill_tokens}, measured {plan.measured.prefill_tokens}")
assert plan.predicted.prefill_tokens == plan.measured.prefill_tokens

# ## What keeps tokens from being shared
#
# The same text with the letter in front shares nothing, as the rows differ from the first token on. The plan says so,
# and at which line.


@sgl.function
def route_badly(s, letter):
    s += f"Letter: {letter}\n"
    s += INSTRUCTIONS
    s += "\nAbout: " + sgl.gen("topic", max_tokens=4, min_tokens=4, ignore_eos=True, temperature=0)


worse = route_badly.explain(rows=[{"letter": letter} for letter in LETTERS])
print(f"prefilled: {plan.predicted.prefill_tokens} with instructions first, {worse.predicted.prefill_tokens} behind")
for blocker in worse.plan.blockers:
    print(f"line {blocker.location.line}: {blocker.reason}")
assert worse.predicted.prefill_tokens > 2 * plan.predicted.prefill_tokens
assert worse.plan.blockers

# The same from a terminal: `sgl explain FILE.py`, with `--run` to measure and `--html` for a page.
#
# ## After a run
#
# The last run of each program is kept: `last_run.to_html()` is the page of tutorial 5, also for a run that failed.

Path("route.html").write_text(route.last_run.to_html(), encoding="utf-8")

# ## The engine's timeline
#
# `sgl trace FILE.py` runs a program and writes `trace.json`, which https://ui.perfetto.dev opens: a track of steps with
# their tokens, a track per branch from queueing to end, counters of pages and waiting requests. Here it runs a program
# of three lines, on the `dummy` model (random weights, ready at once).

Path("small.py").write_text(
    'import sgl\n\n\n@sgl.function\ndef small(s):\n    s += "Hello" + sgl.gen("x", max_tokens=4)\n\n\nsmall.run()\n'
)
command = [sys.executable, "-m", "sgl.cli", "trace", "--model-path", "dummy", "small.py"]
subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
events = json.loads(Path("trace.json").read_text())
steps = [event for event in events if event["name"].startswith("step of")]
print(len(events), "events, of them", len(steps), "steps")
assert steps

# Next: [testing with mock and replay](12_testing.py).
