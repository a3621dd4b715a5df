"""Requests that nobody should send: each is a typed error at the door that names its parameter, nothing is started for
it, and the engine goes on. Tests are named by their row in the table of faults: 9 to 22, 66 and 67.

The doors are `gen`, `run`, `run_batch` and `Engine.generate`; they share one reader of sampling parameters, and this is
what holds them to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.scripted import Rig, expected_greedy

import sgl
from sgl.errors import (
    EmptyPrompt,
    InvalidLogits,
    InvalidParameter,
    InvalidProgram,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    SglError,
)
from sgl.lang.graph import (
    FailedEvent,
    Gen,
    Graph,
    LiteralText,
    ProgramOptions,
    Sampling,
    Text,
    ValueEvent,
    lower_samples,
    sampling_from_mapping,
)
from sgl.limits import DEFAULT_LIMITS, Limits
from sgl.runtime.engine import Engine
from sgl.runtime.text.detokenize import StreamDecoder

GREEDY = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
SIZES = ("max_new_tokens", "min_new_tokens", "n", "top_k", "top_logprobs_num", "logprob_start_len", "seed")
ALIASES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""How `gen` spells two of them."""


@sgl.function
def program(s: Any, **asked: Any) -> None:
    s += "Once" + sgl.gen("x", **asked)


@sgl.function
def plain_program(s: Any) -> None:
    s += "Once" + sgl.gen("x")


def door_gen(engine: Engine, name: str, value: Any) -> None:
    sgl.gen("x", **{ALIASES.get(name, name): value})


def door_run(engine: Engine, name: str, value: Any) -> None:
    plain_program.run(backend=engine, **{name: value})


def door_batch(engine: Engine, name: str, value: Any) -> None:
    plain_program.run_batch([{}], backend=engine, **{name: value})


def door_generate(engine: Engine, name: str, value: Any) -> None:
    engine.generate("Once", {name: value})


DOORS: dict[Callable[[Engine, str, Any], None], set[str] | None] = {
    door_gen: None,
    door_run: {"min_new_tokens", "seed", "repetition_penalty", "logit_bias", "token_ids_logprob", "no_stop_trim",
               "skip_special_tokens", "custom_logit_processor", "custom_params"},
    door_batch: None,
    door_generate: None,
}  # fmt: skip
"""Each door with the parameters that it does not have (`run` has SGLang's); `run_batch` has those of `run`."""
DOORS[door_batch] = DOORS[door_run]


def bad_values() -> Iterator[tuple[str, str, Any]]:
    """(row, parameter, value)"""
    for name in NUMBERS:
        for value in (float("nan"), float("inf"), -float("inf"), 1e308, -1e308, -3, True, "1", [1], np.float32("nan")):
            yield "13", name, value
    yield from (("13", "temperature", -1), ("13", "top_p", 0), ("13", "min_p", -1), ("13", "top_p", 1.0001))
    yield from (("13", "repetition_penalty", 0), ("13", "top_k", 0), ("13", "top_k", 1.5))
    for value in (0, -1, 17, 10**6, 2**70, True, 2.0, "4"):
        yield "14", "n", value
    for value in (-2, 10**6, DEFAULT_LIMITS.max_logprobs + 1):
        yield "16", "top_logprobs_num", value
    yield "16", "token_ids_logprob", list(range(DEFAULT_LIMITS.max_logprob_ids + 1))
    for name in ("stop", "stop_regex"):
        for bad in ("", ["a", ""], ["x"] * 10_000, "x" * 2**20, 5, [5], {"a": 1}, b"x", [None]):
            yield "17", name, bad
    for bad_ids in ("x", [-1], [2**31], [True], [1.5], ["a"], {"a": 1}, list(range(10_000))):
        yield "17", "stop_token_ids", bad_ids
    for name in SIZES:
        for value in (-(2**63), -2, 2**63, float("nan"), "5", True, [1]):
            yield "18", name, value
    for bias in ({-1: 1}, {"x": 1}, {1: 101}, {1: float("nan")}, {1.5: 1}, {True: 1}, {"1": 1, 1: 2}, [1], "x", 5,
                 dict.fromkeys(range(10_000), 1), {2**31: 1}, {"1" * 30: 1}, {1: "2"}):  # fmt: skip
        yield "13", "logit_bias", bias
    for name in ("ignore_eos", "no_stop_trim", "skip_special_tokens", "return_logprob"):
        yield from (("13", name, 1), ("13", name, "yes"))
    for code in (5, "", ["m:f"], b"\x80\x04cos\nsystem\n", print):
        yield "66", "custom_logit_processor", code
    for params in (print, {1, 2}, float("nan"), {"a": b"x"}, {"a"}):
        yield "66", "custom_params", params
    tensor = torch.sparse_coo_tensor(
        torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), (2**20,) * 2, check_invariants=False
    )
    for name in ("logit_bias", "custom_params", "temperature", "max_new_tokens"):
        yield "67", name, tensor


