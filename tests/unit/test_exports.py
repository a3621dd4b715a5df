"""The public names: the exact list, each with a runnable example, none of it heavy to import."""

from __future__ import annotations

import ast
import doctest
import inspect
import itertools
from pathlib import Path

import pytest

import sgl

ROOT = Path(__file__).resolve().parents[2]

PUBLIC = [
    "BaseBackend",
    "Crusoe",
    "RemoteEngine",
    "Runtime",
    "RuntimeEndpoint",
    "ServerArgs",
    "VertexAI",
    "global_config",
    "Recorder",
    "Replay",
    "Anthropic",
    "LiteLLM",
    "OpenAI",
    "AsyncProgramState",
    "Batch",
    "ChoicesSamplingMethod",
    "CompiledProgram",
    "Engine",
    "EngineConfig",
    "MockBackend",
    "ProgramState",
    "ProgramStateGroup",
    "SglFunction",
    "StreamEvent",
    "Template",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "default_backend",
    "errors",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "set_default_options",
    "system",
    "system_begin",
    "system_end",
    "template",
    "token_length_normalized",
    "tool_prompt",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]

ELSEWHERE = {"Engine", "__version__"}
"""`Engine` starts a process: its example runs with the docstrings of all modules. The version is a text."""


def test_the_exact_list():
    assert sorted(sgl.__all__) == sorted(PUBLIC)
    assert set(sgl.__all__) <= set(dir(sgl))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        sgl.no_such_name  # noqa: B018


def test_type_checkers_see_the_same_names():
    tree = ast.parse((ROOT / "sgl/__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname or alias.name for node in imports for alias in node.names}
    assert seen - {"Backend", "Renderer"} == set(PUBLIC) - {"__version__", "set_default_options"}


def documentation(name: str) -> str:
    """The docstring of a name; of a value (a choices method), the string below its assignment."""
    value = getattr(sgl, name)
    if not isinstance(value, sgl.ChoicesSamplingMethod):
        return inspect.getdoc(value) or ""
    body = ast.parse((ROOT / "lang/choices.py").read_text()).body
    for statement, after in itertools.pairwise(body):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            assert isinstance(after, ast.Expr)
            return str(ast.literal_eval(after.value))
    raise LookupError(name)


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - ELSEWHERE))
def test_every_name_has_an_example_that_runs(name: str):
    value = getattr(sgl, name)
    test = doctest.DocTestParser().get_doctest(
        documentation(name), dict(vars(inspect.getmodule(value) or sgl)), name, None, 0
    )
    assert test.examples, f"{name} has no example"
    results = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL).run(test)
    assert results.failed == 0


def test_what_is_not_run_here_runs_with_all_docstrings():
    assert doctest.DocTestParser().get_examples(inspect.getdoc(sgl.Engine) or "")
    [suite] = [line for line in (ROOT / "Makefile").read_text().splitlines() if "--doctest-modules" in line]
    assert suite.endswith(" tests sgl")


def test_everything_that_a_public_class_offers_says_what_it_does():
    silent = [
        f"{name}.{member}"
        for name in PUBLIC
        if inspect.isclass(value := getattr(sgl, name)) and value.__module__.startswith("sgl.")
        for member, what in inspect.getmembers(value)
        if not member.startswith("_") and (inspect.isroutine(what) or isinstance(what, property))
        if not inspect.getdoc(what)
    ]
    assert not silent
