"""What every format writes and reads, held against texts of its origin.

The calls, results, prompts and messages here were rendered from the models' own chat templates (as llama.cpp's folder
`models/templates` ships them in the source distribution of llama-cpp-python), from the tokenizers of mistral-common, or
stand in the document named. A format without one stands in a list, with the reason.
"""

# ruff: noqa: RUF001 - DeepSeek and Step write their markers with full-width bars

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from sgl.grammars.formats import REASONING_FORMATS, TOOL_FORMATS, message_parser, reasoning_format, tool_format

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK = {"name": "now", "description": "Get the time.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [WEATHER, CLOCK]
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Rome", "days": 3}), ("now", {})]

BARE = (
    '{"name": "get_weather", "description": "Get the weather.", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}',
    '{"name": "now", "description": "Get the time.", "parameters": {"type": "object", "properties": {}}}',
)
FUNCTIONS = tuple(f'{{"type": "function", "function": {tool}}}' for tool in BARE)


class Golden(NamedTuple):
    """Texts of one tool format.

    Args:
        origin: of `calls`, and of the others unless they are our own.
        calls: get_weather(city="Rome", days=3) and now() in one message.
        single: the first of them alone.
        result: of a call that gave `R1`; `None` where the origin needs a role or an id for it.
        prompt: that tells of the tools; `None` is in our own words (`OWN_PROMPTS`).
    """

    origin: str
    calls: str
    single: str
    result: str | None = None
    prompt: str | None = None


def golden(origin: str, template: str, first: str, second: str, **others: str) -> Golden:
    """`template` holds the calls at `@`."""
    separator = others.pop("separator", "")
    single = template.replace("@", first)
    return Golden(origin, template.replace("@", first + separator + second), single, **others)


ARGUMENTS = '{"city": "Rome", "days": 3}'
GOLDEN = {
    "hermes": golden(
        "Qwen/Qwen2.5-7B-Instruct, chat template",
        "<tool_call>\n@\n</tool_call>",
        f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}',
        '{"name": "now", "arguments": {}}',
        separator="\n</tool_call>\n<tool_call>\n",
        result="<tool_response>\nR1\n</tool_response>",
        prompt="# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
        "function signatures within <tools></tools> XML tags:\n<tools>\n" + "\n".join(FUNCTIONS) + "\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
        'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    ),
    "qwen3_coder": golden(
        "Qwen/Qwen3-Coder, chat template",
        "<tool_call>\n@\n</tool_call>",
        "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>",
        "<function=now>\n</function>",
        separator="\n</tool_call>\n<tool_call>\n",
        result="<tool_response>\nR1\n</tool_response>",
    ),
    "llama3": golden(
        "meta-llama/Llama-3.1-8B-Instruct, chat template (one call); SGLang's llama32 detector ('; ' between calls)",
        "@",
        f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
        '{"name": "now", "parameters": {}}',
        separator="; ",
    ),
    "pythonic": golden(
        "meta-llama/llama-models, models/llama3_2/text_prompt_format.md; SGLang's pythonic detector",
        "[@]",
        'get_weather(city="Rome", days=3)',
        "now()",
        separator=", ",
    ),
    "lfm2": golden(
        "LiquidAI/LFM2-1.2B, model card, tool use; SGLang's lfm2 detector",
        "<|tool_call_start|>[@]<|tool_call_end|>",
        'get_weather(city="Rome", days=3)',
        "now()",
        separator=", ",
        result="<|tool_response_start|>R1<|tool_response_end|>",
        prompt=f"List of tools: <|tool_list_start|>[{', '.join(BARE)}]<|tool_list_end|>",
    ),
    "mistral": golden(
        "mistral-common, tokenizers v3 and v7 (which add the calls' ids)",
        "[TOOL_CALLS] [@]",
        f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}',
        '{"name": "now", "arguments": {}}',
        separator=", ",
    ),
    "deepseekv32": golden(
        "deepseek-ai/DeepSeek-V3.2, chat template",
        "<｜DSML｜function_calls>\n@\n</｜DSML｜function_calls>",
        '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>',
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>',
        separator="\n",
        result="<result>R1</result>",
    ),
    "deepseekv3": golden(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B, chat template",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>@\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"get_weather\n```json\n{ARGUMENTS}",
        "now\n```json\n{}",
        separator="\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        result="<｜tool▁output▁begin｜>R1<｜tool▁output▁end｜>",
    ),
    "deepseekv31": golden(
        "deepseek-ai/DeepSeek-V3.1, chat template; the prompt: model card, section ToolCall",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>@<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"get_weather<｜tool▁sep｜>{ARGUMENTS}",
        "now<｜tool▁sep｜>{}",
        separator="<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
        result="<｜tool▁output▁begin｜>R1<｜tool▁output▁end｜>",
        prompt="## Tools\nYou have access to the following tools:\n\n### get_weather\nDescription: Get the weather.\n\n"
        'Parameters: {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}\n\n'
        '### now\nDescription: Get the time.\n\nParameters: {"type": "object", "properties": {}}\n\nIMPORTANT: ALWAYS '
        "adhere to this exact format for tool use:\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name"
        "<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>{{additional_tool_calls}}<｜tool▁calls▁end｜>\n\nWhere:\n\n"
        "- `tool_call_name` must be an exact match to one of the available tools\n- `tool_call_arguments` must be "
        "valid JSON that strictly follows the tool's Parameters Schema\n- For multiple tool calls, chain them directly "
        "without separators or spaces",
    ),
    "kimi_k2": golden(
        "moonshotai/Kimi-K2-Instruct, chat template",
        "<|tool_calls_section_begin|><|tool_call_begin|>@<|tool_call_end|><|tool_calls_section_end|>",
        f"functions.get_weather:0<|tool_call_argument_begin|>{ARGUMENTS}",
        "functions.now:1<|tool_call_argument_begin|>{}",
        separator="<|tool_call_end|><|tool_call_begin|>",
        result="## Return of get_weather\nR1",
    ),
    "glm": golden(
        "zai-org/GLM-4.6, chat template",
        "<tool_call>@\n</tool_call>",
        "get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>",
        "now",
        separator="\n</tool_call>\n<tool_call>",
        result="<tool_response>\nR1\n</tool_response>",
        prompt="# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
        "function signatures within <tools></tools> XML tags:\n<tools>\n" + "\n".join(FUNCTIONS) + "\n</tools>\n\n"
        "For each function call, output the function name and arguments within the following XML format:\n"
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
        "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>",
    ),
    "glm47": golden(
        "zai-org/GLM-4.7-Flash, chat template",
        "<tool_call>@</tool_call>",
        "get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key><arg_value>3</arg_value>",
        "now",
        separator="</tool_call><tool_call>",
        result="<tool_response>R1</tool_response>",
        prompt="# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
        "function signatures within <tools></tools> XML tags:\n<tools>\n" + "\n".join(FUNCTIONS) + "\n</tools>\n\n"
        "For each function call, output the function name and arguments within the following XML format:\n"
        "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
        "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>",
    ),
    "minimax-m2": golden(
        "MiniMaxAI/MiniMax-M2, chat template",
        "<minimax:tool_call>\n@\n</minimax:tool_call>",
        '<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>',
        '<invoke name="now">\n</invoke>',
        separator="\n",
        result="<response>R1</response>",
        prompt="# Tools\nYou may call one or more tools to assist with the user query.\nHere are the tools available "
        "in JSONSchema format:\n\n<tools>\n" + "\n".join(f"<tool>{tool}</tool>" for tool in BARE) + "\n</tools>\n"
        "\nWhen making tool calls, use XML format to invoke tools and pass parameters:\n\n<minimax:tool_call>\n"
        '<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1</parameter>\n'
        '<parameter name="param-key-2">param-value-2</parameter>\n...\n</invoke>\n</minimax:tool_call>',
    ),
    "step3": golden(
        "SGLang's step3 detector, whose description is the form",
        "<｜tool_calls_begin｜>\n@\n<｜tool_calls_end｜>",
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">\n'
        '<steptml:parameter name="city">Rome</steptml:parameter>\n<steptml:parameter name="days">3</steptml:parameter>'
        "\n</steptml:invoke><｜tool_call_end｜>",
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">\n</steptml:invoke><｜tool_call_end｜>',
        separator="\n",
    ),
    "apertus2509": golden(
        "swiss-ai/Apertus-8B-Instruct, chat template",
        "<|tools_prefix|>[@]<|tools_suffix|>",
        f'{{"get_weather": {ARGUMENTS}}}',
        '{"now": {}}',
        separator=", ",
    ),
    "interns1": golden(
        "SGLang's internlm detector, whose description is the form (with a space that decoding adds)",
        "<|action_start|><|plugin|>\n@<|action_end|>",
        f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
        '{"name": "now", "parameters": {}}',
        separator="<|action_end|><|action_start|><|plugin|>\n",
    ),
    "gpt-oss": golden(
        "OpenAI, harmony response format, section function calling",
        "<|channel|>commentary to=functions.@<|call|>",
        f"get_weather <|constrain|>json<|message|>{ARGUMENTS}",
        "now <|constrain|>json<|message|>{}",
        separator="<|call|><|start|>assistant<|channel|>commentary to=functions.",
    ),
}
UNSOURCED = {"json": "no model's own: bare JSON objects, under the name that SGLang's gateway gives such a parser"}

