"""Variables for the chat template: from a run to the template, and no further."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import sgl
from sgl.errors import InvalidParameter
from sgl.lang.graph import ProgramOptions, check_template_kwargs
from sgl.runtime.rendering import ModelRenderer
from sgl.runtime.text.template import ChatTemplate
from sgl.runtime.text.tokenizer import Tokenizer

THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{{ note }}{% endif %}"
)


def renderer() -> ModelRenderer:
    tokenizer = copy.copy(Tokenizer.toy())
    tokenizer.chat_template = ChatTemplate(THINKING)
    return ModelRenderer("thinker", tokenizer)


def prompt(**variables: Any) -> tuple[str, list[int]]:
    state = renderer().state(template_kwargs=variables)
    state.begin("user")
    state.add_text("Hi")
    state.end()
    state.copy().begin("assistant")
    state.begin("assistant")
    state.flush()
    return state.text, state.ids


def test_the_template_reads_them() -> None:
    plain, _ = prompt()
    assert prompt(enable_thinking=True)[0] == prompt(unknown={"a": [1]})[0] == plain
    assert prompt(enable_thinking=False)[0] == plain + "<think></think>"


def test_special_tokens_in_them_are_plain_text() -> None:
    plain, ids = prompt()
    text, told = prompt(note="<|im_end|>\ue000")
    assert text == plain + "<|im_end|>\ue000"
    assert told[: len(ids)] == ids
    assert bytes(told[len(ids) :]).decode() == "<|im_end|>\ue000"


@sgl.function
def ask(s: sgl.ProgramState) -> None:
    s += sgl.user("Hi")
    s += sgl.assistant(sgl.gen("answer"))


class Thinker(sgl.MockBackend):
    def renderer(self) -> ModelRenderer:
        return renderer()


def test_every_run_takes_them() -> None:
    backend = Thinker(["x"] * 6)
    given = {"chat_template_kwargs": {"enable_thinking": False}}
    ask.run(backend=backend, **given)
    ask.run_batch([{}], backend=backend, **given)
    ask.compile().run(backend=backend, **given)
    ask.compile().run_batch([{}], backend=backend, **given)
    ask.run(backend=backend)
    prompts = [text for _, text in backend.prompts]
    assert [text.endswith("<think></think>") for text in prompts] == [True] * 4 + [False]


@pytest.mark.parametrize(
    "given",
    [
        "enable_thinking",
        [],
        {"messages": []},
        {"tools": []},
        {"bos_token": "x"},
        {"chat_template": "{{ 1 }}"},
        {"add_generation_prompt": False},
        {"a b": 1},
        {1: 2},
        {"a": object()},
        {"a": "x" * 20_000},
    ],
)
def test_what_is_refused(given: Any) -> None:
    with pytest.raises(InvalidParameter, match="chat_template_kwargs"):
        ProgramOptions(chat_template_kwargs=given)
    with pytest.raises(InvalidParameter, match="chat_template_kwargs"):
        check_template_kwargs(given)
    with pytest.raises(InvalidParameter, match="chat_template_kwargs"):
        ask.run(backend=sgl.MockBackend(["x"]), chat_template_kwargs=given)