CASES = [
    pytest.param(door, name, value, id=f"row_{row}-{door.__name__[5:]}-{name}-{str(value)[:24]!a}-{i}")
    for i, (row, name, value) in enumerate(bad_values())
    for door, missing in DOORS.items()
    if missing is None or name not in missing
]


@pytest.fixture(scope="module")
def started(dummy_engine: Engine) -> Iterator[Callable[[], int]]:
    """How many programs the engine has been given; at the end of the module it still serves."""
    yield lambda: dummy_engine.stats()["programs"]
    assert dummy_engine.generate("still here", GREEDY)["meta_info"]["completion_tokens"] == 4


def test_rows_13_14_16_17_18_66_67_bad_values_at_every_door(dummy_engine: Engine, started: Callable[[], int]) -> None:
    """One test over hundreds of cases: each is quick, and the check of the engine after every test is not."""
    before = started()
    for case in CASES:
        door, name, value = case.values
        with pytest.raises(InvalidRequest) as caught:
            door(dummy_engine, name, value)
        assert caught.value.details.get("param") in (name, ALIASES.get(name)), case.id
        assert len(str(caught.value)) < 500, f"{case.id}: the value is not repeated at length"
    assert started() == before, "nothing was started"


def test_row_09_prompts_at_the_edge_of_the_context(dummy_engine: Engine) -> None:
    context = dummy_engine.server_info()["resolved"]["context_len"]
    for length in (context, context + 1):
        with pytest.raises(PromptTooLong, match=str(context)) as caught:
            dummy_engine.generate(input_ids=[65] * length, sampling_params=GREEDY)
        assert (caught.value.prompt_tokens, caught.value.context_len) == (length, context)
    out = dummy_engine.generate(input_ids=[65] * (context - 2), sampling_params={**GREEDY, "max_new_tokens": 2**62})
    assert out["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


@pytest.mark.parametrize(
    "asked", [{"prompt": ""}, {"prompt": [""]}, {"prompt": []}, {"input_ids": []}, {"input_ids": [[]]}], ids=str
)
def test_row_10_empty_prompts(dummy_engine: Engine, asked: dict[str, Any]) -> None:
    with pytest.raises(EmptyPrompt):
        dummy_engine.generate(**asked)

    @sgl.function
    def nothing(s: Any) -> None:
        s += sgl.gen("x")

    with pytest.raises(EmptyPrompt):
        nothing.run(backend=dummy_engine)


@pytest.mark.parametrize("token", [-1, 10**6, 2**31, 2**70, 1.5, True, "a", None], ids=str)
def test_row_11_token_ids_that_are_none(dummy_engine: Engine, token: Any) -> None:
    with pytest.raises((InvalidParameter, InvalidProgram)):
        dummy_engine.generate(input_ids=[65, token], sampling_params=GREEDY)


@pytest.mark.parametrize(
    ("name", "value"), [("logit_bias", {512: 1.0}), ("stop_token_ids", [7, 512]), ("token_ids_logprob", [512])]
)
def test_row_12_ids_outside_of_the_vocabulary(dummy_engine: Engine, name: str, value: Any) -> None:
    """Refused at admission, before any of the program's work; a neighbour in the batch sees nothing of it."""
    assert dummy_engine.server_info()["vocab_size"] == 512
    long = {**GREEDY, "max_new_tokens": 40}
    alone = dummy_engine.generate("neighbour", long)["output_ids"]
    neighbour = dummy_engine.generate("neighbour", long, stream=True)
    first = next(neighbour)
    for call in (
        lambda: dummy_engine.generate("Once", {name: value}),
        lambda: program.run(backend=dummy_engine, **{name: value}),
    ):
        with pytest.raises(InvalidParameter, match="vocabulary of 512") as caught:
            call()
        assert caught.value.param == name
    assert [first, *neighbour][-1]["output_ids"] == alone


def test_row_13_tiny_temperature_is_greedy(dummy_engine: Engine) -> None:
    outputs = [
        dummy_engine.generate("Once", {**GREEDY, "temperature": value})["output_ids"] for value in (0, 1e-6, 1e-300)
    ]
    assert outputs[0] == outputs[1] == outputs[2]
    assert dummy_engine.generate("Once", {**GREEDY, "temperature": 1e-4})["output_ids"] == outputs[0]


def samples(n: int, **asked: Any) -> Graph:
    fields = {"max_new_tokens": 6, "temperature": 0.0, **asked}
    node = Gen(id=1, name="x", sampling=sampling_from_mapping({**fields, "n": n}))
    nodes = lower_samples(node, range(1, n + 1)) if n > 1 else (node,)
    return Graph(nodes=(Text(id=0, segments=(LiteralText("hello"),)), *nodes))


def test_row_15_samples_are_admitted_together_or_not_at_all() -> None:
    rig = Rig(limits=Limits(max_queue=1))
    rig.core.open(1, ProgramOptions())
    rig.core.submit(1, samples(1), finish=True)
    rig.core.open(2, ProgramOptions())
    rig.core.submit(2, samples(4), finish=True)
    assert SglError.from_info(rig.of(2, FailedEvent)[0].error).code == QueueFull.code
    assert len(rig.core.scheduler.waiting) == 1, "those that were queued are gone with the others"
    rig.run()
    assert rig.of(2, ValueEvent) == []
    assert rig.of(1, ValueEvent)[0].value == bytes(expected_greedy(list(b"hello"), 6)).decode()
    rig.core.open(3, ProgramOptions())
    rig.core.submit(3, samples(3), finish=True)
    rig.run()
    assert len(rig.of(3, ValueEvent)) == 3


def test_row_15_one_sample_that_fails_ends_its_siblings() -> None:
    rig = Rig()
    rig.core.open(1, ProgramOptions())
    rig.core.submit(1, samples(3), finish=True)
    rig.core.step()
    rig.runner.nan_sequences = {rig.core.scheduler.running[1].sequence.id}
    rig.run()
    assert SglError.from_info(rig.of(1, FailedEvent)[0].error).code == InvalidLogits.code
    assert rig.core.snapshot().pages_held == 0


def test_row_16_all_logprobs_of_a_long_prompt_are_computed_in_pieces(dummy_engine: Engine) -> None:
    asked = {**GREEDY, "logprob_start_len": 0, "top_logprobs_num": DEFAULT_LIMITS.max_logprobs}
    before = dummy_engine.stats()["forwards"]
    out = dummy_engine.generate(input_ids=[65 + i % 20 for i in range(1000)], sampling_params=asked)["meta_info"]
    assert len(out["input_token_logprobs"]) == len(out["input_top_logprobs"]) == 1000
    assert dummy_engine.stats()["forwards"] - before >= 1000 // DEFAULT_LIMITS.max_logit_rows, "rows are bounded"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"stop_regex": ("(",)}, "invalid_regex"),
        ({"stop_regex": ("(((a{99}){99}){99})",)}, "constraint_too_complex"),
        ({"stop_token_ids": (512,)}, "invalid_parameter"),
        ({"custom_logit_processor": "nobody"}, "invalid_parameter"),
    ],
    ids=str,
)
def test_rows_12_17_66_a_graph_that_came_through_no_door(fields: dict[str, Any], code: str) -> None:
    """A client may send a graph of its own making: what the door would have refused is refused at admission."""
    rig = Rig()
    rig.core.open(1, ProgramOptions())
    node = Gen(id=1, name="x", sampling=Sampling(**fields))
    rig.core.submit(1, Graph(nodes=(Text(id=0, segments=(LiteralText("hello"),)), node)), finish=True)
    (failed,) = rig.of(1, FailedEvent)
    assert failed.error.code == code
    assert not rig.core.has_work, "nothing was started"
    with pytest.raises(InvalidParameter, match="not JSON"):
        Sampling(custom_logit_processor="disallowed_tokens", custom_params="{")


