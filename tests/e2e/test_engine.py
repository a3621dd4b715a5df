"""The engine as a user holds it: a real worker process, real sockets, the toy model."""

from __future__ import annotations

import asyncio
import itertools
import stat
import threading
import time
from pathlib import Path

import pytest

from sgl.errors import (
    ConfigError,
    EmptyPrompt,
    EngineDead,
    InvalidParameter,
    InvalidRegex,
    ModelNotFound,
    PromptTooLong,
    SglError,
)
from sgl.runtime.engine import Engine

GREEDY = {"max_new_tokens": 6, "temperature": 0}


def test_one_prompt_and_a_list(dummy_engine: Engine) -> None:
    one = dummy_engine.generate("Hello", GREEDY)
    assert set(one) == {"text", "output_ids", "meta_info"}
    assert len(one["output_ids"]) == 6
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    many = dummy_engine.generate(["Hello", "Bye"], [GREEDY, {**GREEDY, "max_new_tokens": 2}])
    assert many[0]["output_ids"] == one["output_ids"]
    assert len(many[1]["output_ids"]) == 2


def test_token_ids_as_prompt(dummy_engine: Engine) -> None:
    by_text = dummy_engine.generate("Hello", GREEDY)
    by_ids = dummy_engine.generate(input_ids=list(b"Hello"), sampling_params=GREEDY)
    assert by_ids["output_ids"] == by_text["output_ids"]
    with pytest.raises(SglError, match="outside the vocabulary"):
        dummy_engine.generate(input_ids=[5, 10**6], sampling_params=GREEDY)


def test_seed_repeats_and_neighbours_do_not_matter(dummy_engine: Engine) -> None:
    params = {"max_new_tokens": 12, "temperature": 0.9, "top_p": 0.95, "seed": 7}
    alone = dummy_engine.generate("The seed", params)["output_ids"]
    crowd = dummy_engine.generate(["The seed", "other", "third"], [params, GREEDY, {"max_new_tokens": 3}])
    assert crowd[0]["output_ids"] == alone
    assert dummy_engine.generate("The seed", {**params, "seed": 8})["output_ids"] != alone


def test_logprobs(dummy_engine: Engine) -> None:
    out = dummy_engine.generate("Hello", GREEDY, return_logprob=True, top_logprobs_num=3)
    meta = out["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == out["output_ids"]
    for (logprob, token_id, _), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert logprob <= 0
        assert top[0][:2] == (logprob, token_id), "greedy draws the most probable token"


def test_stream_grows_to_the_result(dummy_engine: Engine) -> None:
    whole = dummy_engine.generate("stream", {**GREEDY, "max_new_tokens": 20})
    parts = list(dummy_engine.generate("stream", {**GREEDY, "max_new_tokens": 20}, stream=True))
    assert parts[-1]["text"] == whole["text"]
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(parts))
    assert parts[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_leaving_a_stream_cancels_it(dummy_engine: Engine) -> None:
    stream = dummy_engine.generate("leave", {"max_new_tokens": 1500, "ignore_eos": True}, stream=True)
    next(stream)
    stream.close()
    deadline = time.monotonic() + 10
    while dummy_engine.stats()["num_programs"]:
        assert time.monotonic() < deadline
    assert dummy_engine.stats()["pages_held"] == 0


def test_async_under_repeated_loops(dummy_engine: Engine) -> None:
    async def both() -> tuple[dict, list[dict]]:
        outs = await asyncio.gather(*(dummy_engine.async_generate(f"p{i}", GREEDY) for i in range(3)))
        stream = await dummy_engine.async_generate("p0", GREEDY, stream=True)
        return outs[0], [part async for part in stream]

    for _ in range(2):
        out, parts = asyncio.run(both())
        assert parts[-1]["output_ids"] == out["output_ids"]


def test_many_threads_share_an_engine(dummy_engine: Engine) -> None:
    alone = [dummy_engine.generate(f"thread {i}", GREEDY)["output_ids"] for i in range(8)]
    got: dict[int, list[int]] = {}

    def work(i: int) -> None:
        got[i] = dummy_engine.generate(f"thread {i}", GREEDY)["output_ids"]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(8)] == alone


def test_a_shared_prefix_is_prefilled_once(dummy_engine: Engine) -> None:
    dummy_engine.flush_cache()
    before = dummy_engine.stats()
    prefix = "a prefix that all rows share " * 30
    dummy_engine.generate([f"{prefix}{i:02}" for i in range(32)], {**GREEDY, "max_new_tokens": 2})
    after = dummy_engine.stats()
    rows_own = 10 + 32  # the tens digits (0 to 3 appear anew for each, shared among their rows), then the units
    assert after["prefill_tokens"] - before["prefill_tokens"] <= len(prefix) + rows_own
    assert after["prompt_tokens"] - before["prompt_tokens"] == 32 * (len(prefix) + 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompt": ""}, EmptyPrompt, "empty"),
        ({"prompt": []}, EmptyPrompt, "empty"),
        ({"prompt": "a", "input_ids": [1]}, InvalidParameter, "exactly one"),
        ({}, InvalidParameter, "exactly one"),
        ({"prompt": "a", "sampling_params": {"temperature": float("nan")}}, InvalidParameter, "temperature is nan"),
        ({"prompt": "a", "sampling_params": {"temprature": 1}}, InvalidParameter, "did you mean 'temperature'"),
        ({"prompt": "a", "sampling_params": {"top_p": 0}}, InvalidParameter, "top_p"),
        ({"prompt": "a", "sampling_params": {"stop": [""]}}, InvalidParameter, "non-empty"),
        ({"prompt": "a", "sampling_params": [{}, {}]}, InvalidParameter, "2 sampling_params for 1"),
        ({"prompt": "x" * 5000}, PromptTooLong, "5000 tokens"),
        ({"prompt": 5}, InvalidParameter, "prompt is 5"),
        ({"prompt": ["a", 5]}, InvalidParameter, "string or a list"),
        ({"prompt": "a", "sampling_params": 5}, InvalidParameter, "sampling_params is 5"),
        ({"prompt": "a", "sampling_params": {"stop": 5}}, InvalidParameter, "stop is 5"),
        ({"prompt": "a", "sampling_params": {"regex": 5}}, InvalidRegex, "regex is 5"),
        ({"input_ids": 5}, InvalidParameter, "input_ids is 5"),
        ({"input_ids": [[1], 2]}, InvalidParameter, "input_ids is 2"),
        ({"input_ids": [2**70]}, InvalidParameter, "non-negative"),
    ],
)
def test_bad_input_is_a_typed_error_and_the_engine_goes_on(
    dummy_engine: Engine, arguments: dict, error: type[SglError], message: str
) -> None:
    with pytest.raises(error, match=message):
        dummy_engine.generate(**arguments)
    assert dummy_engine.generate("still here", GREEDY)["meta_info"]["completion_tokens"] == 6


