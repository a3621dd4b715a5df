"""Programs on endpoints: official clients against a server on the loopback, and what is refused before it is sent."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from support.backend_conformance import BackendConformance
from support.fake_api import FakeApi, prompt_of, serving

import sgl
from sgl.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    GenerationError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RemoteError,
    SglError,
    Unsupported,
)

pytest.importorskip("openai", reason="the extra openai is not installed")


def counting(prompt: str) -> str:
    """As many words as anybody wants."""
    return " ".join(f"w{i}" for i in range(500))


def openai(api: FakeApi, model: str = "gpt-test", **given: Any) -> sgl.OpenAI:
    given = {"api_key": "none", "max_retries": 0, "timeout": 20.0, "base_url": api.url + "/v1", **given}
    return sgl.OpenAI(model, **given)


class TestCompletions(BackendConformance):
    has_handles = True

    @pytest.fixture
    def backend(self) -> Iterator[sgl.OpenAI]:
        able = {"sampling": ("ignore_eos",)}  # as servers have it that run models of one's own
        with serving(counting) as api, openai(api, "test-instruct", capabilities=able) as backend:
            yield backend


# --- chat ---


@sgl.function
def chat(s, question):
    s += sgl.system("Be brief.") + sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", stop=["."], temperature=0, max_tokens=20))
    s += sgl.user("Sure?") + sgl.assistant(sgl.gen("sure", max_tokens=2, temperature=0.5, top_p=0.9, seed=7))


def tea(prompt: str) -> str:
    return "Yes I am sure of it" if prompt.endswith("Sure?") else "Tea is hot. Always."


def test_a_chat_is_sent_as_turns():
    with serving(tea) as api, openai(api) as backend:
        state = chat.run("What is tea?", backend=backend)
    assert (state["answer"], state["sure"]) == ("Tea is hot", "Yes I")
    assert state.get_meta_info("sure")["finish_reason"] == {"type": "length", "length": 0}
    first, second = api.bodies
    assert first["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is tea?"},
    ]
    assert (first["stop"], first["max_tokens"], first["temperature"]) == (["."], 20, 0)
    assert [m["content"] for m in second["messages"]][2:] == ["Tea is hot", "Sure?"]
    assert (second["seed"], second["top_p"]) == (7, 0.9)
    meta = state.get_meta_info("answer")
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (5, 2, 3)
    assert meta["reasoning_tokens"] == 1


def test_streams_come_in_pieces():
    with serving(tea) as api, openai(api) as backend:
        state = chat.run("What is tea?", backend=backend, stream=True)
        assert list(state.text_iter("answer")) == ["Tea", " is", " hot"]
        assert state["sure"] == "Yes I"
        assert all(body["stream"] for body in api.bodies)


@pytest.mark.parametrize("model", ["gpt-test", "test-instruct"])
def test_log_probabilities_are_asked_for(model: str):
    @sgl.function
    def program(s):
        s += sgl.user("Count.")
        s += sgl.assistant(sgl.gen("n", max_tokens=3, return_logprob=True, top_logprobs_num=2))

    with serving(counting) as api, openai(api, model, chat_template="chatml") as backend:
        meta = program.run(backend=backend).get_meta_info("n")
    assert [entry[0] for entry in meta["output_token_logprobs"]] == [-0.1] * 3
    assert api.bodies[0].get("top_logprobs", api.bodies[0]["logprobs"]) == 2


def test_stops_that_the_endpoint_does_not_take_are_found_here():
    @sgl.function
    def program(s):
        s += sgl.user("Count.") + sgl.assistant(sgl.gen("n", stop_regex="w1[0-9]", no_stop_trim=True))

    with serving(counting) as api, openai(api) as backend:
        state = program.run(backend=backend)
    assert state["n"].endswith("w9 w10")
    assert state.get_meta_info("n")["finish_reason"]["matched"] == "w10"
    assert "stop" not in api.bodies[0]


def test_images_are_parts_in_their_order():
    @sgl.function
    def program(s):
        s += sgl.user("First " + sgl.image(b"\x89PNG1") + " then " + sgl.image(b"\xff\xd82"))
        s += sgl.assistant(sgl.gen("what", max_tokens=1))

    with serving(counting) as api, openai(api) as backend:
        program.run(backend=backend)
        with pytest.raises(Unsupported, match="takes no video part"):
            videos.run(backend=backend)
    kinds = [(part["type"], part.get("text")) for part in api.bodies[0]["messages"][0]["content"]]
    assert kinds == [("text", "First "), ("image_url", None), ("text", " then "), ("image_url", None)]
    assert api.bodies[0]["messages"][0]["content"][3]["image_url"]["url"].startswith("data:image/jpeg;base64,")


@sgl.function
def videos(s):
    s += sgl.user(sgl.video(b"....", 4)) + sgl.assistant(sgl.gen("what", max_tokens=1))


# --- selects ---


@sgl.function
def pick(s):
    s += sgl.user("Which?") + sgl.assistant(sgl.select("which", ["tea", "coffee"]))


@sgl.function
def alike(s):
    s += sgl.user("Which?") + sgl.assistant(sgl.select("which", ["tea with milk", "tea with lemon"]))


def test_select_by_probable_first_tokens():
    def top(prompt: str) -> dict[str, float]:
        return {"cof": -0.3, "te": -1.5, "tea": -3.0, "the": -4.0}

    with serving(counting, top) as api, openai(api) as backend:
        state = pick.run(backend=backend)
    assert state["which"] == "coffee"
    assert state.probabilities("which")["coffee"] == pytest.approx(0.741 / (0.741 + 0.223 + 0.0498), rel=1e-2)
    assert (api.bodies[0]["max_tokens"], api.bodies[0]["top_logprobs"]) == (1, 20)


def test_select_by_an_answer_that_has_to_be_an_option():
    with serving(lambda prompt: "tea with lemon") as api, openai(api) as backend:
        state = alike.run(backend=backend)
    assert (state["which"], state.probabilities("which")["tea with lemon"]) == ("tea with lemon", 1.0)
    assert api.bodies[-1]["response_format"]["json_schema"]["strict"] is True


def test_a_generation_of_one_of_some_texts_is_a_select():
    @sgl.function
    def program(s):
        s += sgl.user("Which?") + sgl.assistant(sgl.gen("which", type=Literal["tea", "coffee"], temperature=0))

    with serving(counting, lambda prompt: {"cof": -0.3, "tea": -1.5}) as api, openai(api) as backend:
        assert program.run(backend=backend)["which"] == "coffee"


def test_select_without_any_means_is_unsupported():
    with serving(counting) as api, openai(api, capabilities={"top_logprobs": 0, "json_schema": False}) as backend:
        with pytest.raises(Unsupported, match="cannot take one of the options of 'which'") as caught:
            pick.run(backend=backend)
        assert caught.value.location.function == "pick"
    assert api.requests == []


@pytest.mark.parametrize("method", ["token_length_normalized", "unconditional_likelihood_normalized"])
def test_select_by_scores_of_strings(method: str):
    @sgl.function
    def program(s):
        s += "The best is" + sgl.select("which", [" something else", " it"], choices_method=method)

    with serving(counting) as api, openai(api, "test-instruct") as backend:
        state = program.run(backend=backend)
    scores = state.get_meta_info("which")["scores"]
    expected = -0.65 if method == "token_length_normalized" else -0.45  # nothing predicts the first token alone
    assert state["which"] == " it"
    assert scores == {" something else": pytest.approx(expected), " it": pytest.approx(-0.2)}
    assert len(api.requests) == (1 if method == "token_length_normalized" else 2)


# --- what is refused ---


def case(body: Any, name: str) -> sgl.SglFunction:
    body.__name__ = name
    return sgl.function(body)


def outside(s):
    s += "No turn " + sgl.gen("x")


def behind(s):
    s += sgl.user("Hi") + sgl.assistant("So: " + sgl.gen("x"))


def in_user(s):
    s += sgl.user("Hi" + sgl.gen("x"))


def regex(s):
    s += sgl.user("Hi") + sgl.assistant(sgl.gen("x", regex="[a-z]+"))


def biased(s):
    s += sgl.user("Hi") + sgl.assistant(sgl.gen("x", top_k=5))


def hot(s):
    s += sgl.user("Hi") + sgl.assistant(sgl.gen("x", temperature=3.0))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (outside, "text outside of them"),
        (behind, "cannot continue an assistant turn"),
        (in_user, "stands in a user turn"),
        (regex, "cannot hold a generation to a Regex"),
        (biased, "takes no top_k"),
        (hot, "temperatures up to 2"),
    ],
)
def test_what_an_endpoint_cannot_do_is_refused_with_its_line(body: Any, message: str):
    with serving(counting) as api, openai(api) as backend:
        with pytest.raises(Unsupported, match=message) as caught:
            case(body, body.__name__).run(backend=backend)
        assert caught.value.location.function == body.__name__
        assert api.requests == []


def test_declared_capabilities_are_used():
    able = {"regex": True, "prefill": True, "sampling": ("top_k",)}
    with serving(counting) as api, openai(api, capabilities=able) as backend:
        for body in (regex, behind, biased):
            case(body, body.__name__).run(backend=backend)
    assert api.bodies[0]["regex"] == "[a-z]+"
    assert api.bodies[1]["continue_final_message"] is True
    assert api.bodies[1]["messages"][-1] == {"role": "assistant", "content": "So: "}
    assert api.bodies[2]["top_k"] == 5
    with pytest.raises(ConfigError, match="did you mean 'prefill'"):
        openai(api, capabilities={"prefil": True})


def test_template_variables_go_to_who_takes_them():
    given = {"chat_template_kwargs": {"enable_thinking": False}}
    with serving(counting) as api, openai(api, capabilities={"chat_template_kwargs": True}) as backend:
        chat.run("?", backend=backend, **given)
        assert api.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
    with serving(counting) as api, openai(api) as backend:
        with pytest.raises(Unsupported, match="chat_template_kwargs"):
            chat.run("?", backend=backend, **given)
        assert api.requests == []


def test_turns_of_a_completion_model_need_a_template():
    with serving(counting) as api:
        with openai(api, "test-instruct") as backend, pytest.raises(Unsupported, match="no chat_template says"):
            chat.run("x", backend=backend)
        with openai(api, "test-instruct", chat_template="plain") as backend:
            chat.run("x", backend=backend)
        assert prompt_of(api.bodies[0]) == "SYSTEM: Be brief.\nUSER: x\nASSISTANT: "
        with pytest.raises(ConfigError, match="expected one of chatml, default, plain"):
            openai(api, "test-instruct", chat_template="plane")


# --- failure ---


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [(401, RemoteError, False), (404, ModelNotFound, None), (400, InvalidRequest, None), (429, Overloaded, True),
     (500, RemoteError, True)],
)  # fmt: skip
def test_errors_are_typed_and_point_at_the_line(status: int, kind: type[SglError], retryable: bool | None):
    with serving(tea) as api, openai(api) as backend:
        api.failures = [status]
        with pytest.raises(kind, match="the fake says no") as caught:
            chat.run("x", backend=backend)
    assert caught.value.remote_status == status
    assert caught.value.details.get("retryable") == retryable
    assert caught.value.location.function == "chat"


def test_the_client_tries_again():
    with serving(tea) as api, openai(api, max_retries=2) as backend:
        api.failures = [503]
        assert chat.run("What is tea?", backend=backend)["answer"] == "Tea is hot"


def test_nobody_there_and_no_answer_in_time():
    with serving(tea) as api:
        gone = api.url
        with openai(api, timeout=0.2) as backend:
            api.delay_s = 1.0
            with pytest.raises(RemoteError, match="did not answer in time"):
                chat.run("x", backend=backend)
    api.url = gone
    with openai(api) as backend, pytest.raises(RemoteError, match="cannot be reached"):
        chat.run("x", backend=backend)


def test_cancel_deadline_and_shutdown_end_a_program_that_waits():
    with serving(tea) as api:
        api.delay_s = 0.8
        with openai(api) as backend:
            state = chat.run("x", backend=backend, stream=True)
            threading.Timer(0.1, state.cancel).start()
            with pytest.raises(Cancelled):
                state.sync()
            with pytest.raises(DeadlineExceeded):
                chat.run("x", backend=backend, deadline_s=0.1)
            state = chat.run("x", backend=backend, stream=True)
        with pytest.raises(sgl.errors.EngineDead, match="shut down"):
            state.sync()


# --- speculation ---


@sgl.function(num_api_spec_tokens=64)
def card(s, name):
    s += f"About {name}. Name: " + sgl.gen("name", stop="\n") + "\nBirthday: " + sgl.gen("birthday", stop="\n")
    s += "\nJob: " + sgl.gen("job", stop="\n") + "\n"


def biography(prompt: str) -> str:
    whole = "Ada Lovelace\nBirthday: 10 December 1815\nJob: mathematician\nHobby: horses\n"
    written_ = prompt.split("Name: ")[-1]
    assert whole.startswith(written_)
    return whole[len(written_) :]


def test_speculation_saves_requests_and_changes_no_value():
    plain = sgl.function(card.func)
    with serving(biography) as api, openai(api, "test-instruct") as backend:
        expected = plain.run("Ada", backend=backend)
        without, api.requests[:] = (len(api.requests), api.prompt_tokens), []
        state = card.run("Ada", backend=backend)
        assert (len(api.requests), api.prompt_tokens) < (without[0], without[1] // 2)
        for name in ("name", "birthday", "job"):
            assert state[name] == expected[name]
        assert state.text() == expected.text()
        assert len(api.requests) == 1


def test_speculation_of_many_programs_does_not_mix():
    def of(prompt: str) -> str:
        name = prompt.split("About ")[1].split(".")[0]
        whole = f"{name} X\nBirthday: day of {name}\nJob: job of {name}\n"
        return whole[len(prompt.split("Name: ")[-1]) :]

    with serving(of) as api, openai(api, "test-instruct") as backend:
        names = [f"P{i}" for i in range(16)]
        states = card.run_batch([[name] for name in names], backend=backend, num_threads=16)
    assert [state["job"] for state in states] == [f"job of {name}" for name in names]
    assert len(api.requests) == 16


def test_text_that_the_model_did_not_write_drops_the_surplus():
    def other(prompt: str) -> str:
        return "Ada\nBorn: 1815\nWork: maths\n" if prompt.endswith("Name: ") else "asked again\n"

    with serving(other) as api, openai(api, "test-instruct") as backend:
        state = card.run("Ada", backend=backend)
    assert (state["name"], state["birthday"], len(api.requests)) == ("Ada", "asked again", 3)


def test_a_chat_model_writes_the_whole_turn():
    @sgl.function(num_api_spec_tokens=64)
    def program(s):
        s += sgl.user("Fill the card of Ada.")
        s += sgl.assistant("Name: " + sgl.gen("name", stop="\n") + "\nJob: " + sgl.gen("job", stop="\n"))

    with serving(lambda prompt: "Name: Ada\nJob: maths\nEnd") as api, openai(api) as backend:
        state = program.run(backend=backend)
        assert (state["name"], state["job"], len(api.requests)) == ("Ada", "maths", 1)
        api.model = lambda prompt: "Sure! Name: Ada"
        with pytest.raises(GenerationError, match="the model wrote 'Sure! Name: Ada' instead"):
            program.run(backend=backend)


# --- tools, LiteLLM, Anthropic ---


def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b


@sgl.function
def sums(s, choice="auto", parallel=True, tool_format=None):
    s += sgl.user("1 + 2?")
    return s.tools([add], tool_choice=choice, parallel=parallel, max_rounds=1, tool_format=tool_format)


@pytest.mark.parametrize("tool_format", [None, "pythonic"])
def test_tools_are_told_and_called_in_the_endpoints_own_form(tool_format: str | None):
    with serving(lambda prompt: '{"a": 1, "b": 2}') as api, openai(api) as backend:
        state = sums.run("required", False, tool_format, backend=backend)
    assert [result.value for result in state["answer_calls"]] == [3]
    first, last = api.bodies
    assert first["tools"][0]["function"]["description"] == "Add two numbers."
    assert (first["tool_choice"], first["parallel_tool_calls"]) == ("required", False)
    assert last["tool_choice"] == "none", "the last round has to answer"


def test_arguments_that_are_no_json_are_an_error_of_the_generation():
    with serving(lambda prompt: "{a: 1") as api, openai(api) as backend:
        with pytest.raises(GenerationError, match="arguments of the call of 'add'") as caught:
            sums.run("add", backend=backend)
        assert caught.value.location.function == "sums"
    assert api.bodies[0]["tool_choice"] == {"type": "function", "function": {"name": "add"}}


def test_litellm_is_asked_in_openais_form(monkeypatch: pytest.MonkeyPatch):
    asked: list[dict[str, Any]] = []

    def chunks(*pieces: str) -> Iterator[Any]:
        """As LiteLLM's are: a usage in the last one alone, and the iterator has no `close` of a response."""
        for piece in pieces:
            delta = SimpleNamespace(content=piece)
            yield SimpleNamespace(choices=[SimpleNamespace(delta=delta, finish_reason=None, logprobs=None)])
        usage = SimpleNamespace(prompt_tokens=3, completion_tokens=2, prompt_tokens_details=None)
        delta = SimpleNamespace(content=None)
        yield SimpleNamespace(choices=[SimpleNamespace(delta=delta, finish_reason="stop", logprobs=None)], usage=usage)

    def completion(**fields: Any) -> Any:
        asked.append(fields)
        if fields.get("stream"):
            return chunks("hot", " tea")
        message = SimpleNamespace(content="hot. Always", tool_calls=None)
        usage = SimpleNamespace(prompt_tokens=3, completion_tokens=1, prompt_tokens_details=None)
        return SimpleNamespace(
            choices=[SimpleNamespace(message=message, finish_reason="stop", logprobs=None)], usage=usage
        )

    monkeypatch.setitem(sys.modules, "litellm", SimpleNamespace(completion=completion))
    with sgl.LiteLLM("some/model", api_key="k", timeout=5) as backend:
        state = chat.run("Is it?", backend=backend)
        assert state["answer"] == "hot"
        with pytest.raises(Unsupported):
            pick.run(backend=backend)
        streamed = chat.run("Is it?", backend=backend, stream=True)
        assert list(streamed.text_iter("answer")) == ["hot", " tea"]
        assert streamed.get_meta_info("answer")["completion_tokens"] == 2
    assert (asked[0]["model"], asked[0]["api_key"], asked[0]["timeout"]) == ("some/model", "k", 5)


