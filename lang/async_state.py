"""`AsyncProgramState`: `s` in an `async def` program, whose reads are awaited.

Owns the awaiting twins of `state.ProgramState`'s reads. Everything else (appending, roles, forks, marks) is the
same and does not wait. Tasks of one program may await different branches at the same time; no thread waits for them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, overload

from sgl.errors import GenerationError, StateLost
from sgl.lang import variables
from sgl.lang.branches import BranchState
from sgl.lang.capture import Capture, user_location
from sgl.lang.expr import GenExpr, SelectExpr
from sgl.lang.graph import MAIN_BRANCH, Usage
from sgl.lang.interpreter import Program
from sgl.lang.pending import Nothing, Pending
from sgl.lang.repair import Check, Feedback, repairing
from sgl.lang.state import Name, ProgramState, StateBase, body_of
from sgl.lang.streams import StreamEvent
from sgl.lang.tools import Call, OnError, Read, ToolFunction, round_expression, run_calls_async, tool_loop
from sgl.lang.variables import Variable

if TYPE_CHECKING:
    from sgl.lang.function import SglFunction

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class AsyncProgramState(StateBase):
    """One prompt state of an `async def` program.

    Example:
        >>> import sgl
        >>> @sgl.function
        ... async def capital(s, country):
        ...     s += f"The capital of {country} is " + sgl.gen("city", stop=".")
        ...     s += "; of old: " + sgl.gen("old") if await s["city"] == "Ankara" else "!"
        >>> capital.run("France", backend=sgl.MockBackend(["Paris. And"])).text()
        'The capital of France is Paris!'
    """

    def __init__(self, program: Program, core: BranchState | None = None, *, outside: bool = False) -> None:
        super().__init__(program, core)
        self._outside = outside  # held by who started the program, while its body runs
        self._view: ProgramState[Any] = ProgramState(program, self._core)

    # --- reading values ---

    @overload
    def __getitem__(self, name: GenExpr[T]) -> Awaitable[T]: ...
    @overload
    def __getitem__(self, name: str | SelectExpr) -> Awaitable[Any]: ...
    def __getitem__(self, name: Name) -> Awaitable[Any]:
        return self._pending(name, variables.resolve, f"s[{name!r}]" if isinstance(name, str) else "s[expr]")

    def get_var(self, name: Name) -> Awaitable[Any]:
        """`await s["x"]`: the value (see `ProgramState.get_var`)."""
        return self._pending(name, variables.resolve, "s.get_var(...)")

    def value(self, name: Name) -> Awaitable[Any]:
        """The value as what it is (see `ProgramState.value`)."""
        return self._pending(name, variables.typed, "s.value(...)")

    def _pending(self, name: Name, look: Callable[[Variable], Any], what: str) -> Pending[Any]:
        return Pending(self._read(name, look), what)

    @property
    def ret_value(self) -> Awaitable[Any]:
        """`await state.ret_value`: what the body returned, of a run that `start_async` began."""
        return Pending(self._returned(), "state.ret_value")

    async def _returned(self) -> Any:
        await self._program.wait_for_async(lambda: not self._program.body_open)
        self._program.raise_if_failed()
        return self._program.returned

    async def get_meta_info(self, name: Name) -> Any:
        """How `name` came about (see `ProgramState.get_meta_info`)."""
        location = user_location()
        return await self._read(name, lambda found: variables.meta(found, self._view._name(name), location))

    async def probabilities(self, name: Name) -> dict[str, float]:
        """Of a select: each option with its probability."""
        return variables.probabilities(await self.get_meta_info(name), self._view._name(name))

    def __contains__(self, name: object) -> bool:
        """Whether something is, or will be, captured as `name`; does not wait."""
        return isinstance(name, str) and self._core.find(name) is not None

    async def _read(self, name: Name, look: Callable[[Variable], Any]) -> Any:
        core, program, key = self._core, self._program, self._view._name(name)
        if self._outside and core.find(key) is None:
            await program.wait_for_async(lambda: core.find(key) is not None or not program.body_open)
        variable = core.variable(key)
        await self._program.wait_async(variables.captures(variable))
        return look(variable)

    async def require(
        self,
        expr: GenExpr[T],
        check: Check,
        *,
        feedback: Feedback | None = None,
        attempts: int = 3,
    ) -> T:
        """Append a generation whose value has to pass `check` (see `ProgramState.require`)."""
        steps = repairing(self._core, expr, check, feedback, attempts, user_location())
        read: Any = None
        while True:
            try:
                steps.send(read)
            except StopIteration as done:
                return cast(T, done.value)
            try:
                read = await self[expr]
            except GenerationError as error:  # a typed value that is none
                read = error

    async def calls(self, name: Name) -> list[Call]:
        """The tool calls in what `gen(name, tools=[...])` gave (see `ProgramState.calls`)."""
        location = user_location()
        found = await self._read(name, lambda found: variables.calls(found, self._view._name(name), location))
        return cast("list[Call]", found)

    async def tools(
        self,
        functions: Sequence[ToolFunction],
        name: str = "answer",
        *,
        tool_choice: str = "auto",
        parallel: bool = True,
        on_error: OnError = "return",
        max_rounds: int = 8,
        tool_format: str | None = None,
        role: str = "user",
        **sampling: Any,
    ) -> str:
        """Let the model call Python functions until it answers (see `ProgramState.tools`)."""
        expression = round_expression(functions, name, tool_choice, parallel, tool_format, sampling)
        steps = tool_loop(self._core, expression, name, on_error, max_rounds, role, user_location())
        sent: Any = None
        while True:
            try:
                step = steps.send(sent)
            except StopIteration:
                return str(await self[name])
            sent = await (self.calls(step.expr) if isinstance(step, Read) else run_calls_async(step.calls))

    def call(self, program: SglFunction[P, R], *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Run the body of another program on this state (see `ProgramState.call`), and await what it returns.

        The body of a `def` program runs at once. It cannot await, so it may append and capture, and return a value that
        it captured (`return s["x"]`), but not look at one.
        """
        made = body_of(program)(self, args, kwargs)
        return cast("Coroutine[Any, Any, R]", made) if program.is_async else Pending(_settled(made), "s.call(...)")

    def _nothing(self) -> Nothing:
        return Nothing()

    # --- the whole state ---

    async def text(self) -> str:
        """Everything in this state, template text included."""
        program, core = self._program, self._core
        await self._body_ended()
        if core.number == MAIN_BRANCH and program.closing:
            await program.wait_end_async()
        if core.number == MAIN_BRANCH and program.done is not None:
            return program.done.text
        if core.is_joined:
            raise StateLost("this branch was joined and released", hint="read its text before the join")
        return (await program.read_state_async(core.number)).text

    async def messages(self) -> list[dict[str, str]]:
        """The chat turns so far, as `{"role": ..., "content": ...}`."""
        history = self._core.history()
        await self._program.wait_async(part for part in history if isinstance(part, Capture))
        return variables.turns(history)

    async def sync(self) -> None:
        """Wait until everything appended to this state is done; raises what went wrong."""
        program, core = self._program, self._core
        await self._body_ended()
        if program.closing:
            await program.wait_end_async()
        elif not core.is_joined:
            await program.read_state_async(core.number)
        else:
            await program.wait_async(part for part in core.parts if isinstance(part, Capture))

    async def _body_ended(self) -> None:
        program = self._program
        if self._outside and program.body_open:
            await program.wait_for_async(lambda: not program.body_open)

    async def error(self) -> Exception | None:
        """What went wrong so far, or `None`. Waits like `sync`."""
        try:
            await self.sync()
        except Exception as error:  # noqa: BLE001 - returned: that is the question
            return error
        return None

    @property
    def usage(self) -> Usage:
        """Tokens of the whole program, once it has ended; nothing before."""
        done = self._program.done
        return done.usage if done is not None else Usage()

    # --- streams ---

    def text_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """Text as it appears, for `async for` (see `ProgramState.text_async_iter`).

        One piece comes of a run without `stream=True`, and, in the body, of the whole state.
        """
        in_one = not self._program.options.stream or (var_name is None and not self._outside)
        if in_one and not return_meta_data:
            return self._whole(var_name)
        return self._view.text_async_iter(var_name, return_meta_data)

    text_async_iter = text_iter

    async def _whole(self, name: str | None) -> AsyncIterator[Any]:
        yield await self.text() if name is None else await self._read(name, variables.streamed)

    def events(self) -> AsyncIterator[StreamEvent]:
        """Everything that happens, as it happens (see `ProgramState.events`)."""
        return self._view.events_async()


async def _settled(value: R | Pending[R]) -> R:
    """What the body of a `def` program returned; a read among it is awaited."""
    return await value if isinstance(value, Pending) else value
