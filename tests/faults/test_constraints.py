"""Constraints that are wrong, hostile or unlucky cost their own request at most (rows 25 to 37).

Rows 29 and 33 are in `test_compile_stall.py`. A regex or schema that is no text at all is refused where it is given.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from support.matcher_conformance import world
from support.programs import start, text
from support.scripted import Rig

from sgl.errors import ConstraintTooComplex, InvalidConstraint, InvalidSchema, SchemaViolation, SglError
from sgl.grammars import xgrammar_backend
from sgl.grammars.compiler import GrammarCompiler
from sgl.grammars.matcher import Bitmask, StopReason, allocate_bitmask, bitmask_to_bool
from sgl.grammars.spec import Constraint, JsonSchema, Lark, Regex, canonical_schema, constraint_of
from sgl.lang.graph import FailedEvent, Gen, Sampling, ValueEvent
from sgl.limits import Limits

WORLD = world()


def schema(value: Any, **fields: Any) -> JsonSchema:
    return JsonSchema(canonical_schema(value), **fields)


def gen(constraint: Constraint | None, n: int = 12, **fields: Any) -> Gen:
    sampling = Sampling(**{"max_new_tokens": n, "temperature": 0.0, **fields})
    return Gen(id=1, name="x", constraint=constraint, sampling=sampling)


def outcome(rig: Rig, program: int) -> SglError | str:
    """A program's value, or its error."""
    failed = rig.of(program, FailedEvent)
    return SglError.from_info(failed[0].error) if failed else rig.of(program, ValueEvent)[0].value


def served_beside(constraint: Constraint, **fields: Any) -> SglError:
    """The error of a request with `constraint`; requests before and after it get their values."""
    rig = Rig()
    start(rig, 0, text(0, "q:"), gen(Regex("[ab]{4}")))
    start(rig, 1, text(0, "q:"), gen(constraint, **fields))
    start(rig, 2, text(0, "q:"), gen(schema({"type": "boolean"})))
    rig.run()
    assert len(outcome(rig, 0)) == 4  # type: ignore[arg-type]
    assert outcome(rig, 2) in ("true", "false")
    assert rig.core.snapshot().pages_held == 0
    error = outcome(rig, 1)
    assert isinstance(error, SglError)
    return error


@pytest.mark.parametrize(("pattern", "position"), [("a(", 1), ("ab*+*", 4), ("x(?<=a", 1), ("[z-a]", 1)])
def test_row_25_a_wrong_regex_names_the_place(pattern: str, position: int) -> None:
    error = served_beside(Regex(pattern))
    assert error.code == "invalid_regex"
    assert error.status == 400
    assert f"position {position}" in error.message or error.details.get("position") == position, error


@pytest.mark.parametrize(
    ("value", "pointer"),
    [
        ({"properties": {"a": {"foo": "bar"}}}, "/properties/a/foo"),
        ({"type": "object", "properties": [1]}, "/properties"),
        ({"type": "strin"}, "/type"),
        ({"items": {"$ref": "#/$defs/none"}}, "/items/$ref"),
    ],
)
def test_row_26_an_odd_schema_names_the_pointer(value: Any, pointer: str) -> None:
    error = served_beside(schema(value))
    assert error.status == 400
    assert error.details["pointer"] == pointer


@pytest.mark.parametrize("value", ["", "{", 5, ["a"], float("nan")])
def test_row_26_what_is_no_schema_is_refused_where_it_is_given(value: Any) -> None:
    with pytest.raises(InvalidConstraint):
        constraint_of({"json_schema": value})


def exclusive(depth: int) -> Any:
    """`oneOf` in `oneOf`: two to the power of `depth` branches, were they written out."""
    if depth == 0:
        return {"const": 1}
    inner = exclusive(depth - 1)
    return {"oneOf": [{"type": "array", "items": inner, "maxItems": 1}, {"type": "object", "properties": {"a": inner}}]}


@pytest.mark.parametrize(
    "constraint",
    [
        Regex("(" * 60_000),
        Regex("(" * 20_000 + ")" * 20_000),
        Regex("a" * 100_000),
        schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        schema(json.loads('{"items":' * 100 + "{}" + "}" * 100)),
        schema({"enum": ["x" * 70_000]}),
    ],
)
def test_row_27_bombs_meet_a_limit(constraint: Constraint) -> None:
    assert isinstance(served_beside(constraint), InvalidConstraint)


@pytest.mark.parametrize("depth", [8, 12])
def test_row_27_alternatives_in_alternatives_compile_or_meet_a_limit(depth: int) -> None:
    compiler = GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids)
    try:
        assert compiler.compile(schema(exclusive(depth))).matcher().stop_reason() is StopReason.NOT_STOPPED
    except InvalidConstraint as refused:
        assert refused.hint  # noqa: PT017 - either will do


