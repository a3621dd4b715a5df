"""The values that cross borders: errors, limits, counters, messages and plans, there and back again."""

from __future__ import annotations

import copy
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from sgl import errors, limits
from sgl.errors import ErrorInfo, InternalError, InvalidParameter, SglError, SourceLocation
from sgl.lang import graph
from sgl.lang.graph import Gen, Graph, ProgramOptions, Sampling, StateText, Text, Usage, ValueEvent
from sgl.runtime import messages
from sgl.runtime.config import RuntimeOverride
from sgl.runtime.plan import Chunk, SampleSpec, ScoreSpec, StepPlan
from sgl.runtime.stats import Stats

KINDS = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SglError)),
    key=lambda kind: kind.code,
)
LINE = SourceLocation("program.py", 7, "judge")


# --- errors ---------------------------------------------------------------------------------------------------------


def test_codes_are_unique_and_statuses_are_errors() -> None:
    assert len({kind.code for kind in KINDS}) == len(KINDS) > 25
    assert all(400 <= kind.status < 600 for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_error_survives_the_wire(kind: type[SglError]) -> None:
    error = kind("what was given", hint="the one thing", location=LINE, prompt_tokens=5, pointer="/a/0")
    frame = msgspec.msgpack.encode(error.to_info())
    back = SglError.from_info(msgspec.msgpack.decode(frame, type=ErrorInfo))
    assert type(back) is kind
    assert (back.message, back.hint, back.location) == (error.message, error.hint, LINE)
    assert (back.prompt_tokens, back.pointer) == (5, "/a/0")
    assert str(back) == "what was given (the one thing)\n  at program.py:7 in judge"
    assert type(copy.copy(error)) is kind


def test_unknown_code_becomes_an_internal_error() -> None:
    assert type(SglError.from_info(ErrorInfo("of_tomorrow", "x"))) is InternalError


def test_error_details_are_attributes_and_nothing_else_is() -> None:
    error = InvalidParameter("x", param="top_p")
    assert error.param == "top_p"
    with pytest.raises(AttributeError, match="no attribute 'pointer'"):
        _ = error.pointer


def test_location_is_set_once() -> None:
    error = InvalidParameter("x").at(LINE)
    assert error.at(SourceLocation("other.py", 1, "f")).location == LINE


# --- limits ---------------------------------------------------------------------------------------------------------


def test_every_limit_is_described() -> None:
    rows = limits.describe()
    assert [name for name, _, _ in rows] == list(limits.Limits.__struct_fields__)
    assert all(meaning.endswith(".") for _, _, meaning in rows)
    assert all(getattr(limits.DEFAULT_LIMITS, name) == default for name, default, _ in rows)


def test_limits_refuse_unknown_and_senseless_values() -> None:
    with pytest.raises(TypeError):
        limits.Limits(max_m=1)  # type: ignore[call-arg]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"max_choices": 0}, limits.Limits)


# --- stats ----------------------------------------------------------------------------------------------------------


def test_laws_hold_and_break() -> None:
    stats = Stats(pages_total=10, pages_free=4, pages_cached=3, pages_held=3)
    stats.add(Usage(prompt_tokens=7, cached_tokens=5, prefill_tokens=2, completion_tokens=4, forced_tokens=1))
    stats.check()
    assert (stats.decode_tokens, stats.forced_tokens) == (3, 1)
    assert stats.as_dict()["prompt_tokens"] == 7
    stats.pages_held = 2
    with pytest.raises(InternalError, match="memory law broken: 4 free \\+ 3 cached \\+ 2 held is not 10"):
        stats.check()
    stats.pages_held, stats.cached_tokens = 3, 6
    with pytest.raises(InternalError, match="counter law broken"):
        stats.check()


# --- messages -------------------------------------------------------------------------------------------------------

PROGRAM = Graph(
    nodes=(
        Text(id=0, segments=(graph.LiteralText("2+2="), graph.Var("a"))),
        Gen(id=1, name="b", sampling=Sampling(temperature=0.0, stop=("\n",)), location=LINE),
    )
)
EVENT = ValueEvent(node=1, branch=0, name="b", value="4", token_ids=(52,), usage=Usage(prompt_tokens=5))
TO_WORKER = [
    messages.Hello({"model_path": "dummy"}),
    messages.Submit(1, PROGRAM, open=ProgramOptions(), finish=True),
    messages.ReadState(1, 9, 0),
    messages.Cancel(1),
    messages.GetStats(3, check=True),
    messages.Ping(5),
    messages.FlushCache(4, wait_s=1.5),
    messages.Pin(7, "a prefix", 60.0, "tenant"),
    messages.Pin(8, (1, 2, 3)),
    messages.Unpin(7),
    messages.Override(6, {"max_queue": 5}, "a test"),
    messages.Encode(2, "embed", (messages.EncoderInput(text="a"), messages.EncoderInput(token_ids=(1, 2))), True),
    messages.Encode(2, "score", (messages.EncoderInput(text="a", pair="b"),)),
    messages.CancelEncode(2),
    messages.StartProfile(11, output_dir="folder", num_steps=3, activities=("CPU",)),
    messages.StopProfile(12),
    messages.Shutdown(),
]
TO_CLIENT = [
    messages.Progress("reading weights"),
    messages.Ready("epoch", {"num_pages": 5}),
    messages.Failed(InvalidParameter("x", param="p").to_info()),
    messages.Events(((1, EVENT), (2, graph.DoneEvent(text="done")))),
    messages.StateReply(1, 9, StateText("text", (1, 2))),
    messages.StatsReply(3, {"forwards": 1}),
    messages.Pong(5, 0.5),
    messages.FlushReply(4, 12),
    messages.PinReply(7, 8),
    messages.OverrideReply(6, (RuntimeOverride(field="max_queue", value=5, was=6, why="a test", at=1.5),)),
    messages.Log(30, "sgl.worker", "hot"),
    messages.ProfileReply(12, "folder/trace"),
    messages.EncodeReply(2, (b"\x00\x00\x80?",), (3,)),
]


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda message: type(message).__name__)
def test_message_to_worker_round_trip(message: Any) -> None:
    assert messages.unpack_to_worker(messages.pack(message)) == message


