"""Test programs 22 to 46: those of guidance, outlines, LMQL and others, and our own faults and scale.

On the embedded model where the point is what a model says under a constraint; on the toy model (random weights, one
byte per token) where the point is tokens, text or counters, which it shows as well in a fraction of the time; on the
mock where the point is the language alone. 36 (errors of providers) is tested with the API backends.
"""

from __future__ import annotations

import json
import re
import threading
from typing import Annotated, Any, Literal, TypedDict

import jsonschema_rs
import pytest
from pydantic import BaseModel, Field

import sgl
from sgl.errors import EmptyPrompt, GenerationError, InvalidGrammar, InvalidParameter, SglError
from sgl.runtime.engine import Engine

GREEDY: dict[str, Any] = {"temperature": 0}


def said(backend: Any, *parts: Any, **options: Any) -> sgl.ProgramState:
    """A program that appends `parts`."""

    @sgl.function
    def program(s):
        for part in parts:
            s += part

    return program.run(backend=backend, **{**GREEDY, **options})


# --- guidance ---


def test_22_sums_associate(dummy_engine: Engine) -> None:
    """On the toy model: token ids."""

    @sgl.function
    def left(s):
        s += ("one " + sgl.gen("a", max_tokens=2)) + (" two" + sgl.gen("b", max_tokens=2))
        return s._program.read_state(0).token_ids

    @sgl.function
    def right(s):
        s += "on"
        s += "e " + (sgl.gen("a", max_tokens=2) + (" t" + ("wo" + sgl.gen("b", max_tokens=2))))
        return s._program.read_state(0).token_ids

    assert left.run(backend=dummy_engine, **GREEDY).ret_value == right.run(backend=dummy_engine, **GREEDY).ret_value


def test_23_a_space_before_a_value_is_no_token_of_its_own(smollm2: Engine) -> None:
    """A prompt that ends in a space: with healing the value may begin inside of the token that has the space."""

    def answer(healing: bool) -> tuple[sgl.ProgramState, dict[str, Any]]:
        gen = sgl.gen("x", regex="(Paris|Rome)", max_tokens=4, token_healing=healing)
        state = said(smollm2, "Q: Capital of France?\nA: Paris\nQ: Capital of Italy?\nA: ", gen)
        return state, state.get_meta_info("x")

    healed, meta = answer(True)
    plain, without = answer(False)
    assert healed["x"] == plain["x"] == "Rome"
    assert healed.usage.healed_tokens == 1, "the space is drawn anew, with what follows"
    assert meta["completion_tokens"] <= without["completion_tokens"]
    assert healed.text().endswith("A: Rome")


def test_24_the_longer_option_and_the_empty_one(smollm2: Engine, dummy_engine: Engine) -> None:
    longer = said(
        smollm2, "Q: Who is the first president of the USA?\nA: George", sgl.select("x", [" W", " Washington"])
    )
    assert longer["x"] == " Washington"
    with pytest.raises(InvalidParameter, match="non-empty"):
        sgl.select("x", ["", "a"])  # no text has no probability; a constraint may allow it
    assert said(dummy_engine, "Say: ", sgl.gen("x", regex="(|nice)", max_tokens=4))["x"] in ("", "nice")


def test_25_an_error_reaches_each_consumer_each_time() -> None:
    """On the mock: a fault."""
    state = said(sgl.MockBackend(["fine"]), sgl.gen("a"), stream=True)
    assert list(state.text_iter()) == ["fine"]
    mock = sgl.MockBackend(errors={"a": GenerationError("no luck")})
    for _ in range(2):
        state = said(mock, sgl.gen("a"), stream=True)
        for _ in range(2):
            with pytest.raises(GenerationError, match="no luck"):
                list(state.text_iter("a"))


def test_26_characters_of_many_bytes_are_never_split(dummy_engine: Engine) -> None:
    """On the toy model, whose tokens are bytes: the hardest case."""

    @sgl.function
    def program(s):
        for _ in range(3):
            s += "> " + sgl.gen("word", regex="[äé語🙂]{2}", max_tokens=16, list_append=True)

    state = program.run(backend=dummy_engine, stream=True, **GREEDY)
    pieces = list(state.text_iter())
    assert "".join(pieces) == state.text()
    assert all("\ufffd" not in piece for piece in pieces)
    assert len(state["word"]) == 3
    assert all(re.fullmatch("[äé語🙂]{2}", word) for word in state["word"])


