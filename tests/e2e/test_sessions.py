"""Sessions through a real worker, on the toy model: token-exact, within the pins' budget, and lost by nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest

import sgl
from sgl.errors import InvalidParameter, PromptTooLong, StateLost
from sgl.runtime import sessions
from sgl.runtime.engine import Engine
from sgl.runtime.sessions import Session

GREEDY = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
LETTERS = dict.fromkeys(range(97, 105), 100.0)
TURNS = ("Once upon a time ", "and then ", "in the end ")


@pytest.fixture
def session(dummy_engine: Engine) -> Iterator[Session]:
    with dummy_engine.open_session() as opened:
        yield opened
    dummy_engine.flush_cache(wait_s=30)
    assert dummy_engine.stats()["pages_pinned"] == 0


@sgl.function
def told(s, end: str | None) -> None:  # type: ignore[no-untyped-def]
    for number, turn in enumerate(TURNS):
        s += turn
        s += sgl.gen(f"x{number}", max_tokens=12, temperature=0, ignore_eos=True, stop=end, logit_bias=LETTERS)
        s.mark()


@pytest.mark.parametrize("cut", [False, True])
def test_a_session_is_the_program_that_marks_after_each_turn(dummy_engine: Engine, session: Session, cut: bool) -> None:
    """Also where a stop string cuts an output off, whose tokens then are not the state's."""
    params = {**GREEDY, "logit_bias": LETTERS}
    stop = dummy_engine.generate(TURNS[0], params)["text"][4:6] if cut else None
    outputs = [session.generate(turn, {**params, "stop": [stop] if stop else []}) for turn in TURNS]
    state = told.run(end=stop, backend=dummy_engine)
    for number, output in enumerate(outputs):
        theirs = state.get_meta_info(f"x{number}")
        assert output["output_ids"] == theirs["output_ids"]
        assert output["meta_info"]["prompt_tokens"] == theirs["prompt_tokens"]
    assert (outputs[0]["meta_info"]["finish_reason"]["type"] == "stop") == cut


def test_a_turn_computes_only_what_is_new_whatever_else_needs_room(dummy_engine: Engine, session: Session) -> None:
    session.generate("s" * 200, GREEDY)
    assert session.num_pinned == session.num_tokens == 212
    dummy_engine.flush_cache(wait_s=30)
    output = session.generate("and on", GREEDY)
    usage = output["meta_info"]
    assert (usage["prompt_tokens"], usage["cached_tokens"]) == (218, 212)
    assert session.num_pinned == 230
    assert dummy_engine.stats()["pages_pinned"] == 230, "the pin of the turn before is gone"
    session.close()
    with pytest.raises(InvalidParameter, match="is closed"):
        session.generate("more", GREEDY)


def test_what_the_budget_has_no_room_for_is_answered_and_shown(dummy_engine: Engine, session: Session) -> None:
    session.generate("b" * 1000, GREEDY)
    assert session.num_pinned == 1012
    output = session.generate("over the budget of 1024", GREEDY)
    assert output["meta_info"]["completion_tokens"] == 12
    assert (session.num_tokens, session.num_pinned) == (1047, 1012)


def test_a_lease_that_ran_out_costs_a_prefill(dummy_engine: Engine) -> None:
    prompt = "leased " * 10
    with dummy_engine.open_session(ttl_s=1e-3) as session:
        first = session.generate(prompt, GREEDY)
        assert session.num_tokens == len(prompt) + 12
        dummy_engine.flush_cache(wait_s=30)
        dummy_engine.generate("a step passes", {"max_new_tokens": 1})
        dummy_engine.flush_cache(wait_s=30)
        second = session.generate("x", GREEDY)
        assert second["meta_info"]["cached_tokens"] == 0
        whole = [*prompt.encode(), *first["output_ids"], *b"x"]
        assert second["output_ids"] == dummy_engine.generate(input_ids=whole, sampling_params=GREEDY)["output_ids"]


