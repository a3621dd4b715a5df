"""The known formats, as data.

Owns one description per format and nothing else. Names are those that SGLang's `--tool-call-parser` and
`--reasoning-parser` take; `aliases` are other names for the same text. Markers are as the models' chat templates and
model cards write them (`origin`); a test renders each from its own description and reads it back.
"""

# ruff: noqa: RUF001 - DeepSeek and Step write their markers with full-width bars
from __future__ import annotations

from sgl.grammars.formats.format import ToolFormat
from sgl.grammars.formats.shapes import Block, JsonCalls, NamedCalls, Prompt, PythonCalls, ReasoningFormat, TagCalls


def _told(result: str = Prompt("").result) -> Prompt:
    """In our own words, for formats whose models know their tools from the chat template alone."""
    return Prompt(
        "You have access to these functions:\n\n{tools}\n\n"
        "To call functions, answer with nothing but the calls, in exactly this form:\n{example}",
        tool="bare",
        result=result,
    )


_LIST = _told()

_QWEN = Prompt(
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_LLAMA3 = Prompt(
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
    'answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": dictionary of argument '
    "name and its value}. Do not use variables.\n\n{tools}",
    indent=4,
    separator="\n\n",
    result="{content}",
)
_PYTHONIC = Prompt(
    "You are an expert in composing functions. You are given a question and a set of possible functions. Based on the "
    "question, you will need to make one or more function/tool calls to achieve the purpose. If none of the functions "
    "can be used, point it out. If the given question lacks the parameters required by the function, also point it "
    "out. You should only return the function call in tools call sections.\n\nIf you decide to invoke any of the "
    "function(s), you MUST put it in the format of [func_name1(params_name1=params_value1, "
    "params_name2=params_value2...), func_name2(params)]\nYou SHOULD NOT include any other text in the response.\n\n"
    "Here is a list of functions in JSON format that you can invoke.\n\n{tools}",
    tool="bare",
    indent=4,
    as_list=True,
    result="{content}",
)
_DEEPSEEK31 = Prompt(
    "## Tools\nYou have access to the following tools:\n\n{tools}\n\n"
    "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>"
    "{{additional_tool_calls}}<｜tool▁calls▁end｜>\n\nWhere:\n\n"
    "- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
    "- For multiple tool calls, chain them directly without separators or spaces",
    tool="section",
    separator="\n\n",
    result="<｜tool▁output▁begin｜>{content}<｜tool▁output▁end｜>",
)
_GLM_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, output the function name and arguments within the following XML format:\n"
)
_GLM = Prompt(
    _GLM_TOOLS + "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
    "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>"
)
_GLM47 = Prompt(
    _GLM_TOOLS + "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>",
    result="<tool_response>{content}</tool_response>",
)
_CODER = Prompt(
    "# Tools\n\nYou have access to the following functions in JSONSchema format:\n\n<tools>\n{tools}\n</tools>\n\n"
    "To call functions, answer with nothing but the calls, in exactly this form:\n{example}"
)
_MINIMAX = Prompt(
    "# Tools\nYou may call one or more tools to assist with the user query.\n"
    "Here are the tools available in JSONSchema format:\n\n<tools>\n{tools}\n</tools>\n\n"
    "When making tool calls, use XML format to invoke tools and pass parameters:\n\n<minimax:tool_call>\n"
    '<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1</parameter>\n'
    '<parameter name="param-key-2">param-value-2</parameter>\n...\n</invoke>\n</minimax:tool_call>',
    tool="tagged",
    result="<response>{content}</response>",
)

_QWEN3_CODER = TagCalls(
    begin="<function=",
    name_end=">\n",
    key_begin="<parameter=",
    key_end=">\n",
    value_end="\n</parameter>\n",
    end="</function>",
)
_STEP3 = TagCalls(
    begin='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
    name_end='">\n',
    key_begin='<steptml:parameter name="',
    key_end='">',
    value_end="</steptml:parameter>\n",
    end="</steptml:invoke><｜tool_call_end｜>",
)
_GLM_BODY = TagCalls(
    name_end="\n",
    key_begin="<arg_key>",
    key_end="</arg_key>\n",
    value_begin="<arg_value>",
    value_end="</arg_value>\n",
)
_DSML = TagCalls(
    begin='<｜DSML｜invoke name="',
    name_end='">\n',
    key_begin='<｜DSML｜parameter name="',
    key_end='" string="true">',
    other_key_end='" string="false">',
    value_end="</｜DSML｜parameter>\n",
    end="</｜DSML｜invoke>",
)
_HARMONY = NamedCalls(name_end=" <|constrain|>json<|message|>", name_mark="<|message|>")

