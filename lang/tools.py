"""Python functions as tools: what a model is told of them, the calls that it writes, their results.

Owns `Call` and `CallResult`, running calls (beside each other), and the loop behind `s.tools`, as a generator that
never waits: it appends turns, asks for a generation to be read or for calls to be run, and is sent the outcome. How
calls are written, constrained and read is `sgl.grammars.formats`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

from sgl.errors import GenerationError, InvalidParameter, SourceLocation, ToolError
from sgl.grammars.spec import Constraint
from sgl.grammars.types import dump, parse
from sgl.lang.defaults import model_format
from sgl.lang.expr import Expr, ExprList, GenExpr, RoleExpr
from sgl.lang.forms import Form
from sgl.lang.graph import ToolSpec

if TYPE_CHECKING:
    from sgl.grammars.formats import Message, ToolCall, ToolFormat
    from sgl.lang.backend import Backend
    from sgl.lang.branches import BranchState

ToolFunction: TypeAlias = Callable[..., Any]
OnError: TypeAlias = Literal["return", "raise"]
_MAX_PARALLEL = 16


@dataclass(frozen=True)
class Call:
    """A tool call that a model has written.

    Attributes:
        id: of the call in its message.
        name: of the tool.
        arguments: as Python values of the types that the function's parameters have.
        problem: why it cannot be run: an unknown tool, a call that breaks off, arguments that are not what the function
            takes; or `None`.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]
    problem: str | None = None
    function: ToolFunction | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class CallResult:
    """What became of a call.

    Attributes:
        value: that the function returned.
        error: that it raised, or that kept it from being run.
        content: as the model is told.
    """

    call: Call
    value: Any
    error: Exception | None
    content: str


class Toolbox:
    """Functions that a generation may call, and the form in which their calls are written.

    Args:
        functions: typed Python functions, plain or `async def`; each has a docstring that says what it does.
        fmt: name of a format of `sgl.grammars.formats`; `None` is the model's own, once it is known (`on`).
        choice: `auto`, `none`, `required`, or the name of a function.
        parallel: whether one message may hold several calls.

    Raises:
        InvalidParameter: no function, two of one name, or an unknown format or choice.
        UnsupportedSchema: a parameter without a type that JSON has.
    """

    def __init__(
        self, functions: Sequence[ToolFunction], fmt: str | None = None, choice: str = "auto", parallel: bool = True
    ) -> None:
        from sgl.grammars.formats import DEFAULT_TOOL_FORMAT, tool_format, tools_of

        if isinstance(functions, (str, bytes, Mapping)) or not isinstance(functions, Sequence) or not functions:
            raise InvalidParameter(f"tools is {functions!r}; expected a list of functions", param="tools")
        for function in functions:
            if not inspect.isroutine(function):
                raise InvalidParameter(f"{function!r} is no function", hint="wrap it in a def", param="tools")
        self.is_open = fmt is None
        try:
            self.format: ToolFormat = tool_format(fmt or DEFAULT_TOOL_FORMAT)
        except InvalidParameter as error:
            raise InvalidParameter(
                f"tool_format is {fmt!r}; expected a format of tool calls", hint=error.hint, param="tool_format"
            ) from None
        self.functions = {function.__name__: function for function in functions}
        self.tools = tools_of(functions)
        if choice not in ("auto", "none", "required", *self.functions):
            raise InvalidParameter(
                f"tool_choice is {choice!r}; expected 'auto', 'none', 'required' or one of the tools "
                f"{', '.join(map(repr, self.functions))}",
                param="tool_choice",
            )
        self.choice = choice
        self.parallel = parallel
        self._others: dict[str, Toolbox] = {}  # by format
        self.constraint()  # checks the choice

    def specs(self) -> tuple[ToolSpec, ...]:
        """The tools as a graph carries them."""
        return tuple(
            ToolSpec(tool.name, tool.description, json.dumps(tool.parameters, separators=(",", ":")))
            for tool in self.tools
        )

    def message(self, text: str) -> Message:
        """Generated text, taken apart into answer and calls."""
        return self.format.parse(text, self.tools)

    def calls(self, text: str, *, cut: bool = False) -> list[Call]:
        """The calls in generated text, in order. `cut`: the token budget ended the text."""
        return [self._call(found, cut=cut) for found in self.message(text).calls]

    def on(self, backend: Backend) -> Toolbox:
        """The same, in the form that the model on `backend` uses, where none was named."""
        fmt = model_format(backend, "tool") if self.is_open else None
        if fmt is None or fmt == self.format.name:
            return self
        if fmt not in self._others:
            self._others[fmt] = Toolbox(list(self.functions.values()), fmt, self.choice, self.parallel)
        return self._others[fmt]

    def constraint(self) -> Constraint | None:
        """What holds a generation to the format; see `ToolFormat.constraint`."""
        wanted = {"name": self.choice} if self.choice in self.functions else self.choice
        return self.format.constraint(self.tools, wanted, parallel=self.parallel, strict=True)

    def prompt(self, backend: Backend) -> str:
        """The text that tells the model on `backend` of the tools and of how it calls them: what its own chat template
        writes, where no format was named and the template knows tools."""
        if self.is_open:
            renderer = getattr(backend, "renderer", None)
            tool_text = getattr(renderer(), "tool_text", None) if renderer is not None else None
            own = tool_text([tool.function() for tool in self.tools]) if tool_text is not None else None
            if own is not None:
                return str(own)
        return str(self.on(backend).format.tool_prompt(self.tools).system)

    def form(self) -> Form:
        """The form of a generation with these tools: its value is the text beside the calls."""
        return Form("message", None, (), lambda text: self.message(text).content, is_typed=True)

    def _call(self, found: ToolCall, *, cut: bool) -> Call:
        name, function = found.name, self.functions.get(found.name)
        if function is None:
            return Call(found.id, name, {}, f"there is no tool {name!r}; there are {', '.join(self.functions)}")
        if not found.complete:
            why = "max_tokens ended the text within its arguments (raise max_tokens)" if cut else "its end is missing"
            return Call(found.id, name, {}, f"the call of {name} is not complete: {why}", function)
        try:
            return Call(found.id, name, parse(function, found.arguments), None, function)
        except GenerationError as error:
            return Call(found.id, name, {}, error.message, function)