@pytest.mark.parametrize("message", TO_CLIENT, ids=lambda message: type(message).__name__)
def test_message_to_client_round_trip(message: Any) -> None:
    assert messages.unpack_to_client(messages.pack(message)) == message


def test_every_message_of_the_unions_is_tried() -> None:
    assert {type(message) for message in TO_WORKER} == set(messages.ToWorker.__args__)
    assert {type(message) for message in TO_CLIENT} == set(messages.ToClient.__args__)


@pytest.mark.parametrize("frame", [b"", b"\xc1", msgspec.msgpack.encode({"type": "of_tomorrow"}), b"\x80"])
def test_a_frame_that_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(InternalError, match="does not decode"):
        messages.unpack_to_worker(frame)
    with pytest.raises(InternalError, match="does not decode"):
        messages.unpack_to_client(frame)


def test_a_message_for_the_other_side_is_refused() -> None:
    with pytest.raises(InternalError):
        messages.unpack_to_client(messages.pack(messages.Cancel(1)))


# --- plan -----------------------------------------------------------------------------------------------------------


def test_chunk_says_which_logits_it_needs() -> None:
    chunk = Chunk(
        sequence=1,
        token_ids=[5, 6, 7, 8],
        start=3,
        page_table=np.arange(7, dtype=np.int32),
        sample=SampleSpec(sampling=Sampling(), seed=0, position=0, output_ids=[]),
        scores=(ScoreSpec(offset=1, token_ids=(4,)), ScoreSpec(offset=1, token_ids=(9,))),
    )
    assert (chunk.end, chunk.logit_offsets) == (7, [1, 3])
    silent = msgspec.structs.replace(chunk, sample=None, scores=())
    assert silent.logit_offsets == []
    assert StepPlan(chunks=(chunk, silent)).num_tokens == 8


# --- numbers that JSON cannot carry -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, True, "0.5"])
def test_sampling_takes_finite_numbers_only(value: Any) -> None:
    with pytest.raises(InvalidParameter, match="temperature"):
        Sampling(temperature=value)