_HARMONY_REASONING = ReasoningFormat(
    name="gpt-oss",
    origin="OpenAI, harmony response format",
    begin=("<|channel|>analysis<|message|>",),
    end=("<|end|>",),
    silent=(
        "<|start|>assistant",
        "<|channel|>final<|message|>",
        "<|channel|>commentary<|message|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
    ),
    switch="reasoning_effort",
    clues=(("<|channel|>", "analysis"),),
)

TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        name="hermes",
        origin="NousResearch/Hermes-Function-Calling, README; prompt of Qwen/Qwen2.5-7B-Instruct, chat template",
        blocks=(Block(JsonCalls(), "<tool_call>\n", "\n</tool_call>", separator="\n"),),
        prompt=_QWEN,
        aliases=("qwen", "qwen25", "qwen3"),
        clues=(('"name": <function-name>, "arguments": <args-json-object>',), ("<tool_call>", "tool_call.arguments")),
    ),
    ToolFormat(
        name="qwen3_coder",
        origin="Qwen/Qwen3-Coder-30B-A3B-Instruct, chat_template.jinja",
        blocks=(
            Block(_QWEN3_CODER, "<tool_call>\n", "\n</tool_call>", separator="\n"),
            Block(_QWEN3_CODER, end="\n</tool_call>"),
        ),
        prompt=_CODER,
        aliases=("xml", "mimo", "step3p5", "nemotron_3"),
        clues=(("<function=", "<parameter="),),
    ),
    ToolFormat(
        name="llama3",
        origin="meta-llama/llama-models, models/llama3_1/prompt_format.md",
        blocks=(
            Block(JsonCalls(arguments_key="parameters"), also=("<|python_tag|>",), separator="; "),
            Block(NamedCalls(begin="<function=", name_end=">", end="</function>")),
        ),
        prompt=_LLAMA3,
        aliases=("llama",),
        clues=(('{"name": function name, "parameters": dictionary',),),
    ),
    ToolFormat(
        name="json",
        origin="SGLang gateway documentation, tool call parsing, by name; bare JSON objects are our own form",
        blocks=(Block(JsonCalls(), separator="\n"),),
        prompt=_LIST,
    ),
    ToolFormat(
        name="pythonic",
        origin="meta-llama/llama-models, models/llama3_2/text_prompt_format.md and models/llama4/prompt_format.md",
        blocks=(
            Block(PythonCalls(), separator=", ", encloses_all=True),
            Block(PythonCalls(), "<|python_start|>", "<|python_end|>", separator=", ", encloses_all=True),
        ),
        prompt=_PYTHONIC,
        aliases=("llama4", "python"),
        clues=(("<|python_start|>",), ("[func_name1(params_name1=params_value1",)),
    ),
    ToolFormat(
        name="lfm2",
        origin="LiquidAI/LFM2-1.2B, model card, tool use",
        blocks=(Block(PythonCalls(), "<|tool_call_start|>", "<|tool_call_end|>", separator=", ", encloses_all=True),),
        prompt=Prompt(
            "List of tools: <|tool_list_start|>[{tools}]<|tool_list_end|>",
            tool="bare",
            separator=", ",
            result="<|tool_response_start|>{content}<|tool_response_end|>",
        ),
        clues=(("<|tool_list_start|>",),),
    ),
    ToolFormat(
        name="mistral",
        origin="mistralai/mistral-common, instruct tokenizers v3 and v11",
        blocks=(
            Block(JsonCalls(is_list=True), "[TOOL_CALLS] ", separator=", ", encloses_all=True),
            Block(NamedCalls(name_end="[ARGS]"), "[TOOL_CALLS]"),
        ),
        prompt=_LIST,
        clues=(("[TOOL_CALLS]",),),
    ),
    ToolFormat(
        name="deepseekv32",
        origin="deepseek-ai/DeepSeek-V3.2, encoding/README",
        blocks=(
            Block(
                _DSML,
                "<｜DSML｜function_calls>\n",
                "\n</｜DSML｜function_calls>",
                also=("<｜DSML｜tool_calls>",),
                separator="\n",
                encloses_all=True,
            ),
        ),
        prompt=_told("<result>{content}</result>"),
        clues=(("｜DSML｜",),),
    ),
    ToolFormat(
        name="deepseekv3",
        origin="deepseek-ai/DeepSeek-V3-0324 and DeepSeek-R1-Distill-Qwen-32B, chat templates",
        blocks=(
            Block(
                NamedCalls(
                    begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                    name_end="\n```json\n",
                    end="\n```<｜tool▁call▁end｜>",
                ),
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                separator="\n",
                encloses_all=True,
            ),
        ),
        prompt=_told("<｜tool▁output▁begin｜>{content}<｜tool▁output▁end｜>"),
        clues=(("<｜tool▁sep｜>", "```json"),),
    ),
    ToolFormat(
        name="deepseekv31",
        origin="deepseek-ai/DeepSeek-V3.1, model card, ToolCall",
        blocks=(
            Block(
                NamedCalls(begin="<｜tool▁call▁begin｜>", name_end="<｜tool▁sep｜>", end="<｜tool▁call▁end｜>"),
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                encloses_all=True,
            ),
        ),
        prompt=_DEEPSEEK31,
        clues=(("<｜tool▁sep｜>",),),
    ),
    ToolFormat(
        name="kimi_k2",
        origin="moonshotai/Kimi-K2-Instruct, docs/tool_call_guidance.md",
        blocks=(
            Block(
                NamedCalls(
                    begin="<|tool_call_begin|>",
                    header="functions.{name}:{index}",
                    name_end="<|tool_call_argument_begin|>",
                    end="<|tool_call_end|>",
                ),
                "<|tool_calls_section_begin|>",
                "<|tool_calls_section_end|>",
                encloses_all=True,
            ),
        ),
        prompt=_told("## Return of {name}\n{content}"),
        clues=(("<|tool_calls_section_begin|>",),),
    ),
    ToolFormat(
        name="glm",
        origin="zai-org/GLM-4.6, chat_template.jinja",
        blocks=(Block(_GLM_BODY, "<tool_call>", "</tool_call>", separator="\n"),),
        prompt=_GLM,
        aliases=("glm45",),
        clues=(("<arg_key>", "\\n<arg_key>"), ("<arg_key>", "</arg_key>\\n")),
    ),
    ToolFormat(
        name="glm47",
        origin="zai-org/GLM-4.7, chat_template.jinja",
        blocks=(
            Block(
                TagCalls(
                    name_end="",
                    key_begin="<arg_key>",
                    key_end="</arg_key>",
                    value_begin="<arg_value>",
                    value_end="</arg_value>",
                ),
                "<tool_call>",
                "</tool_call>",
            ),
        ),
        prompt=_GLM47,
        clues=(("<arg_key>",),),
    ),
    ToolFormat(
        name="minimax-m2",
        origin="MiniMaxAI/MiniMax-M2, docs/tool_calling_guide.md",
        blocks=(
            Block(
                TagCalls(
                    begin='<invoke name="',
                    name_end='">\n',
                    key_begin='<parameter name="',
                    key_end='">',
                    value_end="</parameter>\n",
                    end="</invoke>",
                ),
                "<minimax:tool_call>\n",
                "\n</minimax:tool_call>",
                separator="\n",
                encloses_all=True,
            ),
        ),
        prompt=_MINIMAX,
        aliases=("minimax",),
        clues=(("<minimax:tool_call>",),),
    ),
    ToolFormat(
        name="step3",
        origin="stepfun-ai/step3, as SGLang's step3 detector describes it",
        blocks=(
            Block(_STEP3, "<｜tool_calls_begin｜>\n", "\n<｜tool_calls_end｜>", separator="\n", encloses_all=True),
        ),
        prompt=_LIST,
        clues=(("steptml",),),
    ),
    ToolFormat(
        name="apertus2509",
        origin="swiss-ai/Apertus-8B-Instruct-2509, chat_template.jinja",
        blocks=(
            Block(
                JsonCalls(name_key="", arguments_key="", is_list=True),
                "<|tools_prefix|>",
                "<|tools_suffix|>",
                separator=", ",
                encloses_all=True,
            ),
        ),
        prompt=_LIST,
        clues=(("<|tools_prefix|>",),),
    ),
    ToolFormat(
        name="interns1",
        origin="internlm/Intern-S1, as SGLang's internlm detector describes it",
        blocks=(
            Block(
                JsonCalls(arguments_key="parameters"),
                "<|action_start|><|plugin|>\n",
                "<|action_end|>",
                also=("<|action_start|> <|plugin|>",),
            ),
        ),
        prompt=_LIST,
        clues=(("<|plugin|>",),),
    ),
    ToolFormat(
        name="gpt-oss",
        origin="OpenAI, harmony response format",
        blocks=(
            Block(
                _HARMONY,
                "<|channel|>commentary to=functions.",
                "<|call|>",
                also=(
                    "<|channel|>analysis to=functions.",
                    "<|start|>assistant to=functions.",
                    "<|start|>assistant<|channel|>commentary to=functions.",
                    "<|start|>assistant<|channel|>analysis to=functions.",
                ),
                separator="<|start|>assistant",
                end_is_eos=True,
            ),
        ),
        prompt=_LIST,
        parallel=False,
        lead="<|start|>assistant",
        answer="<|channel|>final<|message|>",
        reasoning=_HARMONY_REASONING,
        clues=(("<|channel|>", "<|constrain|>"), ("<|channel|>", "to=functions.")),
    ),
)

