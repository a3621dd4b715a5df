"""Tool-call and reasoning formats one by one: names, published prompts, what constraints allow, what goes wrong."""

# ruff: noqa: RUF001 - DeepSeek writes its markers with full-width bars

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest
from support.grammar_walks import walk
from support.matcher_conformance import world

from sgl.errors import InvalidConstraint, InvalidParameter, UnsupportedSchema
from sgl.grammars.compiler import GrammarCompiler
from sgl.grammars.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Message,
    Tool,
    ToolFormat,
    began_inside,
    choice_of,
    detect_reasoning_format,
    detect_tool_format,
    message_parser,
    reasoning_format,
    tool_format,
    tools_of,
)
from sgl.grammars.formats.shapes import TagCalls
from sgl.grammars.xgrammar_backend import Backend
from sgl.lang.capture import Capture
from sgl.lang.graph import Usage, ValueEvent
from sgl.limits import DEFAULT_LIMITS
from sgl.runtime.text.template import ChatTemplate

WORLD = world()
COMPILER = GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids)
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["c", "f"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "ok": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [Tool("get_weather", "Get the weather.", PARAMETERS), Tool("now", "Get the time.")]
CALLS = [("get_weather", {"city": "Rome", "unit": "c", "days": 3, "ok": True, "tags": ["a"]}), ("now", {})]
BY_NAME = {fmt.name: fmt for fmt in TOOL_FORMATS}

# --- names ---

TOOL_NAMES = """
apertus2509 deepseekv3 deepseekv31 deepseekv32 glm glm45 glm47 gpt-oss kimi_k2 llama3 llama4 mistral pythonic qwen
qwen25 qwen3_coder step3 json python xml llama hermes lfm2 minimax-m2 interns1
"""
REASONING_NAMES = """
apertus2509 deepseek-r1 deepseek-v3 qwen3 qwen3-thinking kimi kimi_k2 gpt-oss glm45 step3 minimax mistral
"""


def test_every_name_that_users_know_is_there() -> None:
    assert [tool_format(name).name for name in TOOL_NAMES.split() if not tool_format(name).origin] == []
    assert [reasoning_format(name).name for name in REASONING_NAMES.split() if not reasoning_format(name).origin] == []
    for formats in (TOOL_FORMATS, REASONING_FORMATS):
        names = [name for fmt in formats for name in (fmt.name, *fmt.aliases)]
        assert len(names) == len(set(names))


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(InvalidParameter, match="did you mean 'hermes'"):
        tool_format("hermess")


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("", "hermes", None),
        ('<tools> {"name": <function-name>, "arguments": <args-json-object>}', "hermes", None),
        ("<function=x> <parameter=y>", "qwen3_coder", None),
        ("<｜Assistant｜><｜tool▁sep｜> ```json </think>", "deepseekv3", "deepseek-r1"),
        ("<｜tool▁sep｜>", "deepseekv31", None),
        ("<｜DSML｜invoke thinking", "deepseekv32", "deepseek-v3"),
        ("<|channel|>analysis <|constrain|>", "gpt-oss", "gpt-oss"),
        ("[gMASK]<|assistant|> <arg_key> <think>", "glm47", "glm45"),
        ("<|tool_calls_section_begin|> <think> <|im_middle|>", "kimi_k2", "kimi_k2"),
        ("<minimax:tool_call> <think>", "minimax-m2", "minimax"),
        ("[TOOL_CALLS]", "mistral", None),
        ("<|im_start|> <think> enable_thinking", "hermes", "qwen3"),
        ("unknown <think>", "hermes", "qwen3"),
    ],
)
def test_the_template_tells_the_format(template: str, tools: str, reasoning: str | None) -> None:
    found = detect_reasoning_format(template)
    assert detect_tool_format(template).name == tools
    assert (found.name if found is not None else None) == reasoning


# --- prompts ---

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK = {"name": "now", "description": "Get the time.", "parameters": {"type": "object", "properties": {}}}
LINES = (
    '{"type": "function", "function": {"name": "get_weather", "description": "Get the weather.", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}\n'
    '{"type": "function", "function": {"name": "now", "description": "Get the time.", "parameters": '
    '{"type": "object", "properties": {}}}}'
)


def test_a_template_that_knows_tools_gets_them() -> None:
    source = "{% for tool in tools %}{{ tool | tojson }}{{ '' if loop.last else '\\n' }}{% endfor %}"
    prompt = tool_format("hermes").tool_prompt([WEATHER, CLOCK], source)
    assert prompt.system == ""
    assert ChatTemplate(source).render([], **prompt.template_kwargs) == LINES