@pytest.mark.parametrize(
    ("constraint", "named"),
    [
        (Regex("((a|aa){1,5000}b){1,5000}"), ""),
        (schema({"properties": {"s": {"type": "string", "pattern": "^(a|aa){1,5000}(b|bb){1,5000}$"}}}), "/s"),
        (schema({"type": "object", "properties": {"s": {"type": "string", "maxLength": 65_536}}}), "maxLength"),
    ],
)  # fmt: skip
def test_row_28_states_are_bounded(constraint: Constraint, named: str) -> None:
    limits = Limits(max_compile_s=0.5)
    compiler = GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids, limits=limits)
    try:
        matcher = compiler.compile(constraint).matcher()
    except ConstraintTooComplex as error:
        assert named in str(error.details["pointer"])  # noqa: PT017 - either will do
        return
    # What compiles is decoded within the limits of a step, or ends with a reason.
    for _ in range(50):
        row = allocate_bitmask(1, WORLD.vocab_size)
        matcher.fill(row, 0)
        allowed = np.flatnonzero(bitmask_to_bool(row, WORLD.vocab_size)[0])
        if not len(allowed) or not matcher.accept(int(allowed[0])):
            break
    assert matcher.stop_reason() in (StopReason.NOT_STOPPED, StopReason.COMPLETE, StopReason.LIMIT)


def test_row_30_what_takes_too_long_is_ended() -> None:
    count = 40
    steps: dict[str, Any] = {
        f"x{i}": {"anyOf": [{"allOf": [{"$ref": f"#/$defs/x{i + 1}"}, {"type": kind}]} for kind in ("string", "null")]}
        for i in range(count)
    }
    steps[f"x{count}"] = {"type": "integer"}
    compiler = GrammarCompiler(
        WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids, limits=Limits(max_compile_s=0.5)
    )  # fmt: skip
    endless = schema({"$defs": steps, "properties": {"a": {"not": {"$ref": "#/$defs/x0"}}}}, unsupported="check")
    grammar: Any = compiler.compile(endless)
    helper = compiler._validator._helper._all[0]
    process = helper._process
    assert process is not None
    with pytest.raises(ConstraintTooComplex, match="could not be checked within"):
        grammar.check('{"a": 5}')
    assert process.poll() is not None, "the process was ended, not left to compute"
    assert helper._process is None
    simple: Any = compiler.compile(schema({"type": "array", "uniqueItems": True}, unsupported="check"))
    simple.check("[1, 2]")
    with pytest.raises(SchemaViolation):
        simple.check("[1, 1]")
    compiler.close()


MERGED = {"type": "integer", "allOf": [{"multipleOf": number} for number in (7, 11, 13, 17, 19, 23, 29)]}
"""What no limit of llguidance bounds: patterns whose product has hundreds of millions of states."""


@pytest.mark.parametrize("constraint", [schema(MERGED), Lark("start: A A\nA: /a+/")])
def test_row_30_a_compilation_that_takes_too_long_is_ended_and_holds_nobody_up(constraint: Constraint) -> None:
    limits = Limits(max_compile_s=0.5)
    compiler = GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids, limits=limits)
    backend: Any = compiler._backend("llguidance")
    merged = schema({"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]})
    compiler.compile(merged)
    first, second = backend.helpers._all
    assert first._process is not None, "what merges patterns is tried in a process first"
    assert second._process is None
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(compiler.compile, constraint)
        while not first._lock.locked() and not ending.done():
            time.sleep(0.01)
        compiler.compile(schema({"type": "string", "allOf": [{"pattern": "^c"}, {"pattern": "d$"}]}))
        with pytest.raises(ConstraintTooComplex, match="did not compile"):
            ending.result()
    assert first._process is None, "the process was ended, not left to compute"
    assert second._process is not None, "another one compiled meanwhile"
    compiler.compile(schema({"type": "integer", "minimum": 3}))
    compiler.close()


def test_row_31_a_flood_of_schemas_leaves_the_last_ones() -> None:
    compiler = GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids, cache_size=16)
    for number in range(200):
        compiler.compile(schema({"const": number}))
    assert (len(compiler), compiler.misses, compiler.hits) == (16, 200, 0)
    compiler.compile(schema({"const": 199}))
    assert compiler.hits == 1


def test_row_32_a_compilation_that_breaks_ends_its_request_alone() -> None:
    rig = Rig(faults={"in_compile": {"action": "raise", "program": "broken"}})
    start(rig, 0, text(0, "q:"), gen(Regex("[ab]{4}")), name="broken")
    start(rig, 1, text(0, "q:"), gen(Regex("[ab]{4}")), name="whole")
    rig.run()
    assert isinstance(outcome(rig, 0), SglError)
    assert len(outcome(rig, 1)) == 4  # type: ignore[arg-type]
    assert rig.core.snapshot().pages_held == 0


def test_row_34_each_request_is_checked_and_compiled_by_its_own_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    sevens = schema({"type": "integer", "multipleOf": 7, "minimum": 7, "maximum": 70})
    rig = Rig()
    start(rig, 0, text(0, "q:"), gen(Regex("[ab]{4}")))
    start(rig, 1, text(0, "q:"), gen(sevens))
    start(rig, 2, text(0, "q:"), gen(sevens, grammar_backend="xgrammar"))
    start(rig, 3, text(0, "q:"), gen(sevens, grammar_backend="llguidance"))
    monkeypatch.setattr(xgrammar_backend, "is_installed", lambda: False)
    start(rig, 4, text(0, "q:"), gen(Regex("a"), grammar_backend="xgrammar"))
    rig.run()
    assert len(outcome(rig, 0)) == 4  # type: ignore[arg-type]
    assert int(outcome(rig, 1)) % 7 == int(outcome(rig, 3)) % 7 == 0  # type: ignore[arg-type]
    refused, missing = outcome(rig, 2), outcome(rig, 4)
    assert isinstance(refused, SglError)
    assert refused.code == "unsupported_schema"
    assert "xgrammar" in refused.message
    assert refused.details["pointer"] == "/multipleOf"
    assert isinstance(missing, SglError)
    assert (missing.code, missing.details["param"]) == ("config_error", "grammar_backend")
    assert "sgl[xgrammar]" in missing.hint
    with pytest.raises(SglError, match="grammar_backend is 'outlines'"):
        Sampling(grammar_backend="outlines")


def test_row_35_tokens_past_the_end_of_a_grammar_are_not_taken() -> None:
    matcher = GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids).compile(Regex("xy")).matcher()
    eos = WORLD.eos_ids[0]
    for draft, taken in ((["x", "y", "y"], 2), (["x", "z", "y"], 1), (["y"], 0)):
        assert matcher.validate_tokens([token for char in draft for token in WORLD.encode(char)]) == taken
    draft = [*WORLD.encode("x"), *WORLD.encode("y"), eos, *WORLD.encode("x"), eos]
    assert matcher.validate_tokens(draft) == 3
    assert matcher.accept(draft[0]), "a look changes nothing"