_QWEN_EXCLUDES = ("<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")

REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(
        name="qwen3",
        origin="Qwen/Qwen3-0.6B, chat template",
        begin=("<think>",),
        end=("</think>",),
        excludes=_QWEN_EXCLUDES,
        switch="enable_thinking",
        clues=(("<think>", "enable_thinking", "<|im_start|>"),),
        aliases=("interns1", "nemotron_3", "mimo"),
    ),
    ReasoningFormat(
        name="qwen3-thinking",
        origin="Qwen/QwQ-32B, chat template, and Qwen/Qwen3-235B-A22B-Thinking-2507, model card",
        begin=("<think>",),
        end=("</think>",),
        starts_inside=True,
        excludes=_QWEN_EXCLUDES,
        clues=(("assistant\\n<think>\\n", "<|im_start|>"),),
    ),
    ReasoningFormat(
        name="deepseek-v3",
        origin="deepseek-ai/DeepSeek-V3.1, chat template",
        begin=("<think>",),
        end=("</think>",),
        switch="thinking",
        clues=(("thinking", "<｜Assistant｜>", "</think>", "message['prefix']"), ("thinking", "｜DSML｜")),
    ),
    ReasoningFormat(
        name="deepseek-r1",
        origin="deepseek-ai/DeepSeek-R1-Distill-Qwen-32B, chat template",
        begin=("<think>",),
        end=("</think>",),
        starts_inside=True,
        clues=(("<｜Assistant｜>", "</think>"),),
    ),
    ReasoningFormat(
        name="glm45",
        origin="zai-org/GLM-4.6, chat_template.jinja",
        begin=("<think>",),
        end=("</think>",),
        switch="enable_thinking",
        excludes=("<tool_call>", "</tool_call>"),
        clues=(("<think>", "<|assistant|>", "[gMASK]"),),
    ),
    ReasoningFormat(
        name="step3",
        origin="stepfun-ai/Step-3.5-Flash, chat_template.jinja",
        begin=("<think>",),
        end=("</think>",),
        starts_inside=True,
        clues=(("<think>", "steptml"),),
        aliases=("step3p5",),
    ),
    ReasoningFormat(
        name="minimax",
        origin="MiniMaxAI/MiniMax-M2, chat_template.jinja",
        begin=("<think>",),
        end=("</think>",),
        starts_inside=True,
        clues=(("<think>", "minimax:tool_call"),),
        aliases=("minimax-m2",),
    ),
    ReasoningFormat(
        name="kimi",
        origin="moonshotai/Kimi-VL-A3B-Thinking; SGLang documentation, reasoning parser",
        begin=("◁think▷",),
        end=("◁/think▷",),
        clues=(("◁think▷",), ("◁/think▷",)),
    ),
    ReasoningFormat(
        name="kimi_k2",
        origin="moonshotai/Kimi-K2-Thinking, chat_template.jinja; SGLang documentation, reasoning parser",
        begin=("<think>", "◁think▷"),
        end=("</think>", "◁/think▷"),
        calls_end_it=True,
        clues=(("<think>", "<|im_middle|>"),),
    ),
    ReasoningFormat(
        name="apertus2509",
        origin="swiss-ai/Apertus-8B-Instruct-2509, chat_template.jinja",
        begin=("<|inner_prefix|>",),
        end=("<|inner_suffix|>",),
        calls_end_it=True,
        switch="enable_thinking",
        clues=(("<|inner_prefix|>",),),
    ),
    ReasoningFormat(
        name="mistral",
        origin="mistralai/Ministral-3-14B-Reasoning-2512, chat_template.jinja",
        begin=("[THINK]",),
        end=("[/THINK]",),
        clues=(("[THINK]",),),
    ),
    _HARMONY_REASONING,
)