@pytest.mark.parametrize(
    ("name", "package"), [("OpenAI", "openai"), ("Anthropic", "anthropic"), ("LiteLLM", "litellm")]
)
def test_a_missing_client_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"needs the package {package}"):
        getattr(sgl, name)("model")


@pytest.fixture
def anthropic() -> Iterator[Any]:
    """Anthropic's own client, against a fake endpoint."""
    pytest.importorskip("anthropic", reason="the extra anthropic is not installed")

    @contextmanager
    def made(model: Any, **given: Any) -> Iterator[tuple[FakeApi, sgl.Anthropic]]:
        given = {"api_key": "k", "max_retries": 0, "timeout": 20.0, **given}
        with serving(model) as api, sgl.Anthropic("claude", base_url=api.url, **given) as backend:
            yield api, backend

    return made


@sgl.function
def about_tea(s):
    s += sgl.system("Be brief.") + sgl.user("What is tea?")
    s += sgl.assistant("Tea is" + sgl.gen("what", stop=".", max_tokens=9, temperature=0))
    s += sgl.user("Which?") + sgl.assistant(sgl.select("which", ["green", "black"]))


def tea_of_claude(prompt: str) -> str:
    return " hot. Really" if prompt.endswith("Tea is") else "black"


def test_anthropic_takes_system_turns_and_begun_turns(anthropic: Any):
    with anthropic(tea_of_claude) as (api, backend):
        state = about_tea.run(backend=backend)
        assert (state["what"], state["which"]) == (" hot", "black")
        assert (api.bodies[0]["system"], api.bodies[0]["messages"][-1]["content"]) == ("Be brief.", "Tea is")
        assert (api.bodies[0]["stop_sequences"], api.bodies[0]["max_tokens"]) == (["."], 9)
        assert api.bodies[1]["tool_choice"] == {"type": "tool", "name": "answer"}
        meta = state.get_meta_info("what")
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (7, 1)
        with pytest.raises(Unsupported, match="takes no presence_penalty"):
            about_tea.run(backend=backend, presence_penalty=0.5)