OWN_WORDS = (
    "You have access to these functions:\n\n" + "\n".join(BARE) + "\n\n"
    "To call functions, answer with nothing but the calls, in exactly this form:\n"
)
OWN_PROMPTS = {
    "json": "UNSOURCED",
    "mistral": "[AVAILABLE_TOOLS], which is a turn of its own",
    "deepseekv32": "a page of text that its template writes",
    "deepseekv3": "its template says nothing of tools",
    "kimi_k2": "a role of its own, tool_declare",
    "step3": "no template at hand",
    "apertus2509": "TypeScript in a role of its own",
    "interns1": "no template at hand",
    "gpt-oss": "TypeScript in a role of its own",
}
OTHER_PROMPTS = {
    "qwen3_coder": "tools as XML elements in the origin, as JSON here",
    "llama3": "held by its first words and its tools below: the origin has no space before 'Do not use variables'",
    "pythonic": "held by its first words and its tools below",
}


@pytest.mark.parametrize("name", [fmt.name for fmt in TOOL_FORMATS])
def test_every_tool_format_has_a_golden_text_or_a_reason(name: str) -> None:
    assert (name in GOLDEN) != (name in UNSOURCED)
    has_prompt = name in GOLDEN and GOLDEN[name].prompt is not None
    assert [has_prompt, name in OWN_PROMPTS, name in OTHER_PROMPTS].count(True) == 1
    assert tool_format(name).origin


