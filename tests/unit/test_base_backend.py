"""Backends of one's own, by the methods that SGLang's have; chat templates by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import sgl
from sgl.errors import ConfigError, InternalError, Unsupported
from sgl.lang.chat_template import (
    ChatTemplate,
    get_chat_template,
    get_chat_template_by_model_path,
    register_chat_template,
    register_chat_template_matching_function,
)
from sgl.lang.choices import ChoicesDecision

TAGS = ChatTemplate(
    "tags", "Be kind.", {"system": ("<s>", "</s>"), "user": ("<u>", "</u>"), "assistant": ("<a>", "</a>")}, ("</a>",)
)


class Parrot(sgl.BaseBackend):
    """Says how long its prompt is; keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.chat_template = TAGS
        self.seen: list[tuple[str, Any, Any]] = []

    def generate(self, s: Any, sampling_params: Any) -> tuple[str, dict[str, Any]]:
        self.seen.append(("generate", s, sampling_params))
        return f"{len(s.text_)} chars.</a> and more", {"prompt_tokens": 7, "completion_tokens": 2}

    def generate_stream(self, s: Any, sampling_params: Any) -> Any:
        for piece in ("a ", "b ", "c"):
            yield piece, {}

    def select(self, s: Any, choices: Any, temperature: Any, choices_method: Any = None) -> ChoicesDecision:
        self.seen.append(("select", s, choices_method))
        return ChoicesDecision(choices[-1], {"normalized_prompt_logprobs": [-2.0, -1.0]})

    def commit_lazy_operations(self, s: Any) -> None:
        self.seen.append(("commit", s, None))

    def cache_prefix(self, prefix_str: str) -> None:
        self.seen.append(("cache", prefix_str, None))

    def end_program(self, s: Any) -> None:
        self.seen.append(("end", s, None))


@sgl.function
def chat(s, question):
    s += sgl.user(question) + sgl.assistant(sgl.gen("answer", max_tokens=9, regex=".*"))
    forks = s.fork(2)
    forks += sgl.user("Which?") + sgl.assistant(sgl.select("which", ["tea", "cocoa"]))
    forks.join()


def test_methods_are_asked_with_the_state_of_a_branch():
    backend = Parrot()
    state = chat.run("Hi", backend=backend)
    prompt = "<s>Be kind.</s><u>Hi</u><a>"
    assert state["answer"] == f"{len(prompt)} chars.", "up to the template's own stop"
    assert state.text() == f"{prompt}{state['answer']}</a>"
    assert (state["which"], state.usage.prompt_tokens) == (["cocoa", "cocoa"], 7)
    assert state.get_meta_info("which")[0]["scores"] == {"tea": -2.0, "cocoa": -1.0}
    kinds = [kind for kind, _, _ in backend.seen]
    assert kinds == ["generate", "commit", "select", "select", "end"]
    _, view, params = backend.seen[0]
    assert (view.text_, view.cur_role) == (prompt, "assistant")
    assert view.messages_ == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert (params.max_new_tokens, params.regex, params.stop) == (9, ".*", ["</a>"])


def test_streams_prefixes_and_what_is_not_defined():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("y")

    backend = Parrot()
    state = program.run(backend=backend, stream=True)
    assert list(state.text_iter("y")) == ["a ", "b ", "c"]
    program.cache(backend)
    assert ("cache", "x", None) in backend.seen
    with pytest.raises(Unsupported, match="define generate") as caught:
        program.run(backend=sgl.BaseBackend())
    assert caught.value.location.function == "program"


def test_what_a_method_raises_ends_its_program_with_the_line():
    class Broken(sgl.BaseBackend):
        def generate(self, s: Any, sampling_params: Any) -> Any:
            raise ZeroDivisionError("oh")

    with pytest.raises(InternalError, match="ZeroDivisionError: oh") as caught:
        chat.run("Hi", backend=Broken())
    assert caught.value.location.function == "chat"


def test_templates_by_name_and_by_model():
    register_chat_template(TAGS)
    assert get_chat_template("tags") is TAGS

    @register_chat_template_matching_function
    def found(path: str) -> str | None:
        return "tags" if "parrot" in path else None

    assert get_chat_template_by_model_path("x/parrot-7b") is TAGS
    with pytest.raises(ConfigError, match=r"expected one of .*, tags"):
        get_chat_template("tag")
    with pytest.raises(ConfigError, match="no chat template is known"):
        get_chat_template_by_model_path("x/owl")
    with pytest.raises(ConfigError, match="no role 'tool'"):
        TAGS.begin("tool")


def test_vertex_and_crusoe_are_asked_through_their_clients(monkeypatch: pytest.MonkeyPatch):
    asked: list[dict[str, Any]] = []

    def completion(**fields: Any) -> Any:
        asked.append(fields)
        message = SimpleNamespace(content="hot", tool_calls=None)
        choice = SimpleNamespace(message=message, finish_reason="stop", logprobs=None)
        return SimpleNamespace(choices=[choice], usage=None)

    @sgl.function
    def program(s):
        s += sgl.user("Tea?") + sgl.assistant(sgl.gen("x"))

    monkeypatch.setitem(__import__("sys").modules, "litellm", SimpleNamespace(completion=completion))
    monkeypatch.delenv("GCP_PROJECT_ID", raising=False)
    with pytest.raises(ConfigError, match="needs a project"):
        sgl.VertexAI("gemini")
    monkeypatch.setenv("GCP_PROJECT_ID", "p")
    with sgl.VertexAI("gemini", safety_settings=[1]) as backend:
        assert program.run(backend=backend)["x"] == "hot"
    told = {name: asked[0][name] for name in ("model", "vertex_project", "safety_settings")}
    assert told == {"model": "vertex_ai/gemini", "vertex_project": "p", "safety_settings": [1]}
    monkeypatch.delenv("CRUSOE_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="needs a key"):
        sgl.Crusoe("llama")