@dataclass(frozen=True)
class ToolPromptExpr(Expr):
    """The text that tells a model of tools; which text that is depends on the model."""

    toolbox: Toolbox


def tool_prompt(tools: Sequence[ToolFunction], tool_format: str | None = None) -> ToolPromptExpr:
    """What tells a model of tools and of how it calls them, to append in a system turn.

    Args:
        tools: typed Python functions with docstrings.
        tool_format: how the model writes calls: a name of `sgl.grammars.formats.TOOL_FORMATS`; the model's own without
            it, as far as the backend knows it.

    Example:
        >>> import sgl
        >>> def add(a: int, b: int) -> int:
        ...     "Add two numbers."
        ...     return a + b
        >>> @sgl.function
        ... def told(s):
        ...     s += sgl.system("You help. " + sgl.tool_prompt([add]))
        >>> "Add two numbers." in told.run(backend=sgl.MockBackend()).text()
        True
    """
    return ToolPromptExpr(Toolbox(tools, tool_format))


# --- running calls --------------------------------------------------------------------------------------------------


def run_calls(calls: Sequence[Call]) -> list[CallResult]:
    """Run calls beside each other, each on a thread; results in the order of the calls."""
    if len(calls) == 1 and not inspect.iscoroutinefunction(calls[0].function):
        return [_run(calls[0])]
    with ThreadPoolExecutor(min(len(calls), _MAX_PARALLEL), thread_name_prefix="sgl-tool") as pool:
        futures = [pool.submit(contextvars.copy_context().run, _run, call) for call in calls]
        return [future.result() for future in futures]


async def run_calls_async(calls: Sequence[Call]) -> list[CallResult]:
    """Run calls beside each other: `async def` functions as tasks, others on threads."""
    return list(await asyncio.gather(*(_run_async(call) for call in calls)))


def _run(call: Call) -> CallResult:
    function = call.function
    if call.problem is not None or function is None:
        return _refused(call)
    try:
        if inspect.iscoroutinefunction(function):
            return _returned(call, asyncio.run(function(**call.arguments)))
        return _returned(call, function(**call.arguments))
    except Exception as error:  # noqa: BLE001 - a tool's own: given back or raised, as the program chose
        return _raised(call, error)


