"""What every backend must do, as a suite: protocol facts only, nothing about what a model says.

A test module for a backend imports `BackendConformance`, derives a `Test...` class and overrides the `backend` fixture:

    class TestMock(BackendConformance):
        @pytest.fixture
        def backend(self): ...

Class attributes say what to leave out: `has_joins`, `has_handles`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from sgl.errors import Cancelled, SglError, StateLost
from sgl.lang.backend import Backend, Session
from sgl.lang.graph import (
    DeltaEvent,
    DoneEvent,
    Event,
    FailedEvent,
    Fork,
    Gen,
    Graph,
    HandlesEvent,
    Join,
    JoinedEvent,
    LiteralText,
    Node,
    ProgramOptions,
    Release,
    Sampling,
    Select,
    StateHandle,
    Text,
    TextEvent,
    ValueEvent,
    Var,
)

WAIT_S = 60.0
"""A test that waits so long has found a hang."""

SHORT = Sampling(max_new_tokens=3, temperature=0.0, ignore_eos=True)
LONGER = Sampling(max_new_tokens=40, temperature=0.0, ignore_eos=True)
LONG = Sampling(max_new_tokens=400, temperature=0.0, ignore_eos=True)


def text(id: int, content: str, branch: int = 0) -> Text:
    return Text(id=id, branch=branch, segments=(LiteralText(content),))


def gen(id: int, name: str, branch: int = 0, sampling: Sampling = SHORT) -> Gen:
    return Gen(id=id, branch=branch, name=name, sampling=sampling)


def graph(*nodes: Node, handles: tuple[StateHandle, ...] = ()) -> Graph:
    return Graph(nodes=nodes, handles=handles)


class Recorder:
    """A sink that keeps all events and can wait for one."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait(self, ready: Callable[[list[Event]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: ready(self.events), WAIT_S), f"hangs after {self.events}"

    def end(self) -> DoneEvent | FailedEvent:
        """The terminal event, once it is there."""
        self.wait(lambda events: any(isinstance(event, (DoneEvent, FailedEvent)) for event in events))
        last = self.events[-1]
        assert isinstance(last, (DoneEvent, FailedEvent))
        return last

    def values(self) -> list[ValueEvent]:
        return [event for event in self.events if isinstance(event, ValueEvent)]