@pytest.mark.parametrize("name", GOLDEN)
def test_calls_are_written_and_read_as_the_origin_has_them(name: str) -> None:
    fmt, text = tool_format(name), GOLDEN[name]
    assert fmt.render(CALLS) == text.calls
    assert fmt.render(CALLS[:1]) == text.single
    for written, expected in ((text.calls, CALLS), (text.single, CALLS[:1])):
        message = fmt.parse(written)
        assert [(call.name, json.loads(call.arguments)) for call in message.calls] == expected
        assert message.content == ""
    if text.result is not None:
        assert fmt.render_result("get_weather", "R1") == text.result


@pytest.mark.parametrize("name", [fmt.name for fmt in TOOL_FORMATS])
def test_the_prompt_is_that_of_the_origin_or_our_own(name: str) -> None:
    fmt = tool_format(name)
    prompt = fmt.tool_prompt(TOOLS, "a template without")
    assert prompt.template_kwargs == {}
    if name in OWN_PROMPTS:
        assert prompt.system == OWN_WORDS + fmt.render([("get_weather", {"city": "<city>"})])
    elif name in GOLDEN and GOLDEN[name].prompt is not None:
        assert prompt.system == GOLDEN[name].prompt


@pytest.mark.parametrize(
    ("name", "begin", "indent"),
    [
        (
            "llama3",
            "Given the following functions, please respond with a JSON for a function call with its proper arguments "
            'that best answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": '
            "dictionary of argument name and its value}. Do not use variables.\n\n",
            "\n\n".join(json.dumps(json.loads(tool), indent=4) for tool in FUNCTIONS),
        ),
        (
            "pythonic",
            "You are an expert in composing functions. You are given a question and a set of possible functions. ",
            json.dumps([json.loads(tool) for tool in BARE], indent=4),
        ),
        (
            "qwen3_coder",
            "# Tools\n\nYou have access to the following functions in JSONSchema format:\n\n<tools>\n",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n<city>\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_prompts_that_are_held_at_their_ends(name: str, begin: str, indent: str) -> None:
    text = tool_format(name).tool_prompt(TOOLS).system
    assert text.startswith(begin)
    assert text.endswith(indent)


# What the origins write beside the first form, with reasoning before it or ids in it, is read too.
ALSO = [
    (
        "gpt-oss",  # openai/gpt-oss-120b, chat template
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
    ),
    (
        "mistral",  # mistral-common, tekken tokenizer
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}]',
    ),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}"),  # SGLang's mistral detector
    (
        "interns1",  # SGLang's internlm detector
        f'<|action_start|> <|plugin|>\n{{"name": "get_weather", "parameters": {ARGUMENTS}}}<|action_end|>',
    ),
    (
        "qwen3_coder",  # stepfun-ai/Step-3.5-Flash, chat template
        GOLDEN["qwen3_coder"].single.replace("</tool_call>", "</tool_call>\n"),
    ),
]