def test_wrong_fields_and_models() -> None:
    with pytest.raises(ConfigError, match="did you mean 'model_path'"):
        Engine(model_pth="dummy")
    with pytest.raises(ModelNotFound):
        Engine(model_path="no-such-model", offline=True)


def test_socket_folder_is_private(dummy_engine: Engine) -> None:
    folder = Path(dummy_engine._client._folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_two_engines_and_an_end_that_can_be_repeated() -> None:
    with (
        Engine(model_path="dummy", max_total_tokens=512) as first,
        Engine(model_path="dummy", max_total_tokens=512) as second,
    ):
        assert first.generate("x", GREEDY)["output_ids"] == second.generate("x", GREEDY)["output_ids"]
        folder = Path(first._client._folder)
    first.shutdown()
    assert not first.alive
    assert not folder.exists()
    with pytest.raises(EngineDead, match="shut down"):
        first.generate("x", GREEDY)


def free(engine: Engine) -> None:
    """Wait until no program is open."""
    deadline = time.monotonic() + 10
    while engine.stats()["num_programs"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_cancelled_task_cancels_its_generation(dummy_engine: Engine) -> None:
    async def leave() -> None:
        await asyncio.wait_for(
            dummy_engine.async_generate("x", {"max_new_tokens": 1500, "ignore_eos": True}), timeout=0.2
        )

    with pytest.raises(TimeoutError):
        asyncio.run(leave())
    free(dummy_engine)
    assert dummy_engine.generate("still here", GREEDY)["meta_info"]["completion_tokens"] == 6


def test_breaking_off_an_async_stream(dummy_engine: Engine) -> None:
    async def leave() -> None:
        stream = await dummy_engine.async_generate("x", {"max_new_tokens": 1500, "ignore_eos": True}, stream=True)
        async for _ in stream:
            break

    asyncio.run(leave())
    free(dummy_engine)
    assert dummy_engine.generate("still here", GREEDY)["meta_info"]["completion_tokens"] == 6


def test_a_slow_reader_of_two_streams_gets_both(dummy_engine: Engine) -> None:
    finished = []
    for part in dummy_engine.generate(["one", "two"], {**GREEDY, "max_new_tokens": 12}, stream=True):
        time.sleep(0.05)
        if part["meta_info"]["finish_reason"] is not None:
            finished.append(part["index"])
    assert sorted(finished) == [0, 1]


def test_a_consumer_that_raises_loses_its_own_program(dummy_engine: Engine) -> None:
    from sgl.lang.graph import Gen, Graph, LiteralText, ProgramOptions, Sampling, Text

    def sink(event: object) -> None:
        raise RuntimeError("consumer's bug")

    nodes = (
        Text(id=0, segments=(LiteralText("x"),)),
        Gen(id=1, name="x", sampling=Sampling(max_new_tokens=500, ignore_eos=True)),
    )
    dummy_engine.open(sink, ProgramOptions(stream=True)).submit(Graph(nodes=nodes), finish=True)
    free(dummy_engine)
    assert dummy_engine.generate("still here", GREEDY)["meta_info"]["completion_tokens"] == 6


def test_what_cannot_travel_is_refused(dummy_engine: Engine) -> None:
    with pytest.raises(InvalidParameter, match="surrogate"):
        dummy_engine.generate("\ud83d", GREEDY)
    with pytest.raises(InvalidParameter, match="max_new_tokens"):
        dummy_engine.generate("x", {"max_new_tokens": 2**70})
    assert dummy_engine.stats()["num_programs"] == 0


def test_a_message_of_the_wrong_type_fails_its_program_only(dummy_engine: Engine) -> None:
    from sgl.lang.graph import Event, FailedEvent, Gen, Graph, ProgramOptions

    events: list[Event] = []
    nodes = (Gen(id=1, name=5),)  # type: ignore[arg-type]
    dummy_engine.open(events.append, ProgramOptions()).submit(Graph(nodes=nodes), finish=True)
    free(dummy_engine)
    assert dummy_engine.generate("still here", GREEDY)["meta_info"]["completion_tokens"] == 6
    (event,) = events
    assert isinstance(event, FailedEvent)
    assert "nodes[0].name" in event.error.message


def test_numbers_of_other_kinds_are_numbers(dummy_engine: Engine) -> None:
    import numpy as np

    params = {"max_new_tokens": np.int64(3), "temperature": np.float64(0.0), "stop": np.array(["zz"])}
    assert dummy_engine.generate(np.str_("x"), params)["meta_info"]["completion_tokens"] == 3
