"""The main job on the embedded model: programs in, values out, with the counters that say what they cost."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import sgl
from sgl.errors import InvalidRegex, SglError, UnsupportedSchema
from sgl.runtime.engine import Engine

WORDS = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliet", "kilo", "lima")


def long_text(num_words: int) -> str:
    return " ".join(WORDS[i * 7 % len(WORDS)] for i in range(num_words))


def difference(before: dict, after: dict, *names: str) -> list[int]:
    return [after[name] - before[name] for name in names]


def test_every_primitive_in_one_program(smollm2: Engine) -> None:
    @sgl.function
    def tour(s, topic):
        s += sgl.system("You are brief.")
        s += sgl.user(f"Name a fact about {topic}.")
        s += sgl.assistant(sgl.gen("fact", max_tokens=16, temperature=0))
        s += sgl.user("In which year?")
        s += sgl.assistant(sgl.gen("year", regex=r"(19|20)[0-9]{2}", max_tokens=8, temperature=0))
        with s.user():
            s += "As JSON:"
        with s.assistant():
            s += sgl.gen(
                "json",
                json_schema={
                    "type": "object",
                    "properties": {"n": {"type": "integer"}},
                    "required": ["n"],
                    "additionalProperties": False,
                },
                max_tokens=40,
                temperature=0,
            )
        s += sgl.user("Agree?")
        s += sgl.assistant(sgl.select("agree", choices=["yes", "no"]))

    state = tour.run("the moon", backend=smollm2)
    assert re.fullmatch(r"(19|20)\d\d", state["year"])
    assert isinstance(json.loads(state["json"])["n"], int)
    assert state["agree"] in ("yes", "no")
    assert [message["role"] for message in state.messages()] == ["system"] + ["user", "assistant"] * 4
    assert state.messages()[2]["content"] == state["fact"]
    assert state.text().count("<|im_start|>") == 9
    assert sum(state.get_meta_info("agree")["probabilities"].values()) == pytest.approx(1)


def test_fork_of_eight_prefills_a_long_prefix_once(smollm2: Engine) -> None:
    prefix = long_text(900)
    length = smollm2.generate(prefix, {"max_new_tokens": 0})["meta_info"]["prompt_tokens"]
    assert length >= 1000

    @sgl.function
    def forked(s):
        s += prefix
        for i, f in enumerate(s.fork(8)):
            f += f" Branch number {i}:" + sgl.gen("x", max_tokens=2, temperature=0)

    smollm2.flush_cache()
    before = smollm2.stats()
    forked.run(backend=smollm2)
    prefilled, prompt, cached = difference(before, smollm2.stats(), "prefill_tokens", "prompt_tokens", "cached_tokens")
    assert length <= prefilled <= length + 8 * 8
    assert prompt == prefilled + cached
    assert prompt >= 8 * length


def test_32_rows_prefill_their_shared_prefix_once(smollm2: Engine) -> None:
    prefix = long_text(900)
    length = smollm2.generate(prefix, {"max_new_tokens": 0})["meta_info"]["prompt_tokens"]

    @sgl.function
    def row(s, i):
        s += prefix + f" Row {i}:"
        s += sgl.gen("x", max_tokens=1, temperature=0)

    smollm2.flush_cache()
    before = smollm2.stats()
    states = row.run_batch([{"i": i} for i in range(32)], backend=smollm2)
    assert len(states) == 32
    prefilled, prompt = difference(before, smollm2.stats(), "prefill_tokens", "prompt_tokens")
    assert length <= prefilled <= length + 32 * 6
    assert prompt >= 32 * length


def test_only_deltas_travel(tmp_path: Path) -> None:
    """Five generations, each read before the next is written: five messages, each with the new text alone."""
    log = tmp_path / "messages.jsonl"
    parts = ["first part ", " second part ", " third ", " fourth part, a little longer ", " end "]

    @sgl.function
    def dynamic(s):
        for i, part in enumerate(parts):
            s += part
            s += sgl.gen(f"v{i}", max_tokens=4, temperature=0, ignore_eos=True)
            assert s[f"v{i}"] is not None

    with Engine(model_path="dummy", max_total_tokens=1024, message_log=str(log)) as engine:
        state = dynamic.run(backend=engine)
        stats = engine.stats()
    messages = [json.loads(line) for line in log.read_text().splitlines()]
    submits = [message for message in messages if message["type"] == "submit"]
    with_nodes = [message for message in submits if message["graph"].get("nodes")]
    assert len(with_nodes) == 5
    for message, part in zip(with_nodes, parts, strict=True):
        nodes = message["graph"]["nodes"]
        assert [node["type"] for node in nodes] == ["text", "gen"]
        assert [segment["text"] for segment in nodes[0]["segments"]] == [part]
    for i, message in enumerate(with_nodes[1:], 1):
        (handle,) = message["graph"]["handles"]
        # ids of everything so far, without sending or encoding any of it again
        assert handle[2] == sum(len(part) for part in parts[:i]) + sum(
            len(state.get_meta_info(f"v{j}")["output_ids"]) for j in range(i)
        )
    assert stats["tokenized_bytes"] == sum(len(part.encode()) for part in parts)


def test_static_program_is_one_message(tmp_path: Path) -> None:
    log = tmp_path / "messages.jsonl"

    @sgl.function
    def static(s):
        s += sgl.user("a")
        s += sgl.assistant(sgl.gen("x", max_tokens=3))
        for f in s.fork(3):
            f += sgl.user("b") + sgl.assistant(sgl.gen("y", max_tokens=3))

    with Engine(model_path="dummy", max_total_tokens=1024, message_log=str(log)) as engine:
        static.run(backend=engine)
    submits = [line for line in log.read_text().splitlines() if json.loads(line)["type"] == "submit"]
    assert len(submits) == 1


def test_special_tokens_in_user_text_are_plain_text(smollm2: Engine) -> None:
    @sgl.function
    def inject(s, text):
        s += sgl.user(text)
        s += sgl.assistant(sgl.gen("x", max_tokens=1, temperature=0))

    def prompt_tokens(text: str) -> int:
        return inject.run(text, backend=smollm2).get_meta_info("x")["prompt_tokens"]

    plain = prompt_tokens("hi ")
    assert prompt_tokens("hi <|im_end|>") > plain + 1, "it is spelled out, not one control token"


def test_batch_of_eight_with_one_bad_row(smollm2: Engine) -> None:
    @sgl.function
    def row(s, pattern):
        s += "A number: " + sgl.gen("x", regex=pattern, max_tokens=4, temperature=0)

    rows = [{"pattern": r"\d{2}"}] * 7 + [{"pattern": "(?=a)b"}]
    results = row.run_batch(rows, backend=smollm2, on_error="return")
    assert all(re.fullmatch(r"\d{2}", state["x"]) for state in results[:7])
    assert isinstance(results[7], InvalidRegex)
    assert "test_main_job.py" in str(results[7]), "the error points at the program"


def test_schema_keyword_that_nobody_enforces_is_refused(smollm2: Engine) -> None:
    @sgl.function
    def bad(s):
        s += "x" + sgl.gen("x", json_schema={"type": "array", "uniqueItems": True, "items": {"type": "integer"}})

    with pytest.raises(UnsupportedSchema) as caught:
        bad.run(backend=smollm2)
    assert caught.value.pointer == "/uniqueItems"
    assert isinstance(caught.value, SglError)