@pytest.mark.parametrize(
    ("options", "value", "matched"),
    [
        ({"stop": "."}, "abc", "."),
        ({"stop": ["c.de", ".d", "d"]}, "abc", ".d"),  # overlapping: the first that is complete
        ({"stop_regex": r"[.!]\w"}, "abc", ".d"),
        ({"stop": ".", "no_stop_trim": True}, "abc.", "."),
        ({"stop": "b"}, "a", "b"),
    ],
)
def test_27_40_bounds_of_a_capture(dummy_engine: Engine, options: dict, value: str, matched: str | None) -> None:
    """On the toy model: its constraint makes it say what the test needs."""
    stop = options.get("stop")
    kept = list(stop) if isinstance(stop, list) else stop
    given = {"regex": "abc[.]def", "max_tokens": 16, **options}
    state = said(dummy_engine, "x", sgl.gen("x", **given), "|")
    assert state["x"] == value
    assert state.get_meta_info("x")["finish_reason"].get("matched") == matched
    assert state.text() == f"x{value}|"
    assert stop == kept, "the caller's list is the caller's"


def test_40_a_stop_inside_a_token_and_one_after_so_many(smollm2: Engine) -> None:
    prompt = "Q: Capital of France?\nA: Paris\nQ: Capital of France?\nA:"
    state = said(smollm2, prompt, sgl.gen("x", stop="ri", max_tokens=4), "!")
    assert state["x"] == " Pa", "the token is ' Paris'"
    assert state.text() == f"{prompt} Pa!"
    counted = said(smollm2, "1 2 3 4 5 6 7", sgl.gen("x", stop=" ", min_tokens=4, max_tokens=12))
    assert counted.get_meta_info("x")["completion_tokens"] >= 4


