"""The surface that programs written for SGLang use: names, argument names, their order and defaults, as one table.

What comes after `*` in a row is ours, and by name only; it is not listed. Differences that are made on purpose are in
`tutorials/from_sglang.md`.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import sgl
from sgl.errors import InvalidParameter, Unsupported

NONE = dict.fromkeys
GEN = NONE(
    [
        "name",
        "max_tokens",
        "min_tokens",
        "n",
        "stop",
        "stop_token_ids",
        "stop_regex",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "ignore_eos",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "return_text_in_logprobs",
        "dtype",
        "choices",
        "choices_method",
        "regex",
        "json_schema",
    ]
)
TYPED = {
    name: None
    for name in GEN
    if name not in ("min_tokens", "dtype", "choices", "choices_method", "regex", "json_schema")
}
SAMPLING: dict[str, Any] = {
    "max_new_tokens": 128,
    "n": 1,
    **NONE(("stop", "stop_token_ids", "stop_regex")),
    **NONE(("temperature", "top_p", "top_k", "min_p")),  # None: the model's recommendation, else SGLang's constants
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "ignore_eos": False,
    **NONE(("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")),
}
EMPTY = inspect.Parameter.empty
EXPR = {"expr": None}
STATE, FUNCTION, GROUP = sgl.ProgramState, sgl.SglFunction, sgl.ProgramStateGroup

POSITIONAL: list[tuple[Any, dict[str, Any]]] = [
    (sgl.function, {"func": None, "num_api_spec_tokens": None}),
    (sgl.gen, GEN),
    (sgl.gen_int, TYPED),
    (sgl.gen_string, TYPED),
    (sgl.select, {"name": None, "choices": None, "temperature": 0.0, "choices_method": None}),
    (sgl.image, {"path": EMPTY}),
    (sgl.video, {"path": EMPTY, "num_frames": EMPTY}),
    *[(make, EXPR) for make in (sgl.system, sgl.user, sgl.assistant)],
    *[(make, {}) for make in (sgl.system_begin, sgl.user_begin, sgl.assistant_begin)],
    *[(make, {}) for make in (sgl.system_end, sgl.user_end, sgl.assistant_end)],
    (sgl.separate_reasoning, {"expr": None, "model_type": None}),
    (sgl.set_default_backend, {"backend": EMPTY}),
    (sgl.flush_cache, {"backend": None}),
    (sgl.get_server_info, {"backend": None}),
    (FUNCTION.run_batch, {"batch_kwargs": EMPTY}),
    (FUNCTION.bind, {}),
    (FUNCTION.cache, {"backend": None}),
    (STATE.system, EXPR),
    (STATE.user, EXPR),
    (STATE.assistant, EXPR),
    (STATE.text, {}),
    (STATE.messages, {}),
    (STATE.sync, {}),
    (STATE.error, {}),
    (STATE.get_var, {"name": EMPTY}),
    (STATE.set_var, {"name": EMPTY, "value": EMPTY}),
    (STATE.get_meta_info, {"name": EMPTY}),
    (STATE.var_scope, {"name": EMPTY}),
    (STATE.fork, {"size": 1, "position_ids_offset": None}),
    (STATE.copy, {"position_ids_offset": None}),
    (STATE.text_iter, {"var_name": None}),
    (STATE.text_async_iter, {"var_name": None, "return_meta_data": False}),
    (GROUP.join, {"mode": "gather_variable"}),
]
BY_NAME: list[tuple[Any, dict[str, Any]]] = [
    (FUNCTION.run, {**SAMPLING, "stream": False, "backend": None, "use_thread": True}),
    (
        FUNCTION.run_batch,
        {**SAMPLING, "backend": None, "num_threads": "auto", "progress_bar": False, "generator_style": False},
    ),
]


EXPORTS = [
    "Runtime",
    "RuntimeEndpoint",
    "Engine",
    "ServerArgs",
    "OpenAI",
    "Anthropic",
    "LiteLLM",
    "VertexAI",
    "Crusoe",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "select",
    "image",
    "video",
    "system",
    "system_begin",
    "system_end",
    "user",
    "user_begin",
    "user_end",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "separate_reasoning",
    "set_default_backend",
    "flush_cache",
    "get_server_info",
    "global_config",
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
    "__version__",
]


@pytest.mark.parametrize("name", EXPORTS)
def test_every_name_of_sglang_is_there(name: str) -> None:
    assert hasattr(sgl, name)


def test_names_that_have_another_one_here_say_so() -> None:
    with pytest.raises(Unsupported, match=r"use sgl\.Engine\(model_path='m'\)"):
        sgl.Runtime(model_path="m")
    with pytest.raises(Unsupported, match="chat_template_name"):
        sgl.RuntimeEndpoint("http://127.0.0.1:9", chat_template_name="llama-2-chat")
    assert sgl.ServerArgs(model_path="m").model_path == "m"


def test_settings_of_the_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @sgl.function
    def hello(s):
        s += "Hello " + sgl.gen("who")

    monkeypatch.setattr(sgl.global_config, "verbosity", 2)
    hello.run(backend=sgl.MockBackend(["world"]))
    assert capsys.readouterr().out == "Hello world\n"
    sgl.global_config.enable_parallel_encoding = True
    with pytest.raises(Unsupported, match="enable_precache_with_tracing"):
        sgl.global_config.enable_precache_with_tracing = False
    with pytest.raises(InvalidParameter, match="no 'verbose'"):
        sgl.global_config.verbose = 1


def parameters(function: Any, kind: Any) -> dict[str, Any]:
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in found if p.kind is kind and p.name != "self"}


@pytest.mark.parametrize(("function", "expected"), POSITIONAL, ids=lambda value: getattr(value, "__qualname__", ""))
def test_positional_arguments(function: Any, expected: dict[str, Any]) -> None:
    found = parameters(function, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    assert list(found.items()) == list(expected.items())


@pytest.mark.parametrize(("function", "expected"), BY_NAME, ids=lambda value: getattr(value, "__qualname__", ""))
def test_arguments_by_name(function: Any, expected: dict[str, Any]) -> None:
    found = parameters(function, inspect.Parameter.KEYWORD_ONLY)
    assert list(found.items())[: len(expected)] == list(expected.items()), "ours come after them"


def test_none_means_the_constants_of_sglang() -> None:
    sampling = sgl.lang.graph.Sampling()
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, -1, 0.0)


def test_free_arguments_and_shadowed_names() -> None:
    """`**kwargs` of a program work; a parameter named like an option of `run` is given by position."""

    @sgl.function
    def program(s, n, **extra):
        s += f"{n} {sorted(extra)}"

    assert program.run(3, a=1, b=2, backend=sgl.MockBackend()).text() == "3 ['a', 'b']"


def test_meta_info_of_a_generation_and_of_each_method() -> None:
    @sgl.function
    def program(s, method):
        s += sgl.gen("g", return_logprob=True) + sgl.select("c", ["a", "b c"], choices_method=method)

    for method in (
        sgl.token_length_normalized,
        sgl.greedy_token_selection,
        sgl.unconditional_likelihood_normalized,
    ):
        state = program.run(method, backend=sgl.MockBackend())
        generation, choice = state.get_meta_info("g"), state.get_meta_info("c")
        assert {"finish_reason", "prompt_tokens", "completion_tokens", "output_token_logprobs"} <= set(generation)
        keys = {"normalized_prompt_logprobs", "input_token_logprobs", "output_token_logprobs", "greedy_logprob_matrix"}
        assert keys <= set(choice)
        assert len({len(choice[key]) for key in keys}) == 1, "one entry for each option"


def test_samples_are_a_list_and_the_state_goes_on_behind_the_first(dummy_engine: sgl.Engine) -> None:
    @sgl.function
    def program(s):
        s += sgl.user("ab") + sgl.assistant(sgl.gen("x", n=3, max_tokens=4, ignore_eos=True))
        s += sgl.user("cd") + sgl.assistant(sgl.gen("y", max_tokens=2))

    state = program.run(backend=dummy_engine, seed=1)
    assert len(set(state["x"])) == 3
    assert state.messages()[-3]["content"] == state["x"][0]
    first, after = state.get_meta_info("x")[0], state.get_meta_info("y")
    reached = first["prompt_tokens"] + first["completion_tokens"]
    assert after["cached_tokens"] >= reached - 1, "its tokens are the state's; the one drawn last is computed"
    greedy = program.run(backend=dummy_engine, temperature=0)["x"]
    assert len(set(greedy)) == 1, "greedy samples are alike"
    assert program.compile(sampling={"temperature": 0}).run(backend=dummy_engine)["x"] == greedy