def test_row_19_misspelt_fields(dummy_engine: Engine, started: Callable[[], int]) -> None:
    before = started()
    with pytest.raises(InvalidParameter, match="did you mean 'temperature'") as caught:
        dummy_engine.generate("Once", {"temprature": 0.5})
    assert caught.value.param == "temprature"
    for call in (plain_program.run, lambda **asked: plain_program.run_batch([asked], backend=dummy_engine)):
        with pytest.raises(InvalidParameter, match="temprature"):
            call(temprature=0.5)
    with pytest.raises(InvalidParameter, match="did you mean 'temperature'"):
        sgl.gen("x", temprature=0.5)  # type: ignore[call-overload]
    assert started() == before


def test_row_20_too_many_prompts_in_one_call(dummy_engine: Engine, started: Callable[[], int]) -> None:
    before = started()
    with pytest.raises(InvalidParameter, match="100000 prompts in one call"):
        dummy_engine.generate(["a"] * 100_000, GREEDY)
    with pytest.raises(InvalidParameter, match="60000 samples in one call"):
        dummy_engine.generate(["a"] * 15_000, {**GREEDY, "n": 4})
    with pytest.raises(InvalidParameter, match="tokens or bytes in one call"):
        dummy_engine.generate(["a" * 2**20] * 65, GREEDY)
    assert started() == before