@pytest.mark.parametrize("name", BY_NAME)
def test_every_prompt_names_its_tools(name: str) -> None:
    text = tool_format(name).tool_prompt(TOOLS).system
    assert all(word in text for word in ("get_weather", "Get the time."))
    assert "{tools}" not in text
    assert "{example}" not in text
    assert tool_format(name).tool_prompt([]).system == ""


@pytest.mark.parametrize("word", ["NaN", "-Infinity"])
def test_arguments_in_a_string_are_json(word: str) -> None:
    arguments = json.dumps(f'{{"days": {word}}}')
    message = tool_format("hermes").parse(f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>', TOOLS)
    assert not any(call.complete for call in message.calls)


# --- constraints ---


def compiled(fmt: ToolFormat, choice: Any, **options: Any) -> Any:
    tag = fmt.constraint(TOOLS, choice, **options)
    return None if tag is None else COMPILER.compile(tag)


@pytest.mark.parametrize("name", BY_NAME)
def test_what_a_required_constraint_allows_is_a_call_that_obeys(name: str) -> None:
    fmt = BY_NAME[name]
    for choice, parallel in (("required", True), ("required", False), ({"name": "get_weather"}, True)):
        grammar = compiled(fmt, choice, parallel=parallel)
        for seed in range(2):
            path = walk(grammar, random.Random(seed))
            if path is None:
                continue
            message = fmt.parse(WORLD.text(path), TOOLS)
            assert message.calls
            assert message.content == ""
            assert len(message.calls) == 1 or (parallel and choice == "required")
            for call in message.calls:
                assert call.complete
                if call.name == "get_weather":
                    assert jsonschema_rs.is_valid(PARAMETERS, json.loads(call.arguments))


@pytest.mark.parametrize("name", BY_NAME)
def test_what_the_format_writes_is_allowed(name: str) -> None:
    fmt = BY_NAME[name]
    calls = CALLS if fmt.parallel else CALLS[:1]
    text = fmt.render(calls).removesuffix(fmt.blocks[0].end if fmt.blocks[0].end_is_eos else "")
    assert accepts(compiled(fmt, "required"), text)
    for strict in (True, False):
        auto = compiled(fmt, "auto", strict=strict)
        if auto is None:
            assert not fmt.blocks[0].begin
            continue
        assert accepts(auto, text)
        assert accepts(auto, fmt.answer + "No call is needed.")
        if not fmt.answer:
            assert accepts(auto, "Let me see.\n" + text)
            assert not accepts(compiled(fmt, "none"), text)
        assert accepts(compiled(fmt, "none"), fmt.answer + "No call.")
    wrong = fmt.render([("get_weather", {"city": "Rome", "unit": "kelvin"})])
    assert not accepts(compiled(fmt, "required"), wrong)


def accepts(grammar: Any, text: str) -> bool:
    """Whether a text is complete under a grammar: byte by byte, but where the matcher forces a token."""
    matcher = grammar.matcher()
    single = {value: token_id for token_id, value in WORLD.token_bytes.items() if len(value) == 1}
    data = text.encode()
    while data:
        token_id = (matcher.forced_tokens() or [single[data[:1]]])[0]
        if not data.startswith(WORLD.token_bytes[token_id]) or not matcher.accept(token_id):
            return False
        data = data[len(WORLD.token_bytes[token_id]) :]
    return bool(matcher.is_complete())


def test_each_tool_says_whether_its_arguments_must_obey() -> None:
    tools = [Tool("held", "", PARAMETERS, strict=True), Tool("free", "", PARAMETERS)]
    grammar = COMPILER.compile(tool_format("hermes").constraint(tools, "auto"))
    call = tool_format("hermes").render([("free", {"city": 1})])
    assert accepts(grammar, call)
    assert not accepts(grammar, call.replace("free", "held"))
    assert accepts(grammar, tool_format("hermes").render([("held", {"city": "Rome", "unit": "c"})]))


def test_a_named_call_is_that_one() -> None:
    grammar = compiled(tool_format("hermes"), {"type": "function", "function": {"name": "now"}})
    assert accepts(grammar, tool_format("hermes").render([CALLS[1]]))
    assert not accepts(grammar, tool_format("hermes").render([CALLS[0]]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sometimes", "expected 'auto', 'none', 'required'"),
        ({"name": "nope"}, "expected one of the tools 'get_weather', 'now'"),
        ({"type": "function"}, "expected 'auto'"),
    ],
)
def test_a_wrong_choice_is_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        choice_of(given, tools_of(TOOLS))


@pytest.mark.parametrize("given", [[{"name": "a b"}], [WEATHER, WEATHER], [{}], [{"name": "f", "parameters": True}]])
def test_wrong_tools_are_refused(given: list[Any]) -> None:
    with pytest.raises(InvalidParameter):
        tools_of(given)


def test_what_bare_text_cannot_enforce_is_refused_when_it_must_be() -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"x": {"type": "string", "format": "date"}}})
    with pytest.raises(UnsupportedSchema, match="'format' of argument 'x'"):
        tool_format("glm").constraint([tool], "required")
    assert tool_format("glm").constraint([tool], "auto") is not None
    assert tool_format("hermes").constraint([tool], "required") is not None