def test_a_turn_that_fails_leaves_the_session_as_it_was(dummy_engine: Engine, session: Session) -> None:
    session.generate("before ", GREEDY)
    known = session.token_ids
    with pytest.raises(PromptTooLong):
        session.generate("x" * 3000, GREEDY)
    stream = session.generate("cancelled ", {**GREEDY, "max_new_tokens": 500}, stream=True)
    next(stream)
    with pytest.raises(InvalidParameter, match="has not ended"):
        session.generate("meanwhile", GREEDY)
    stream.close()
    dummy_engine.flush_cache(wait_s=30)
    assert session.token_ids == known
    *_, last = session.generate("after", GREEDY, stream=True)
    assert last["meta_info"]["prompt_tokens"] == len(known) + len("after")
    assert session.token_ids[: len(known) + 5] == (*known, *b"after")


def test_a_session_that_nobody_goes_on_with_ends_by_the_lease_of_states(
    dummy_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = 0.0
    monkeypatch.setattr(sessions, "now", lambda: time)
    monkeypatch.setattr(dummy_engine, "config", msgspec.structs.replace(dummy_engine.config, state_lease=10.0))
    kept, left, closed = (dummy_engine.open_session(id) for id in ("kept", "left", "closed"))
    left.generate("a", GREEDY)
    closed.close()
    time = 8.0
    kept.generate("a", GREEDY)
    stream = left.generate("b", GREEDY, stream=True)
    next(stream)
    time = 11.0
    dummy_engine.open_session("another").close()
    assert kept.num_tokens == 13, "its last turn was three seconds ago"
    list(stream)  # a turn that is under way is no rest
    assert left.num_tokens == 26
    time = 19.0
    assert dummy_engine.open_session("another").id == "another"
    assert (kept.num_tokens, kept.num_pinned) == (0, 0), "what it knew is let go"
    for session in ("kept", kept):
        with pytest.raises(StateLost, match=r"'kept' waited longer than its lease .* raise state_lease"):
            dummy_engine.generate("b", GREEDY, session=session)
    with pytest.raises(InvalidParameter, match="no session 'closed'"):
        dummy_engine.generate("b", GREEDY, session="closed")
    dummy_engine.close_session("kept")
    assert len(dummy_engine._sessions) == 2
    dummy_engine.open_session("kept").close()
    for id in ("left", "another"):
        dummy_engine.close_session(id)
    assert len(dummy_engine._sessions) == 0
    dummy_engine.flush_cache(wait_s=30)
    assert dummy_engine.stats()["pages_pinned"] == 0


def test_sessions_are_found_by_id(dummy_engine: Engine) -> None:
    session = dummy_engine.open_session("talk", cache_salt="tenant")
    output = asyncio.run(dummy_engine.async_generate("one", GREEDY, session="talk"))
    assert len(output["output_ids"]) == 12
    assert session.generate("two", GREEDY, cache_salt="tenant")["meta_info"]["prompt_tokens"] == 18
    wrong: tuple[dict[str, Any], ...] = (
        {"prompt": ["a", "b"]},
        {"prompt": "a", "sampling_params": {"n": 2}},
        {"prompt": "a", "cache_salt": "another"},
    )
    for arguments in wrong:
        with pytest.raises(InvalidParameter):
            dummy_engine.generate(**arguments, session="talk")
    foreign = Session(cast(Engine, None), dummy_engine._client, "talk", None, "", on_close=lambda session: None)
    with pytest.raises(InvalidParameter, match="another engine's"):
        dummy_engine.generate("a", session=foreign)
    with pytest.raises(InvalidParameter, match="no session"):
        dummy_engine.generate("a", session=["talk"])  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="open already"):
        dummy_engine.open_session("talk")
    dummy_engine.close_session("talk")
    dummy_engine.close_session("talk")
    with pytest.raises(InvalidParameter, match="no session 'talk'"):
        dummy_engine.generate("three", session="talk")
    with dummy_engine.open_session("talk") as again:
        session.close()  # that of before: it ends nothing of the new one
        assert again.generate(input_ids=[5, 6], sampling_params=GREEDY)["meta_info"]["prompt_tokens"] == 2
    for name in ({"session_id": 5}, {"ttl_s": 0}, {"cache_salt": None}):
        with pytest.raises(InvalidParameter):
            dummy_engine.open_session(**name)