class Scripted:
    """Tokens of given bytes."""

    def __init__(self, *tokens: bytes) -> None:
        self.tokens = tokens

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        return self.tokens[token_id]


def shown(tokens: list[bytes], **stops: Any) -> list[str]:
    """What is streamed after each token, and at the end."""
    decoder = StreamDecoder(Scripted(*tokens), **stops)
    return [*(decoder.push(i) for i in range(len(tokens))), decoder.finish()]


@pytest.mark.parametrize("stops", [{"stop": ["FGHI"]}, {"stop_regex": ["FG?HI"]}], ids=str)
def test_row_21_a_stop_split_over_tokens(stops: dict[str, Any]) -> None:
    assert shown([b"DEF", b"G", b"HI", b"J"], **stops) == ["DE", "", "", "", ""]
    assert shown([b"DEF", b"G", b"X", b"J"], **stops) == ["DE", "", "FGX", "J", ""], "given out as soon as it is clear"
    assert shown([b"DEF", b"G"], **stops) == ["DE", "", "FG"], "and at the end"


@pytest.mark.parametrize("stops", [{"stop": ["\n\nEnd"]}, {"stop_regex": [r"\n+End"]}], ids=str)
def test_row_21_a_stop_that_begins_with_a_newline(stops: dict[str, Any]) -> None:
    assert shown([b"\n", b"\nE", b"nd"], **stops) == ["", "", "", ""]
    assert "".join(shown([b"\n", b"\nE", b"at"], **stops)) == "\n\nEat"


@pytest.mark.parametrize("cuts", [(2,), (1, 2, 3), (1,), (3,)], ids=str)
def test_row_22_a_character_split_over_tokens(cuts: tuple[int, ...]) -> None:
    data = "\N{GRINNING FACE}".encode()
    parts = [data[a:b] for a, b in zip((0, *cuts), (*cuts, len(data)), strict=True)]
    assert shown([b"a", *parts, b"b"]) == ["a", *[""] * (len(parts) - 1), "\N{GRINNING FACE}", "b", ""]
    assert "".join(shown([b"a", *parts[:-1]])) == "a\N{REPLACEMENT CHARACTER}", "what never becomes one is shown once"


def test_row_66_a_request_names_code_by_its_registered_name_only(dummy_engine: Engine) -> None:
    for path in ("os:system", "sgl.runtime.processors:disallowed_tokens", "builtins.print"):
        with pytest.raises(InvalidParameter, match="registered are disallowed_tokens") as caught:
            dummy_engine.generate("Once", {"custom_logit_processor": path})
        assert caught.value.param == "custom_logit_processor"
    best = dummy_engine.generate("Once", GREEDY)["output_ids"][0]
    asked = {"custom_logit_processor": "disallowed_tokens", "custom_params": {"token_ids": [best]}}
    assert best not in dummy_engine.generate("Once", {**GREEDY, **asked})["output_ids"]


LONG_S = 30 * 86_400  # more milliseconds than a poll can count


def test_a_far_deadline_ends_nobody(dummy_engine: Engine) -> None:
    before = dummy_engine.generate("x", {"max_new_tokens": 2, "temperature": 0})["output_ids"]
    with dummy_engine.pin("ab", ttl_s=LONG_S):
        assert dummy_engine.generate("x", {"max_new_tokens": 2, "temperature": 0})["output_ids"] == before
    assert dummy_engine.ready


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e17, 10**400, "x", True])
def test_what_is_no_time_is_refused(dummy_engine: Engine, seconds: Any) -> None:
    for ask in (
        lambda: dummy_engine.pin("ab", ttl_s=seconds),
        lambda: dummy_engine.open_session(ttl_s=seconds),
        lambda: dummy_engine.health(seconds),
        lambda: dummy_engine.flush_cache(wait_s=seconds or -1),
    ):
        with pytest.raises(InvalidParameter, match=r"_s is .*expected a finite number"):
            ask()


def test_a_message_that_the_worker_would_not_take_is_refused_here(dummy_engine: Engine) -> None:
    """Else nobody would ever answer."""
    with pytest.raises(InvalidParameter, match=r"wrong type: .*\$\.why"):
        dummy_engine.override(why=5, max_queue=5)  # type: ignore[arg-type]
    assert dummy_engine.ready