@pytest.mark.parametrize("favourite", ["9", " ", "e", "[", '"'])
@pytest.mark.parametrize("value", [{}, {"type": "number"}, {"type": "array", "items": {}}])
def test_row_36_a_model_that_loops_ends(favourite: str, value: Any) -> None:
    """Numbers and white space are bounded; whatever else loops ends complete within the budget."""
    rig = Rig(processors={"loops": lambda row, ids, params: row + 1e6 * torch.eye(len(row))[ord(favourite)]})
    start(rig, 0, text(0, "q:"), gen(schema(value), 150, custom_logit_processor="loops"))
    rig.run()
    text_of = outcome(rig, 0)
    assert isinstance(text_of, str)
    json.loads(text_of)
    if favourite in "9 e":
        assert "  " not in text_of
        assert "9" * 33 not in text_of


class Nothing:
    """A matcher that allows nothing and does not know it."""

    def fill(self, bitmask: Bitmask, row: int) -> None:
        bitmask[row] = 0


def test_row_37_a_mask_that_allows_nothing_fails_its_row_and_says_why() -> None:
    banned = lambda row, ids, params: torch.full_like(row, -torch.inf)  # noqa: E731
    rig = Rig(processors={"bans": banned})
    start(rig, 0, text(0, "q:"), gen(Regex("[ab]{4}")))
    start(rig, 1, text(0, "q:"), gen(Regex("[ab]{4}")))
    start(rig, 2, text(0, "q:"), gen(Regex("[ab]{4}"), custom_logit_processor="bans"))
    start(rig, 3, text(0, "q:"), gen(None, custom_logit_processor="bans"))
    (request, *_) = [*rig.core.scheduler.waiting, *rig.core.scheduler.running]
    request.generation.matcher.fill = Nothing().fill
    rig.run()
    assert [getattr(outcome(rig, program), "code", "value") for program in range(4)] == [
        "constraint_dead_end", "value", "generation_error", "generation_error",
    ]  # fmt: skip
    assert "'bans' left none of the tokens that the constraint allows" in str(outcome(rig, 2))
    assert "'bans' left no token to draw" in str(outcome(rig, 3))


def test_a_value_is_checked_after_decoding_where_the_caller_asks() -> None:
    twice = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3}
    assert isinstance(served_beside(schema({**twice, "minItems": -1}, unsupported="check")), InvalidSchema)
    error = served_beside(schema({**twice, "uniqueItems": True}, unsupported="check"), n=20)
    assert isinstance(error, SchemaViolation)
    assert error.details["pointer"] == ""
    assert error.details["schema_pointer"] == "/uniqueItems"
    assert len(json.loads(error.details["value"])) == 3
    assert isinstance(served_beside(schema({**twice, "uniqueItems": True})), InvalidConstraint), (
        "unless it is asked for"
    )

    rig = Rig()
    start(rig, 0, text(0, "q:"), gen(schema({**twice, "contains": {"enum": [1, 2]}}, unsupported="check"), 20))
    rig.run()
    assert len(json.loads(outcome(rig, 0))) == 3  # type: ignore[arg-type]
    rig.core.compiler.close()