def test_28_recursive_grammars_and_quotes(smollm2: Engine) -> None:
    nested = said(smollm2, "Brackets: (())()", sgl.gen("x", ebnf='root ::= "(" root? ")"', max_tokens=8))["x"]
    assert nested == "(" * (len(nested) // 2) + ")" * (len(nested) // 2)
    source = "The cat sat on the mat, and the dog ran."
    words = json.dumps(source)
    quote = sgl.gen("quote", lark='start: %regex {"substring_words": ' + words + "}", max_tokens=12)
    state = said(smollm2, f'Text: {source}\nWhere was the cat? Quote: "The cat', quote)
    assert state["quote"] in source


def test_28_mutual_recursion_and_counted_repeats(dummy_engine: Engine) -> None:
    """On the toy model: the constraint says what comes."""
    grammar = 'root ::= even\neven ::= "" | "a" odd\nodd ::= "b" even'
    mutual = said(dummy_engine, "x", sgl.gen("x", ebnf=grammar, max_tokens=8))["x"]
    assert mutual == "ab" * (len(mutual) // 2)
    few = said(dummy_engine, "x", sgl.gen("x", regex="(cat|dog|emu){2,3}", max_tokens=12))["x"]
    assert re.fullmatch("(cat|dog|emu){2,3}", few)


def test_29_forced_tokens_and_selects_of_one(dummy_engine: Engine) -> None:
    """On the toy model: counters."""
    state = said(dummy_engine, "x", sgl.gen("x", regex="forced[ab]"))
    assert re.fullmatch("forced[ab]", state["x"])
    assert state.usage.forced_tokens >= 6
    assert state.usage.completion_tokens == 7
    before = dummy_engine.stats()["forwards"]
    one = said(dummy_engine, "x", sgl.select("x", ["only"]))
    assert one.probabilities("x") == {"only": 1.0}
    assert dummy_engine.stats()["forwards"] - before <= 2


def test_30_44_rewinding_agrees_with_what_is_there(dummy_engine: Engine) -> None:
    """On the toy model: text, tokens and captures after many a rewind, and what is computed for it."""

    @sgl.function
    def program(s):
        s += "a prefix of some length: " + sgl.gen("first", max_tokens=8)
        here = s.mark()
        for _ in range(3):
            s += " try " + sgl.gen("try", max_tokens=4, list_append=True)
            s.rewind(here)
        s += " end " + sgl.gen("end", max_tokens=2)
        return s._program.read_state(0)

    state = program.run(backend=dummy_engine, **GREEDY)
    assert state.text() == f"a prefix of some length: {state['first']} end {state['end']}" == state.ret_value.text
    assert len(set(state["try"])) == 1, "greedy, and the same prefix"
    for meta in state.get_meta_info("try")[1:]:
        assert meta["cached_tokens"] == meta["prompt_tokens"] - 1, "the first try computed it all"
    assert state.get_meta_info("end")["cached_tokens"] > len("a prefix of some length: ")


def test_31_without_a_model() -> None:
    """On the mock: that is the point."""
    mock = sgl.MockBackend(lambda prompt, node: f"{len(prompt)}")
    assert said(mock, "four", sgl.gen("x"), "!", sgl.gen("y"))["y"] == "6"
    assert mock.prompts == [("x", "four"), ("y", "four4!")]


# --- outlines ---


class Review(TypedDict):
    stars: Literal[1, 2, 3, 4, 5]
    mood: Literal["good", "bad"]


def test_32_33_typed_values_of_a_model(smollm2: Engine) -> None:
    state = said(
        smollm2,
        "Review: The cake was delicious.\nMood (good or bad): ",
        sgl.gen("mood", type=Literal["good", "bad"]),
        "\nAll moods as JSON: ",
        sgl.gen("moods", type=list[Literal["good", "bad"]], max_tokens=24),
        "\nAs JSON: ",
        sgl.gen("review", type=Review, max_tokens=24),
        "\nNumber of cakes: ",
        sgl.gen("count", type=int),
    )
    assert state["mood"] == "good", "bare, beside a list of them in quotes"
    assert set(state["moods"]) <= {"good", "bad"}
    assert state["review"]["stars"] in range(1, 6)
    assert isinstance(state["count"], int)


def test_34_wrong_combinations_are_refused_at_construction() -> None:
    for wrong in (
        {"type": int, "regex": "a"},
        {"choices": ["a"], "regex": "a"},
        {"ebnf": "root ::= x", "lark": "start: x"},
    ):
        with pytest.raises(SglError):
            sgl.gen("x", **wrong)


def test_35_a_template_runs_on_any_backend(dummy_engine: Engine) -> None:
    """On the toy model and the mock: the same application, two models."""
    form = sgl.template("Q: {{ question }}\nA: {{ answer }}\n")

    @sgl.function
    def ask(s, question):
        s += form(question=question, answer=sgl.gen("answer", regex="[ab]", max_tokens=2))

    for backend in (sgl.MockBackend(["a"]), dummy_engine):
        state = ask.run("Why?", backend=backend, **GREEDY)
        assert re.fullmatch("Q: Why\\?\nA: [ab]\n", state.text())
    with pytest.raises(InvalidParameter, match="answer"):
        form(question="x")


def test_37_a_schema_of_its_own_per_row(smollm2: Engine) -> None:
    schemas: list[dict[str, Any]] = [
        {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]},
        {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 2, "maxItems": 3},
        {"enum": ["yes", "no"]},
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
    ]
    for schema in schemas:
        schema.setdefault("additionalProperties", False)

    @sgl.function
    def program(s, schema):
        s += f"JSON for {json.dumps(schema)}: " + sgl.gen("x", json_schema=schema, max_tokens=32)

    for schema, state in zip(schemas, program.run_batch([(schema,) for schema in schemas], backend=smollm2, **GREEDY),
                             strict=True):  # fmt: skip
        jsonschema_rs.validate(schema, state.value("x"))


class Cited(TypedDict):
    sources: list[Literal[1, 2]]
    answer: Annotated[str, Field(max_length=16)]


class Profile(BaseModel):
    age: Annotated[int, Field(ge=18, lt=100)]
    job: Literal["chef", "nurse"]


class Edge(TypedDict):
    source: Literal["Ada", "Bob", "Eve"]
    target: Literal["Ada", "Bob", "Eve"]


def test_38_scenarios_hold_their_constraint(smollm2: Engine) -> None:
    mail = said(smollm2, "Mail: You have won a prize!\nLabel: ", sgl.select("label", ["spam", "work", "family"]))
    assert mail["label"] in ("spam", "work", "family")
    graph = said(
        smollm2, "Ada knows Bob. Bob knows Eve.\nEdges as JSON: ", sgl.gen("x", type=list[Edge], max_tokens=40)
    )
    assert all(set(edge) == {"source", "target"} for edge in graph["x"])
    move = said(smollm2, "Chess: 1. e4 e5 2. ", sgl.gen("move", regex="[KQRBN]?[a-h]?x?[a-h][1-8]", max_tokens=6))
    assert re.fullmatch("[KQRBN]?[a-h]?x?[a-h][1-8]", move["move"])

    cited = said(
        smollm2,
        "[1] Ada was born in London. [2] Bob likes tea.\nQ: Where was Ada born?\nAnswer with sources, as JSON: ",
        sgl.gen("x", type=Cited, max_tokens=32),
    )
    assert set(cited["x"]) == {"sources", "answer"}
    assert set(cited["x"]["sources"]) <= {1, 2}
    profile = said(smollm2, "Ada is 28, a chef, and likes tea.\nJSON: ", sgl.gen("x", type=Profile, max_tokens=24))
    assert profile["x"].age in range(18, 100)
    assert profile["x"].job in ("chef", "nurse")

    @sgl.function
    def density(s):
        s += "Article: Ada Lovelace wrote the first program.\n"
        for _ in range(3):
            s += "Denser: " + sgl.gen("summary", max_tokens=6, stop="\n", list_append=True) + "\n"

    assert len(density.run(backend=smollm2, **GREEDY)["summary"]) == 3

    @sgl.function
    def sim_tom(s, story, question):
        s += story + "\nWhat does Ann know? " + sgl.gen("view", max_tokens=12, stop="\n")
        with s.copy() as second:  # answers from her view alone
            second += f"\n{s['view']}\n{question} The " + sgl.select("place", ["box", "basket"])
        s["place"] = s["place"][0]

    told = sim_tom.run("Ann puts the ball in the box and leaves.", "Where is it?", backend=smollm2, **GREEDY)
    assert told["place"] in ("box", "basket")


# --- LMQL and others ---


def test_39_a_callees_text_is_not_in_the_callers_prompt(dummy_engine: Engine) -> None:
    """On the toy model: prompts."""

    @sgl.function
    def callee(s):
        s += "secret" + sgl.gen("x", regex="[ab]", max_tokens=2, temperature=0)
        return s["x"]

    @sgl.function
    def caller(s):
        s += "got " + callee().ret_value + sgl.gen("y", max_tokens=1)

    assert re.fullmatch("got [ab].*", caller.run(backend=dummy_engine, **GREEDY).text())


def test_41_generations_back_to_back_prefill_nothing(dummy_engine: Engine) -> None:
    """On the toy model: counters."""
    state = said(dummy_engine, "a prompt", sgl.gen("a", max_tokens=5, ignore_eos=True), sgl.gen("b", max_tokens=5))
    a, b = state.get_meta_info("a"), state.get_meta_info("b")
    assert b["prompt_tokens"] == a["prompt_tokens"] + 5
    assert b["prompt_tokens"] - b["cached_tokens"] == 1, "the token that was drawn last"


def test_43_braces_brackets_and_quotes_survive(dummy_engine: Engine) -> None:
    """On the toy model: text."""
    literal = "{a} {{b}} [C] \"d\" 'e' %s \\n <|im_end|> {% raw %} \u00a0 ☃ $f"
    assert said(dummy_engine, literal, sgl.gen("x", max_tokens=1)).text().startswith(literal)
    assert sgl.template("{{ x }}")(x=literal) == literal


# --- faults and scale ---


@pytest.mark.parametrize("where", ["middle", "child", "row"])
def test_45_faults_are_raised_and_nothing_hangs(where: str) -> None:
    """On the mock: a backend that fails where it is told to."""

    @sgl.function
    def program(s, name="ok"):
        s += "x" + sgl.gen("first")
        forks = s.fork(8)
        for i, fork in enumerate(forks):
            fork += sgl.gen("bad" if (where, i) == ("child", 3) else "leaf")
        forks.join()
        s += sgl.gen("bad" if where == "middle" else name)
        s += "more" + sgl.gen("last")
        return s["leaf"]

    mock = sgl.MockBackend(errors={"bad": GenerationError("server says 500")})
    if where != "row":
        with pytest.raises(GenerationError, match="500") as caught:
            program.run(backend=mock)
        assert caught.value.location.function == "program"
        assert any("branch" in note for note in caught.value.__notes__)
        return
    rows = [("bad" if i == 57 else "ok",) for i in range(100)]
    results = program.run_batch(rows, backend=mock, on_error="return")
    assert [i for i, result in enumerate(results) if isinstance(result, Exception)] == [57]
    assert all(len(result["leaf"]) == 8 for i, result in enumerate(results) if i != 57)
    assert mock.server_info()["num_open"] == 0


def test_45_an_error_of_the_engine_in_a_child(dummy_engine: Engine) -> None:
    """On the toy model: a constraint that only the engine can refuse, in one child of eight."""

    @sgl.function
    def program(s):
        s += "x"
        forks = s.fork(8)
        for i, fork in enumerate(forks):
            fork += sgl.gen("leaf", max_tokens=64, ignore_eos=True, lark="start: missing" if i == 3 else None)
        forks.join()
        s += "more" + sgl.gen("last")

    with pytest.raises(InvalidGrammar) as caught:
        program.run(backend=dummy_engine)
    assert caught.value.location.function == "program"
    stats = dummy_engine.stats()
    assert (stats["num_programs"], stats["num_running"]) == (0, 0), "the siblings are cancelled"


def test_45_odd_programs_have_a_result_or_a_typed_error(dummy_engine: Engine) -> None:
    """On the toy model: a fork before any text, one too wide, samples, a name that nothing sets."""

    @sgl.function
    def early(s):
        forks = s.fork(2)
        for i, fork in enumerate(forks):
            fork += f"{i}:" + sgl.gen("x", max_tokens=2)
        forks.join()
        s += "after" + sgl.gen("y", max_tokens=1, n=3)
        with pytest.raises(InvalidParameter, match="at most"):
            s.fork(10_001)
        with pytest.raises(KeyError, match="never"):
            s["never"]

    state = early.run(backend=dummy_engine, **GREEDY)
    assert (len(state["x"]), len(state["y"])) == (2, 3)

    @sgl.function
    def empty(s):
        s += sgl.gen("x", max_tokens=1)

    with pytest.raises(EmptyPrompt) as caught:
        empty.run(backend=dummy_engine)
    assert caught.value.location.function == "empty"


def test_46_many_states_without_threads(dummy_engine: Engine) -> None:
    """On the toy model: 500 live states with a token each, and 200 forks of a prefix that is computed once."""

    @sgl.function
    def live(s):
        s += "p"
        forks = s.fork(500)
        forks += sgl.gen("x", max_tokens=1, ignore_eos=True)
        before = threading.active_count()
        count = len([fork["x"] for fork in forks])
        held = dummy_engine.stats()["pages_held"]
        return count, threading.active_count() - before, held

    count, num_threads, held = live.run(backend=dummy_engine, **GREEDY).ret_value
    assert (count, num_threads) == (500, 0)
    assert held >= 1

    @sgl.function
    def wide(s, prefix):
        s += prefix
        forks = s.fork(200)
        forks += sgl.gen("x", max_tokens=1, ignore_eos=True)
        forks.join()

    prefix = "".join(chr(97 + i * 7 % 26) for i in range(1500))
    usage = wide.run(prefix, backend=dummy_engine, **GREEDY).usage
    assert usage.prefill_tokens < len(prefix) + 2 * 200, "once"