BARE = [name for name, fmt in BY_NAME.items() if isinstance(fmt.blocks[0].body, TagCalls)]


def one_argument(schema: dict[str, Any], key: str = "x") -> Tool:
    return Tool("f", "", {"type": "object", "properties": {key: schema}, "required": [key]})


@pytest.mark.parametrize("name", BY_NAME)
def test_a_value_may_hold_the_markers_of_its_format(name: str) -> None:
    """Those of JSON in strings: the writer escapes them, and the parser reads those that a constraint let through."""
    fmt = BY_NAME[name]
    body = fmt.blocks[0].body
    marker = (body.value_end.strip() if isinstance(body, TagCalls) else fmt.blocks[0].end) or '"'
    tool = one_argument({"type": "array", "items": {"enum": [marker, "a"]}})
    text = fmt.render([("f", {"x": [marker, "a"]})])
    grammar = COMPILER.compile(fmt.constraint([tool], "required", parallel=False))
    for seed in range(3):
        path = walk(grammar, random.Random(seed))
        texts = [text] if path is None else [text, WORLD.text(path)]
        for each in texts:
            (call,) = fmt.parse(each, [tool]).calls
            assert call.complete
            assert set(json.loads(call.arguments)["x"]) <= {marker, "a"}


AWKWARD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "said": {"type": "string"},
        "short": {"type": "string", "minLength": 1, "maxLength": 4},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"type": ["string", "boolean", "null"]}, "maxItems": 3},
        "map": {"type": "object", "properties": {"a b": {"type": "string"}}, "required": ["a b"]},
        "one": {"enum": ['R"o<m>e\n', "'", "\\", "=)"]},
        "any": {},
    },
    "required": ["short", "list", "one"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", BY_NAME)
def test_what_a_constraint_allows_is_read_whatever_it_says(name: str) -> None:
    fmt = BY_NAME[name]
    tools = [Tool("do.it-1", "", AWKWARD), Tool("now")]
    for choice, strict, parallel in (("required", None, True), ("required", None, False), ("auto", True, True)):
        tag = fmt.constraint(tools, choice, strict=strict, parallel=parallel)
        if tag is None:
            continue
        grammar = COMPILER.compile(tag)
        path = next(path for seed in range(9) if (path := walk(grammar, random.Random(seed))) is not None)
        message = fmt.parse(WORLD.text(path), tools)
        assert message.calls or choice == "auto"
        assert parallel or len(message.calls) == 1
        assert message.content == "" or choice == "auto"
        for call in message.calls:
            assert call.complete
            assert call.name == "now" or jsonschema_rs.is_valid(AWKWARD, json.loads(call.arguments)), call


@pytest.mark.parametrize("name", BARE)
def test_bare_text_never_holds_the_marker_that_ends_it(name: str) -> None:
    fmt = BY_NAME[name]
    body = fmt.blocks[0].body
    assert isinstance(body, TagCalls)
    end = body.value_end.strip()
    with pytest.raises(InvalidParameter, match=f"cannot write argument 'x' of 'f': .*{end[:-1]}"):
        fmt.render([("f", {"x": f"a{end}b"})])
    good, bad = fmt.render([("f", {"x": "a\nb"})]), fmt.render([("f", {"x": "a@b"})]).replace("@", end)
    for bound in ({"maxLength": 99}, {"minLength": 1}, {"pattern": "a(.|\n)*b"}, {}):
        grammar = COMPILER.compile(fmt.constraint([one_argument({"type": "string", **bound})], "required"))
        assert accepts(grammar, good), bound
        assert not accepts(grammar, bad), bound


def test_xgrammar_refuses_what_it_would_not_keep_out() -> None:
    stub = SimpleNamespace(limits=DEFAULT_LIMITS)
    held, free = (
        tool_format("glm").constraint([one_argument({"type": "string", **bound})], "required")
        for bound in ({"maxLength": 99}, {})
    )
    assert Backend.tag(stub, free)["type"] == "structural_tag"  # type: ignore[arg-type]
    with pytest.raises(InvalidConstraint, match="cannot keep texts out of the regex"):
        Backend.tag(stub, held)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("options", [["a", "1", 2], ["a", "null", None]])
def test_an_option_that_would_be_read_as_another_is_refused(name: str, options: list[Any]) -> None:
    fmt, tool = BY_NAME[name], one_argument({"enum": options})
    if fmt.name == "deepseekv32":  # which says what is a string
        assert fmt.constraint([tool], "required") is not None
        return
    with pytest.raises(UnsupportedSchema, match="would be read as something else") as caught:
        fmt.constraint([tool], "required")
    assert caught.value.details["pointer"] == "/parameters/properties/x"
    assert fmt.constraint([tool], "auto") is not None


@pytest.mark.parametrize("name", [*BARE, "pythonic", "lfm2"])
def test_what_nothing_would_enforce_is_refused(name: str) -> None:
    bounded = Tool("f", "", {"type": "object", "properties": {"x": {"type": "integer"}}, "minProperties": 1})
    missing = Tool("f", "", {"type": "object", "properties": {}, "required": ["y"]})
    for tool, pointer in ((bounded, "/parameters/minProperties"), (missing, "/parameters/required")):
        with pytest.raises(UnsupportedSchema) as caught:
            BY_NAME[name].constraint([tool], "required")
        assert caught.value.details["pointer"] == pointer
        assert tool_format("hermes").constraint([tool], "required") is not None


@pytest.mark.parametrize("given", [{"a": float("nan")}, {"a": object()}, "[1]", '{"a": 1e999}', '{"a": NaN}', "{"])
def test_arguments_that_are_no_json_object_are_not_written(given: Any) -> None:
    with pytest.raises(InvalidParameter, match="arguments are"):
        tool_format("hermes").render([("now", given)])


def test_an_open_string_ends_with_its_argument() -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"x": {"type": "array"}, "y": {"type": "integer"}}})
    text = tool_format("qwen3_coder").render([("f", {"x": ["a"], "y": 2})]).replace('["a"]', '["a')
    (call,) = tool_format("qwen3_coder").parse(text, [tool]).calls
    assert json.loads(call.arguments) == {"x": '["a', "y": 2}