@pytest.mark.parametrize(("name", "text"), ALSO)
def test_other_forms_of_the_origins_are_read(name: str, text: str) -> None:
    (call,) = tool_format(name).parse(text).calls
    assert (call.name, json.loads(call.arguments), call.complete) == (*CALLS[0], True)


# --- reasoning ---


class Thought(NamedTuple):
    """A message whose reasoning is `Hm.` and whose answer is `A.`, as the origin has it behind the end of a prompt.

    Args:
        tools: the tool format of the same models.
    """

    origin: str
    prompt: str
    text: str
    tools: str


THOUGHTS = {
    "qwen3": Thought(
        "Qwen/Qwen3-0.6B, chat template", "<|im_start|>assistant\n", "<think>\nHm.\n</think>\n\nA.", "hermes"
    ),
    "qwen3-thinking": Thought(
        "Qwen/QwQ-32B, chat template", "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nA.", "hermes"
    ),
    "deepseek-v3": Thought(
        "deepseek-ai/DeepSeek-V3.1, chat template", "<｜Assistant｜><think>", "Hm.</think>A.", "deepseekv31"
    ),
    "deepseek-r1": Thought(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B, chat template",
        "<｜Assistant｜><think>\n",
        "Hm.\n</think>\n\nA.",
        "deepseekv3",
    ),
    "glm45": Thought("zai-org/GLM-4.6, chat template", "<|assistant|>", "\n<think>Hm.</think>\nA.", "glm"),
    "step3": Thought(
        "stepfun-ai/Step-3.5-Flash, chat template", "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\nA.", "step3"
    ),
    "minimax": Thought("MiniMaxAI/MiniMax-M2, chat template", "]~b]ai\n<think>\n", "Hm.\n</think>\n\nA.", "minimax-m2"),
    "kimi": Thought("SGLang documentation, reasoning parser: Kimi", "", "◁think▷Hm.◁/think▷A.", "kimi_k2"),
    "kimi_k2": Thought(
        "moonshotai/Kimi-K2-Thinking, chat template",
        "<|im_assistant|>assistant<|im_middle|>",
        "<think>Hm.</think>A.",
        "kimi_k2",
    ),
    "apertus2509": Thought(
        "swiss-ai/Apertus-8B-Instruct, chat template",
        "<|assistant_start|>",
        "<|inner_prefix|>Hm.<|inner_suffix|>A.",
        "apertus2509",
    ),
    "mistral": Thought(
        "mistralai/Ministral-3-14B-Reasoning-2512, chat template", "[/INST]", "[THINK]Hm.[/THINK]A.", "mistral"
    ),
    "gpt-oss": Thought(
        "openai/gpt-oss-120b, chat template",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>A.<|return|>",
        "gpt-oss",
    ),
}


def test_every_reasoning_format_has_a_golden_text() -> None:
    assert set(THOUGHTS) == {fmt.name for fmt in REASONING_FORMATS}
    assert all(fmt.origin for fmt in REASONING_FORMATS)


@pytest.mark.parametrize("name", THOUGHTS)
def test_reasoning_is_read_as_the_origin_writes_it(name: str) -> None:
    prompt, text = THOUGHTS[name].prompt, THOUGHTS[name].text
    fmt, tools = reasoning_format(name), tool_format(THOUGHTS[name].tools)
    message = message_parser(reasoning=fmt, prompt=prompt).parse(text)
    assert (message.reasoning, message.content) == ("Hm.", "A.")
    # and with calls in the place of the answer, and behind it
    calls = GOLDEN[tools.name].calls
    with_answer = text if name != "gpt-oss" else text.replace("<|return|>", "<|end|><|start|>assistant")
    bare = text.replace("A.", "") if name != "gpt-oss" else text.partition("<|channel|>final")[0]
    for written, content in ((bare + calls, ""), (with_answer + calls, "A.")):
        message = tools.parser(TOOLS, fmt, prompt).parse(written)
        assert (message.reasoning, message.content) == ("Hm.", content)
        assert [(call.name, json.loads(call.arguments)) for call in message.calls] == CALLS
