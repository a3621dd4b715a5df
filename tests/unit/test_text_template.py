"""Chat templates: byte-equal with transformers, and harmless when hostile."""

from __future__ import annotations

from typing import Any

import pytest

from sgl.errors import InvalidProgram, UnsupportedModel
from sgl.runtime.text import template as module
from sgl.runtime.text.template import ChatTemplate

TEMPLATES = {
    "chatml": """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nBe kind<|im_end|>\\n' }}{% endif %}
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "llama3": """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' ~ message.content | trim ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    "inst": """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}""",
    "trimming": """{% for message in messages %}
  {%- if message.content is string and loop.index > 0 %}
### {{ message.role | capitalize }}: {{ message.content.strip() }}
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}### Assistant:{% endif %}""",
    "reasoning": """{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
  {%- set index = (messages|length - 1) - loop.index0 %}
  {%- if message.role == 'user' %}{%- set ns.last = index %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- set content = message.content %}
  {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
  {%- endif %}
  {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools %}{{- tools | tojson(indent=2) }}{%- endif %}
{%- for one, two in [('a', 'b')] recursive %}{{- one ~ two ~ loop.last ~ loop.length }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
}
CHAT = [
    {"role": "user", "content": " Hi \n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello "},
    {"role": "user", "content": "<b>&'\"</b> é"},
]
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation_prompt", [False, True])
def test_equal_with_transformers(name: str, generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tools = [{"name": "añ", "parameters": {"type": "object"}}]
    for messages in (CHAT, CHAT[:1], CHAT[:2]):
        expected, _ = render_jinja_template(
            conversations=[messages],
            chat_template=TEMPLATES[name],
            add_generation_prompt=generation_prompt,
            tools=tools,
            **SPECIALS,
        )
        template = ChatTemplate(TEMPLATES[name], SPECIALS)
        assert template.render(messages, generation_prompt, tools=tools) == expected[0]


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(CHAT, **variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ '{0.__class__}'.format(messages) }}{{ messages.clear() }}",
    ],
)
def test_sandbox(source: str) -> None:
    with pytest.raises((UnsupportedModel, InvalidProgram)):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10**12 }}",
        "{{ [1] * 10**12 }}",
        "{{ 2 ** (2 ** 40) }}",
        "{{ 'x'.ljust(10**12) }}",
        "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
        "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}",
        "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    ],
)
def test_budget(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STEPS", 100_000)
    with pytest.raises(InvalidProgram, match="does too much"):
        render(source)


def test_refusal_and_syntax_errors() -> None:
    with pytest.raises(InvalidProgram, match="roles must alternate"):
        ChatTemplate(TEMPLATES["inst"], SPECIALS).render(CHAT[1:])
    with pytest.raises(UnsupportedModel, match="does not compile"):
        ChatTemplate("{% for %}")