def test_anthropics_streams_come_in_pieces_and_can_be_left(anthropic: Any):
    with anthropic(counting) as (api, backend):

        @sgl.function
        def program(s):
            s += sgl.user("Count.") + sgl.assistant(sgl.gen("n", max_tokens=6))

        state = program.run(backend=backend, stream=True)
        pieces = list(state.text_iter("n"))
        assert pieces == ["w0", " w1", " w2", " w3", " w4", " w5"]
        assert state.get_meta_info("n")["finish_reason"]["type"] == "length"
        assert api.bodies[0]["stream"] is True
        left = program.run(backend=backend, stream=True)
        next(left.text_iter("n"))
        left.cancel()
        with pytest.raises(Cancelled):
            left.sync()


@pytest.mark.parametrize(
    ("status", "kind"), [(401, RemoteError), (404, ModelNotFound), (400, InvalidRequest), (429, Overloaded),
                         (529, Overloaded), (500, RemoteError)],
)  # fmt: skip
def test_anthropics_errors_are_typed_and_point_at_the_line(anthropic: Any, status: int, kind: type[SglError]):
    with anthropic(tea_of_claude) as (api, backend):
        for stream in (False, True):
            api.failures = [status]
            state = about_tea.run(backend=backend, stream=True) if stream else None
            with pytest.raises(kind, match="the fake says no") as caught:
                state.sync() if state is not None else about_tea.run(backend=backend)
            assert (caught.value.remote_status, caught.value.location.function) == (status, "about_tea")