def test_halves_of_a_character_are_joined() -> None:
    (call,) = parsed("pythonic", '[now(x="\\ud83d\\ude00\\/")]').calls
    assert json.loads(call.arguments) == {"x": "\N{GRINNING FACE}/"}


# --- what goes wrong, and what is taken all the same ---


def parsed(name: str, text: str, **options: Any) -> Message:
    return tool_format(name).parser(TOOLS, **options).parse(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>oops"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": tru}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("json", '{"name": "John", "arguments": {}}'),
        ("json", '{"answer": 42}'),
        ("json", 'In JSON: {"name": "now", "arguments": {}}'),
        ("pythonic", "The list [1, 2] and the call [print(x)] are Python."),
        ("pythonic", "[now(x=open('f'))]"),
        ("qwen3_coder", "<tool_call>\n<function=now>\nnonsense</function>\n</tool_call>"),
        ("mistral", "[TOOL_CALLS] none"),
        ("hermes", '<tool_call>{"name": "now", "arguments": ' + '{"a": [' * 40 + "</tool_call>"),
    ],
)
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    assert parsed(name, text) == Message(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}'),
        ("hermes", '<tool_call>\n\n{"arguments": {} , "name" : "now"}\n</tool_call>\n'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "parameters": null, "type": "function"}</tool_call>'),
        ("llama3", '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}'),
        ("llama3", "<function=now>{}</function>"),
        ("pythonic", "<|python_start|>[now()]<|python_end|>"),
        ("mistral", "[TOOL_CALLS]now[ARGS]{}"),
        ("qwen3_coder", "<function=now></function></tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>now<|tool_call_argument_begin|>{}"),
        ("gpt-oss", "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}"),
    ],
)
def test_models_write_calls_in_other_ways_too(name: str, text: str) -> None:
    message = parsed(name, text)
    assert [(call.name, json.loads(call.arguments), call.complete) for call in message.calls] == [("now", {}, True)]
    assert message.content == ""


def test_text_beside_calls_is_kept() -> None:
    message = parsed("hermes", 'One.\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>\nTwo.')
    assert message.content == "One.Two."
    assert len(message.calls) == 1


