"""Testing with mock and replay: programs without a model.

A program is code, and its tests should not depend on what a model says today. Three tools: a mock that answers from a
script, a recording of real answers, and a pytest fixture.
"""

from pathlib import Path

import sgl

# ## A program to test


@sgl.function
def triage(s, message):
    s += sgl.system("You work at a help desk.") + sgl.user(message)
    s += sgl.assistant("Kind: " + sgl.select("kind", choices=["bug", "question"]))
    if s["kind"] == "bug":
        s += sgl.user("Which version?")
        s += sgl.assistant(sgl.gen("version", regex=r"[0-9]\.[0-9]", temperature=0))
        return f"bug in {s['version']}"
    return "question"


# ## The mock
#
# It answers by name (or in order, or by a function of the prompt), cuts at stops and at budgets as an engine does, and
# keeps what it was asked. Without an answer it takes the first option, or something that matches the regex.

mock = sgl.MockBackend({"version": "1.2"}, choices={"kind": "bug"})
state = triage.run("It crashes.", backend=mock)
assert state.ret_value == "bug in 1.2"
assert [name for name, _ in mock.prompts] == ["kind", "version"]
assert "It crashes." in mock.prompts[0][1]

assert triage.run("Why?", backend=sgl.MockBackend(choices={"kind": "question"})).ret_value == "question"

# ## Failures
#
# A test of error handling needs errors. The mock fails where it is told to, or dies like a worker that crashed.

failing = sgl.MockBackend(choices={"kind": "bug"}, errors={"version": sgl.errors.QueueFull("too many requests")})
try:
    triage.run("It crashes.", backend=failing)
except sgl.errors.QueueFull as error:
    print("failed as told, at line", error.location.line)

try:
    triage.run("It crashes.", backend=sgl.MockBackend(die_at="kind"))
except sgl.errors.EngineDead as error:
    print("died as told:", error.message)

# ## The model's own tokens
#
# With `model` the mock has that model's tokenizer and chat template (not its weights): prompts are then token for token
# those of an engine, so token counts can be tested.

exact = sgl.MockBackend({"version": "1.2"}, choices={"kind": "bug"}, model="smollm2-135m")
triage.run("It crashes.", backend=exact)
print(exact.prompts[0][1])
assert "<|im_start|>user\nIt crashes.<|im_end|>" in exact.prompts[0][1]

# ## Recordings
#
# A `Recorder` passes everything on to a real backend and writes it down. `Replay` answers from the file: no model, the
# same values. When the program has changed in between, it says at which node, and where that was.

with sgl.Recorder("triage.json") as recorder:
    real = triage.run("How do I print?", backend=recorder)

replayed = triage.run("How do I print?", backend=sgl.Replay("triage.json"))
assert replayed.ret_value == real.ret_value
assert replayed.text() == real.text()
print("replayed:", replayed.ret_value, "from", Path("triage.json").stat().st_size, "bytes")

try:
    triage.run("How do I scan?", backend=sgl.Replay("triage.json"))
except sgl.errors.InvalidProgram as error:
    print("differs:", error.message[:90], "...")

# ## In pytest
#
# The fixture `sgl_mock` comes with the package. Programs of the test use its mock without naming it:
#
# ```
# def test_bug(sgl_mock):
#     sgl_mock({"version": "1.2"}, choices={"kind": "bug"})
#     assert triage.run("It crashes.").ret_value == "bug in 1.2"
# ```
#
# Next: [moving from SGLang, guidance, outlines](13_moving.py).