def test_anthropics_schemas_and_tools(anthropic: Any):
    @sgl.function
    def program(s):
        s += sgl.user("?") + sgl.assistant(sgl.gen("x", json_schema={"type": "object", "properties": {}}))

    with anthropic(lambda prompt: '{"a": 1, "b": 2}') as (api, backend):
        state = sums.run("required", False, backend=backend)
        assert [result.value for result in state["answer_calls"]] == [3]
        assert api.bodies[0]["tool_choice"] == {"type": "any", "disable_parallel_tool_use": True}
        assert api.bodies[0]["tools"][0]["input_schema"]["required"] == ["a", "b"]
        assert api.bodies[1]["tool_choice"] == {"type": "none"}


def test_anthropic_writes_ahead_in_a_begun_turn(anthropic: Any):
    """A model that continues its turn is asked once for all the fields of it."""

    @sgl.function(num_api_spec_tokens=64)
    def program(s):
        s += sgl.user("The card of Ada?")
        s += sgl.assistant("Name: " + sgl.gen("name", stop="\n") + "\nJob: " + sgl.gen("job", stop="\n"))

    def card_of_ada(prompt: str) -> str:
        whole = "Name: Ada\nJob: maths\nEnd"
        begun = prompt.split("The card of Ada?\n")[-1]
        return whole[len(begun.rstrip()) :].removeprefix(" " if begun.endswith(" ") else "")

    with anthropic(card_of_ada) as (api, backend):
        state = program.run(backend=backend)
        assert (state["name"], state["job"], len(api.requests)) == ("Ada", "maths", 1)