async def _run_async(call: Call) -> CallResult:
    function = call.function
    if function is None or call.problem is not None or not inspect.iscoroutinefunction(function):
        return await asyncio.to_thread(_run, call)
    try:
        return _returned(call, await function(**call.arguments))
    except Exception as error:  # noqa: BLE001 - a tool's own: given back or raised, as the program chose
        return _raised(call, error)


def _refused(call: Call) -> CallResult:
    problem = call.problem or "there is no function for it"
    return CallResult(call, None, GenerationError(f"call of {call.name!r}: {problem}"), f"Error: {problem}")


def _raised(call: Call, error: Exception) -> CallResult:
    return CallResult(call, None, error, f"Error: {type(error).__name__}: {error}")


def _returned(call: Call, value: Any) -> CallResult:
    """Text as it is, whatever else as JSON."""
    return CallResult(call, value, None, value if isinstance(value, str) else dump(type(value), value))


# --- the loop -------------------------------------------------------------------------------------------------------


class Read(NamedTuple):
    """The loop asks for the calls that a generation wrote."""

    expr: GenExpr[Any]


class Run(NamedTuple):
    """The loop asks for calls to be run."""

    calls: list[Call]


def round_expression(
    functions: Sequence[ToolFunction],
    name: str,
    tool_choice: str,
    parallel: bool,
    tool_format: str | None,
    sampling: Mapping[str, Any],
) -> Callable[[str], GenExpr[Any]]:
    """The generation of a round: the first one with the choice of tools that is asked for, the last one with none."""
    from sgl.lang.expressions import gen

    def expression(choice: str) -> GenExpr[Any]:
        made = gen(
            name,
            tools=functions,
            tool_choice=tool_choice if choice == "first" else choice,
            parallel_tool_calls=parallel,
            tool_format=tool_format,
            **sampling,
        )
        return cast("GenExpr[Any]", made)

    return expression


def tool_loop(
    core: BranchState,
    expression: Callable[[str], GenExpr[Any]],
    name: str,
    on_error: OnError,
    max_rounds: int,
    role: str,
    location: SourceLocation | None,
) -> Generator[Read | Run, Any, str]:
    """Turns of the assistant and of its tools, until it answers without a call; returns the name of the answer.

    Args:
        expression: the generation of a round, given the choice of tools.
    """
    if on_error not in ("return", "raise"):
        raise InvalidParameter(f"on_error is {on_error!r}; expected 'return' or 'raise'", param="on_error")
    if isinstance(max_rounds, bool) or not isinstance(max_rounds, int) or max_rounds < 1:
        raise InvalidParameter(f"max_rounds is {max_rounds!r}; expected an integer >= 1", param="max_rounds")
    from sgl.lang.variables import Set

    results: list[CallResult] = []
    for number in range(max_rounds + 1):
        expr = expression("first" if number == 0 else "auto" if number < max_rounds else "none")
        core.append(ExprList((RoleExpr("assistant", True), expr, RoleExpr("assistant", False))), location)
        calls: list[Call] = yield Read(expr)
        if not calls:
            break
        if number == max_rounds:
            raise ToolError(
                f"the model called {calls[0].name!r} after {max_rounds} rounds of calls, where it had to answer",
                hint="raise max_rounds",
                location=location,
                tool=calls[0].name,
            )
        calls = [replace(call, id=f"call_{len(results) + index}") for index, call in enumerate(calls)]
        done: list[CallResult] = yield Run(calls)
        for result in done:
            if result.error is not None and on_error == "raise":
                raise ToolError(
                    f"tool {result.call.name!r} failed: {result.error}",
                    hint='on_error="return" tells the model instead',
                    location=location,
                    tool=result.call.name,
                ) from result.error
        results.extend(done)
        for text in _told(core, expr, done, role):
            core.append(ExprList((RoleExpr(role, True), text, RoleExpr(role, False))), location)
    core.define(f"{name}_calls", Set(results))
    return name


def _told(core: BranchState, expr: GenExpr[Any], results: Sequence[CallResult], role: str) -> list[str]:
    """The turns that tell a model of results: one each in a role of tools, else one with all in the format's words."""
    if role != "user" or expr.toolbox is None:
        return [result.content for result in results]
    render = expr.toolbox.on(core.program.backend).format.render_result
    return ["\n".join(render(result.call.name, result.content) for result in results)]
