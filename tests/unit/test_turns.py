"""Turns of a program: the chat template is run over a conversation once where it is known as a whole, off the step loop
where it is long, and for no program without end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import msgspec
import pytest
from support.scripted import Rig

from sgl.errors import SglError
from sgl.lang.graph import (
    DoneEvent,
    FailedEvent,
    Fork,
    Gen,
    Graph,
    LiteralText,
    Mark,
    Node,
    ProgramOptions,
    Release,
    Role,
    Sampling,
    Text,
    TextEvent,
    ValueEvent,
    Var,
)
from sgl.runtime import branch, program_run, program_text
from sgl.runtime.text.template import ChatTemplate
from sgl.runtime.text.transcript import TURN_LEN, Transcript

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOOKING = CHATML + "{% if messages[-1].role == 'nobody' %}{% endif %}"
"""The same, for all that its syntax tells, by a look at all turns."""


class Held(Executor):
    """Runs jobs when it is told to."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.num_done = 0

    def submit(self, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((future, job))
        return future

    def run_one(self) -> bool:
        """Run the oldest; False where there is none."""
        if not self._jobs:
            return False
        future, job = self._jobs.pop(0)
        self.num_done += 1
        try:
            future.set_result(job())
        except SglError as error:
            future.set_exception(error)
        return True


@pytest.fixture(params=[CHATML, LOOKING], ids=["local", "looking"])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rig:
    tokenizer = copy.copy(Rig.tokenizer)
    tokenizer.chat_template = ChatTemplate(request.param)
    assert tokenizer.chat_template.is_local == (request.param == CHATML)
    monkeypatch.setattr(Rig, "tokenizer", tokenizer)
    return Rig(context_len=4096, num_pages=4096)


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many turns each rendering was shown, from now on."""
    seen: list[int] = []
    render = ChatTemplate.render

    def counted(self: ChatTemplate, messages: Any, *args: Any, **kwargs: Any) -> str:
        seen.append(len(messages))
        return render(self, messages, *args, **kwargs)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    return seen


def conversation(num_turns: int) -> list[Node]:
    """Turns, and the beginning of an answer."""
    nodes: list[Node] = []
    for number in range(num_turns):
        role = ("user", "assistant")[number % 2]
        nodes.append(Role(id=0, role=role, begin=True))
        nodes.append(Text(id=0, segments=(LiteralText(f"x{number} "),)))
        nodes.append(Role(id=0, role=role, begin=False))
    nodes.append(Role(id=0, role="assistant", begin=True))
    nodes.append(Gen(id=0, name="answer", sampling=Sampling(max_new_tokens=2, ignore_eos=True)))
    return [msgspec.structs.replace(node, id=id) for id, node in enumerate(nodes)]


def num_tokens(rig: Rig, nodes: list[Node]) -> int:
    """Tokens of the prompt, turn by turn."""
    transcript, num = Transcript(rig.tokenizer), 0
    for node in nodes:
        match node:
            case Role(begin=True):
                transcript.begin(node.role)
            case Role():
                transcript.end()
            case Text(segments=(LiteralText(text=text),)):
                transcript.add_text(text)
            case _:
                num = len(transcript.flush())
    return num


def begin(rig: Rig, nodes: list[Node]) -> None:
    rig.core.open(1, ProgramOptions(stream=True))
    rig.core.submit(1, Graph(nodes=tuple(nodes)), finish=True)


def test_turns_that_are_known_are_rendered_together(rig: Rig, rendered: list[int]) -> None:
    nodes = conversation(60)
    begin(rig, nodes)
    rig.run()
    assert sum(rendered) < 6 * 62
    (value,) = rig.of(1, ValueEvent)
    assert value.usage.prompt_tokens == num_tokens(rig, nodes)
    assert len(rig.of(1, DoneEvent)) == 1


def two_answers() -> list[Node]:
    turns = [*conversation(3), Role(id=0, role="assistant", begin=False), *conversation(1)]
    return [msgspec.structs.replace(node, id=id) for id, node in enumerate(turns)]


def test_a_turn_of_a_long_conversation_is_a_job_and_nobody_waits_for_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(rig, two_answers())
    rig.run()
    expected, rig.events[1] = rig.events[1], []
    monkeypatch.setattr(branch, "SMALL_TURN", 2 * TURN_LEN)
    rig.core._executor = held = Held()
    begin(rig, two_answers())
    rig.core.open(2, ProgramOptions())
    rig.core.submit(2, Graph(nodes=tuple(conversation(1))), finish=True)
    rig.run()
    assert len(rig.of(2, DoneEvent)) == 1
    assert not rig.of(1, ValueEvent)
    while held.run_one():
        rig.core.step()
        rig.run()
    assert held.num_done > 3
    assert _said(rig.events[1]) == _said(expected)


def _said(events: list[Any]) -> list[Any]:
    """Texts, values and what they cost, but for what the cache gave."""
    shown = [(event.value, event.usage.prompt_tokens) for event in events if isinstance(event, ValueEvent)]
    return [*shown, "".join(event.text for event in events if isinstance(event, TextEvent)), type(events[-1]).__name__]


def test_a_program_that_ends_while_its_turn_is_rendered_leaves_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branch, "SMALL_TURN", 2 * TURN_LEN)
    rig.core._executor = held = Held()
    begin(rig, two_answers())
    rig.core.cancel(1)
    assert held.run_one()
    rig.core.step()
    assert not held.run_one()
    assert rig.core.snapshot().num_programs == rig.core.snapshot().pages_held == 0


def test_what_a_template_is_run_over_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_text, "MAX_RENDERED", 20 * TURN_LEN)
    begin(rig, conversation(20))
    (failed,) = rig.of(1, FailedEvent)
    assert failed.error.code == "invalid_program"
    assert str(20 * TURN_LEN) in failed.error.message


def test_a_guess_at_what_follows_is_short(rig: Rig) -> None:
    long = Text(id=90, segments=(LiteralText("z" * 100_000),))
    begin(rig, [*conversation(1), long])
    rig.core.step()
    (request,) = rig.core.scheduler.running
    assert request.following is not None
    assert 0 < len(request.following()) < branch.SMALL


def test_values_that_stand_in_texts_again_and_again_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(id=0, segments=(LiteralText("a"),))
    gen = Gen(id=1, name="a", sampling=Sampling(max_new_tokens=64, ignore_eos=True))
    begin(rig, [text, gen, Text(id=2, segments=(Var("a"),) * 70_000)])
    rig.run()
    (failed,) = rig.of(1, FailedEvent)
    assert (failed.error.code, failed.node) == ("invalid_program", 2)
    monkeypatch.setattr(program_text, "MAX_WRITTEN", 640)
    rig.events.clear()
    begin(rig, [text, gen, *(Text(id=id, segments=(Var("a"),)) for id in range(2, 20))])
    rig.run()
    (failed,) = rig.of(1, FailedEvent)
    assert "640" in failed.error.message
    assert rig.core.snapshot().num_programs == 0


def test_texts_that_follow_each_other_are_streamed_as_one(rig: Rig) -> None:
    begin(rig, [Text(id=id, segments=(LiteralText("a"),)) for id in range(500)])
    assert [event.text for event in rig.of(1, TextEvent)] == ["a" * 500]


def test_what_the_states_of_a_program_hold_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_text, "MAX_HELD", 4 * (100 + program_text.STATE_LEN))
    text = Text(id=0, segments=(LiteralText("a" * 100),))
    for nodes in (
        [Fork(id=1, children=(1, 2, 3, 4, 5))],
        [Mark(id=id, label=f"m{id}") for id in range(1, 6)],
    ):
        begin(rig, [text, *nodes])
        (failed,) = rig.of(1, FailedEvent)
        assert (failed.error.code, "at most" in failed.error.message) == ("invalid_program", True)
        rig.events.clear()
    again: list[Node] = []
    for number in range(3):
        children = (1 + 3 * number, 2 + 3 * number, 3 + 3 * number)
        again += [Fork(id=0, children=children), *(Release(id=0, branch=child) for child in children)]
        again += [Gen(id=0, name="x", sampling=Sampling(max_new_tokens=1, ignore_eos=True)), Mark(id=0, label="m")]
    monkeypatch.setattr(program_text, "MAX_HELD", 4 * (110 + program_text.STATE_LEN))
    begin(rig, [msgspec.structs.replace(node, id=id) for id, node in enumerate([text, *again])])
    rig.run()
    assert rig.of(1, DoneEvent), rig.events


def test_streamed_pieces_are_read_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that are read grow with the text, and not with its square."""
    read: list[int] = []
    text_from = Transcript.text_from

    def counted(self: Transcript, start: int) -> str:
        text = text_from(self, start)
        read.append(len(text))
        return text

    monkeypatch.setattr(Transcript, "text_from", counted)
    nodes: list[Node] = []
    for id in range(0, 400, 2):
        nodes += [Text(id=id, segments=(LiteralText("abcd"),)), Mark(id=id + 1, label="m")]
    begin(rig, nodes)
    assert "".join(event.text for event in rig.of(1, TextEvent)) == "abcd" * 200
    assert sum(read) < 3 * 4 * 200


def test_a_program_of_many_nodes_lets_others_in_between(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_run, "MOST_NODES", 100)
    rig.core._executor = held = Held()
    nodes: list[Node] = [Fork(id=0, children=(1,))]
    for id in range(1, 500, 2):
        texts = Text(id=id, branch=id // 2 % 2, segments=(LiteralText("ab"),))
        nodes += [texts, Mark(id=id + 1, branch=id // 2 % 2, label="m")]
    nodes.append(Gen(id=1000, name="x", sampling=Sampling(max_new_tokens=1, ignore_eos=True)))
    begin(rig, nodes)
    rig.core.open(2, ProgramOptions())
    rig.core.submit(2, Graph(nodes=tuple(conversation(1))), finish=True)
    rig.run()
    assert len(rig.of(2, DoneEvent)) == 1
    assert not rig.of(1, DoneEvent)
    while held.run_one():
        rig.run()
        rig.core.step()
    rig.run()
    assert held.num_done == 5
    (value,) = rig.of(1, ValueEvent)
    assert value.usage.prompt_tokens == 250
    assert len(rig.of(1, DoneEvent)) == 1


def test_a_program_is_cancelled_in_between(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_run, "MOST_NODES", 10)
    rig.core._executor = held = Held()
    begin(rig, [Text(id=id, segments=(LiteralText("a"),)) for id in range(50)])
    rig.core.cancel(1)
    assert held.run_one()
    rig.core.step()
    assert not held.run_one()
    assert rig.core.snapshot().num_programs == 0