class BackendConformance:
    """Derive from this and override `backend`."""

    has_handles = True
    """Whether states outlive a fragment (API backends have none)."""

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError("override the fixture")

    def start(self, backend: Backend, **options: object) -> tuple[Recorder, Session]:
        recorder = Recorder()
        return recorder, backend.open(recorder, ProgramOptions(**options))  # type: ignore[arg-type]

    def test_is_a_backend(self, backend: Backend) -> None:
        assert isinstance(backend, Backend)
        assert isinstance(backend.server_info(), dict) or hasattr(backend.server_info(), "keys")

    def test_one_fragment_values_in_order_then_done(self, backend: Backend) -> None:
        recorder, session = self.start(backend)
        assert isinstance(session, Session)
        session.submit(graph(text(0, "One "), gen(1, "a"), text(2, " two "), gen(3, "b")), finish=True)
        done = recorder.end()
        assert isinstance(done, DoneEvent)
        assert [(value.node, value.branch, value.name) for value in recorder.values()] == [(1, 0, "a"), (3, 0, "b")]
        a, b = (value.value for value in recorder.values())
        assert done.text.endswith(f"One {a} two {b}")

    def test_usage_law_and_sum(self, backend: Backend) -> None:
        recorder, session = self.start(backend)
        session.submit(graph(text(0, "One "), gen(1, "a"), gen(2, "b")), finish=True)
        done = recorder.end()
        assert isinstance(done, DoneEvent)
        for value in recorder.values():
            assert value.usage.prompt_tokens == value.usage.cached_tokens + value.usage.prefill_tokens
        assert done.usage.completion_tokens == sum(value.usage.completion_tokens for value in recorder.values())

    def test_empty_program_ends(self, backend: Backend) -> None:
        recorder, session = self.start(backend)
        session.submit(graph(), finish=True)
        assert isinstance(recorder.end(), DoneEvent)
        assert len(recorder.events) == 1

    def test_fragments_continue_the_state(self, backend: Backend) -> None:
        recorder, session = self.start(backend)
        session.submit(graph(text(0, "One "), gen(1, "a")))
        recorder.wait(lambda events: any(isinstance(event, HandlesEvent) for event in events))
        handles = next(event.handles for event in recorder.events if isinstance(event, HandlesEvent))
        assert [handle.branch for handle in handles] == [0]
        session.submit(graph(text(2, " two "), gen(3, "b"), handles=handles if self.has_handles else ()), finish=True)
        done = recorder.end()
        assert isinstance(done, DoneEvent), done
        assert " two " in done.text
        order = [type(event) for event in recorder.events]
        assert order.index(ValueEvent) < order.index(HandlesEvent)

    def test_foreign_handle_is_state_lost(self, backend: Backend) -> None:
        if not self.has_handles:
            pytest.skip("this backend keeps no states")
        recorder, session = self.start(backend)
        session.submit(graph(text(0, "x"), gen(1, "a"), handles=(StateHandle("another-run", 0, 0),)), finish=True)
        failed = recorder.end()
        assert isinstance(failed, FailedEvent)
        assert isinstance(SglError.from_info(failed.error), StateLost)

    def test_fork_join_release(self, backend: Backend) -> None:
        recorder, session = self.start(backend)
        session.submit(
            graph(
                text(0, "Root. "),
                Fork(id=1, children=(1, 2)),
                text(2, "left ", 1),
                gen(3, "x", 1),
                text(4, "right ", 2),
                gen(5, "x", 2),
                Join(id=6, children=(1, 2)),
                Release(id=7, branch=1),
                Release(id=8, branch=2),
                gen(9, "after"),
            ),
            finish=True,
        )
        assert isinstance(recorder.end(), DoneEvent)
        assert {(value.branch, value.name) for value in recorder.values()} == {(1, "x"), (2, "x"), (0, "after")}
        joined = next(i for i, event in enumerate(recorder.events) if isinstance(event, JoinedEvent))
        at = {event.node: i for i, event in enumerate(recorder.events) if isinstance(event, ValueEvent)}
        assert max(at[3], at[5]) < joined < at[9]

    def test_append_join_takes_text_in_fork_order(self, backend: Backend) -> None:
        recorder, session = self.start(backend)
        session.submit(
            graph(
                text(0, "Root. "),
                Fork(id=1, children=(1, 2)),
                text(2, "second ", 2),
                text(3, "first ", 1),
                Join(id=4, children=(1, 2), mode="append"),
            ),
            finish=True,
        )
        done = recorder.end()
        assert isinstance(done, DoneEvent)
        assert done.text.endswith("Root. first second ")

    def test_release_waits_for_the_joins_of_its_branch(self, backend: Backend) -> None:
        """The children are done, and their releases queued, before their parent gets to the joins."""
        recorder, session = self.start(backend)
        session.submit(
            graph(
                text(0, "Root. "),
                Fork(id=1, children=(1, 2, 3, 4, 5)),
                Text(id=2, segments=(Var("late", 5), LiteralText("; "))),  # the parent waits for the last node
                text(3, "one ", 1),
                gen(4, "x", 1),
                text(5, " two ", 2),
                gen(6, "x", 2),
                Join(id=7, children=(1, 2), mode="append"),
                Release(id=8, branch=1),
                Release(id=9, branch=2),
                gen(10, "y", 3),
                gen(11, "y", 4),
                Join(id=12, children=(3, 4)),
                Release(id=13, branch=3),
                Release(id=14, branch=4),
                text(15, " end"),
                gen(16, "late", 5, LONGER),
            ),
            finish=True,
        )
        done = recorder.end()
        assert isinstance(done, DoneEvent), done
        values = {(value.branch, value.name): value.value for value in recorder.values()}
        assert set(values) == {(1, "x"), (2, "x"), (3, "y"), (4, "y"), (5, "late")}
        one, two, late = values[1, "x"], values[2, "x"], values[5, "late"]
        assert done.text.endswith(f"Root. {late}; one {one} two {two} end")
        assert [event.node for event in recorder.events if isinstance(event, JoinedEvent)] == [7, 12]

    def test_release_waits_for_a_join_behind_a_generation(self, backend: Backend) -> None:
        recorder, session = self.start(backend)
        session.submit(
            graph(
                text(0, "Root. "),
                Fork(id=1, children=(1, 2)),
                gen(2, "slow", 0, LONGER),
                text(3, " one ", 1),
                gen(4, "x", 1),
                gen(5, "x", 2),
                Join(id=6, children=(1,), mode="append"),
                Release(id=7, branch=1),
                Join(id=8, children=(2,)),
                Release(id=9, branch=2),
                text(10, " end"),
            ),
            finish=True,
        )
        done = recorder.end()
        assert isinstance(done, DoneEvent), done
        values = {(value.branch, value.name): value.value for value in recorder.values()}
        assert set(values) == {(0, "slow"), (1, "x"), (2, "x")}
        assert done.text.endswith(f"Root. {values[0, 'slow']} one {values[1, 'x']} end")
        assert [event.node for event in recorder.events if isinstance(event, JoinedEvent)] == [6, 8]

    def test_variable_of_another_branch(self, backend: Backend) -> None:
        recorder, session = self.start(backend)
        session.submit(
            graph(
                text(0, "Root. "),
                Fork(id=1, children=(1,)),
                Text(id=2, branch=1, segments=(LiteralText("got "), Var("v"))),
                gen(3, "v"),
                Join(id=4, children=(1,), mode="append"),
            ),
            finish=True,
        )
        done = recorder.end()
        assert isinstance(done, DoneEvent)
        value = recorder.values()[0].value
        assert done.text.endswith(f"got {value}")

    def test_select_takes_an_option(self, backend: Backend) -> None:
        recorder, session = self.start(backend)
        session.submit(graph(text(0, "Yes or no? "), Select(id=1, name="c", choices=("yes", "no"))), finish=True)
        done = recorder.end()
        assert isinstance(done, DoneEvent)
        (value,) = recorder.values()
        assert value.value in ("yes", "no")
        assert [score.choice for score in value.choices] == ["yes", "no"]
        assert sum(score.probability for score in value.choices) == pytest.approx(1.0)
        assert done.text.endswith("Yes or no? " + value.value)

    def test_stream_adds_up(self, backend: Backend) -> None:
        recorder, session = self.start(backend, stream=True)
        session.submit(graph(text(0, "One "), gen(1, "a"), text(2, " two"), gen(3, "b")), finish=True)
        done = recorder.end()
        assert isinstance(done, DoneEvent)
        pieces = [event for event in recorder.events if isinstance(event, (TextEvent, DeltaEvent))]
        assert "".join(piece.text for piece in pieces) == done.text
        for value in recorder.values():
            assert "".join(p.text for p in pieces if isinstance(p, DeltaEvent) and p.node == value.node) == value.value

    def test_no_stream_events_unless_asked(self, backend: Backend) -> None:
        recorder, session = self.start(backend)
        session.submit(graph(text(0, "One "), gen(1, "a")), finish=True)
        recorder.end()
        assert not [event for event in recorder.events if isinstance(event, (TextEvent, DeltaEvent))]

    def test_read_state_sees_everything_submitted(self, backend: Backend) -> None:
        recorder, session = self.start(backend)
        session.submit(graph(text(0, "One "), gen(1, "a"), text(2, " end")))
        state = session.read_state(0).result(WAIT_S)
        value = recorder.values()[0].value
        assert state.text.endswith(f"One {value} end")
        session.submit(graph(), finish=True)
        recorder.end()

    def test_read_state_of_a_child_that_is_not_born_yet(self, backend: Backend) -> None:
        """Its fork is queued behind a generation that runs."""
        recorder, session = self.start(backend)
        session.submit(
            graph(text(0, "Root. "), gen(1, "slow", 0, LONGER), Fork(id=2, children=(1,)), text(3, " kid", 1))
        )
        state = session.read_state(1).result(WAIT_S)
        (value,) = recorder.values()
        assert state.text.endswith(f"Root. {value.value} kid")
        session.submit(graph(), finish=True)
        assert isinstance(recorder.end(), DoneEvent)

    def test_read_state_of_what_is_not_alive(self, backend: Backend) -> None:
        recorder, session = self.start(backend)
        session.submit(graph(text(0, "x"), gen(1, "a")))
        with pytest.raises(StateLost):
            session.read_state(7).result(WAIT_S)
        session.submit(graph(), finish=True)
        recorder.end()
        with pytest.raises(StateLost):
            session.read_state(0).result(WAIT_S)

    def test_cancel_ends_with_cancelled_once(self, backend: Backend) -> None:
        recorder, session = self.start(backend)
        session.submit(graph(text(0, "x"), gen(1, "a")))
        recorder.wait(lambda events: bool(recorder.values()))
        session.cancel()
        session.cancel()
        failed = recorder.end()
        assert isinstance(failed, FailedEvent)
        assert isinstance(SglError.from_info(failed.error), Cancelled)
        with pytest.raises(StateLost):
            session.read_state(0).result(WAIT_S)
        self.follows(backend)
        assert sum(isinstance(event, (DoneEvent, FailedEvent)) for event in recorder.events) == 1

    def test_cancel_after_the_end_does_nothing(self, backend: Backend) -> None:
        recorder, session = self.start(backend)
        session.submit(graph(text(0, "x"), gen(1, "a")), finish=True)
        recorder.end()
        session.cancel()
        self.follows(backend)
        assert sum(isinstance(event, (DoneEvent, FailedEvent)) for event in recorder.events) == 1

    def test_invalid_graph_fails_alone(self, backend: Backend) -> None:
        other, other_session = self.start(backend)
        other_session.submit(graph(text(0, "Neighbour "), gen(1, "n")))
        recorder, session = self.start(backend)
        try:
            session.submit(graph(text(0, "x"), gen(1, "a", branch=9)), finish=True)
        except SglError:
            session.cancel()  # refused at once: nothing was submitted
        assert isinstance(recorder.end(), FailedEvent)
        other_session.submit(graph(gen(2, "m")), finish=True)
        assert isinstance(other.end(), DoneEvent)
        assert [value.name for value in other.values()] == ["n", "m"]

    def test_many_programs_do_not_mix(self, backend: Backend) -> None:
        runs = [self.start(backend) for _ in range(8)]
        for i, (_, session) in enumerate(runs):
            session.submit(graph(text(0, f"Program {i}. "), gen(1, f"v{i}")), finish=True)
        for i, (recorder, _) in enumerate(runs):
            done = recorder.end()
            assert isinstance(done, DoneEvent)
            assert [value.name for value in recorder.values()] == [f"v{i}"]
            assert f"Program {i}. " in done.text

    def follows(self, backend: Backend) -> None:
        """The backend still works; whatever a session sent late has arrived by then."""
        recorder, session = self.start(backend)
        session.submit(graph(text(0, "x"), gen(1, "a")), finish=True)
        assert isinstance(recorder.end(), DoneEvent)