def test_a_call_that_breaks_off_is_told() -> None:
    (call,) = parsed("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Ro').calls
    assert (call.arguments, call.complete) == ('{"city": "Ro', False)


def test_line_ends_in_strings_are_escaped() -> None:
    (call,) = parsed("hermes", '<tool_call>{"name": "now", "arguments": {"a": "x\ny"}}</tool_call>').calls
    assert json.loads(call.arguments) == {"a": "x\ny"}


def test_bare_text_has_the_type_of_its_schema() -> None:
    text = tool_format("glm").render([("get_weather", {"city": "5", "days": 5, "ok": True, "tags": ["5"]})])
    (call,) = parsed("glm", text).calls
    assert json.loads(call.arguments) == {"city": "5", "days": 5, "ok": True, "tags": ["5"]}


def test_ids_are_the_models_own_where_it_writes_them() -> None:
    assert [call.id for call in parsed("kimi_k2", tool_format("kimi_k2").render(CALLS)).calls] == [
        "functions.get_weather:0",
        "functions.now:1",
    ]


# --- reasoning ---


@pytest.mark.parametrize(
    ("name", "prompt", "text", "expected"),
    [
        ("qwen3", "", "<think>\na\n</think>\n\nb", ("b", "a")),
        ("qwen3", "", "b", ("b", "")),
        ("qwen3", "<think>\n", "a</think>b", ("b", "a")),
        ("deepseek-r1", "", "a</think>b", ("b", "a")),
        ("deepseek-r1", "", "<think>a</think>b", ("b", "a")),
        ("deepseek-r1", "<think></think>", "b", ("b", "")),
        ("deepseek-r1", "", "never ends", ("", "never ends")),
        ("kimi", "", "◁think▷a◁/think▷b", ("b", "a")),
        ("kimi_k2", "", "<think>a</think>b", ("b", "a")),
        ("apertus2509", "", "<|inner_prefix|>a<|inner_suffix|>b", ("b", "a")),
        (
            "gpt-oss",
            "",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
            ("b", "a"),
        ),
    ],
)
def test_reasoning_is_taken_apart(name: str, prompt: str, text: str, expected: tuple[str, str]) -> None:
    message = message_parser(reasoning=reasoning_format(name), prompt=prompt).parse(text)
    assert (message.content, message.reasoning) == expected


@pytest.mark.parametrize(
    ("text", "num_thoughts", "num_tokens", "expected"),
    [
        ("Hm.</think>A.", 2, 5, True),  # a template wrote the marker that begins it
        ("</think>A.", 0, 3, True),
        ("Hm.", 2, 2, True),  # cut
        ("<think>Hm.</think>A.", 2, 6, None),
        ("The marker is </think>.", 0, 6, None),
        ("A.", 2, 4, None),  # an endpoint keeps the reasoning to itself
        ("A.", 0, 2, None),
        ("", 0, 0, None),
    ],
)
def test_a_finished_text_tells_whether_its_prompt_opened_reasoning(
    text: str, num_thoughts: int, num_tokens: int, expected: bool | None
) -> None:
    assert began_inside(reasoning_format("qwen3"), text, num_thoughts, num_tokens) is expected


def test_a_capture_knows_reasoning_that_the_template_opened() -> None:
    capture = Capture("x", 0, None, reasoning="glm45")
    usage = Usage(completion_tokens=5, reasoning_tokens=2)
    capture.event = ValueEvent(node=0, branch=0, name="x", value="Hm.</think>A.", usage=usage)
    assert (capture.message.reasoning, capture.text) == ("Hm.", "A.")


def test_a_call_in_the_reasoning_is_none_unless_the_format_says_so() -> None:
    call = tool_format("hermes").render([CALLS[1]])
    inside = parsed("hermes", f"<think>I could {call}</think>No.", reasoning=reasoning_format("qwen3"))
    assert (inside.content, inside.calls) == ("No.", ())
    kimi = tool_format("kimi_k2").render([CALLS[1]])
    ends = parsed("kimi_k2", f"<think>I will.{kimi}", reasoning=reasoning_format("kimi_k2"))
    assert (ends.reasoning, [found.name for found in ends.calls]) == ("I will.", ["now"])


def test_harmony_gives_reasoning_and_call() -> None:
    text = (
        "<|channel|>analysis<|message|>Weather, then.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
    )
    message = parsed("gpt-oss", text)
    assert (message.reasoning, message.content) == ("Weather, then.", "")
    assert [(call.name, call.arguments) for call in message.calls] == [("get_weather", '{"city": "Rome"}')]
