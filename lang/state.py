"""`ProgramState`: the prompt that a program writes, and the values that come back.

Owns what users touch as `s` in a `def` program: appending, reading, roles, forks, streams. Each state shows one branch
of a running `Program` (`branches.BranchState`) and holds no thread. Reading a value is the only thing that waits; in an
`async def` program it is awaited (`async_state`).
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, ParamSpec, TypeAlias, cast, overload

from sgl.errors import GenerationError, InvalidParameter, InvalidProgram, SourceLocation, StateLost
from sgl.lang import variables
from sgl.lang.arguments import refuse
from sgl.lang.blocks import block
from sgl.lang.branches import BranchState, Point, check_appendable
from sgl.lang.capture import Capture, user_location
from sgl.lang.expr import Appendable, ExprList, GenExpr, RoleExpr, SelectExpr
from sgl.lang.fork import ProgramStateGroup
from sgl.lang.graph import MAIN_BRANCH, Usage
from sgl.lang.interpreter import Program
from sgl.lang.pending import Pending
from sgl.lang.repair import Check, Feedback, repairing
from sgl.lang.streams import Cursor, StreamEvent, event_stream, event_stream_async, iterate, iterate_async, piece_meta
from sgl.lang.tools import Call, OnError, Read, ToolFunction, round_expression, run_calls, tool_loop
from sgl.lang.variables import Reasoning, Scope, Set, Turn, Variable

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import TypeVar

    from sgl.lang.function import SglFunction

    R_co = TypeVar("R_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Name: TypeAlias = "str | GenExpr[Any] | SelectExpr"


class StateBase:
    """What states of `def` and of `async def` programs have in common: everything that does not wait."""

    def __init__(self, program: Program, core: BranchState | None = None) -> None:
        self._core = core if core is not None else BranchState(program)

    @property
    def _program(self) -> Program:
        return self._core.program

    def __repr__(self) -> str:
        core = self._core
        names = ", ".join(core.names()) or "no values"
        return f"<{type(self).__name__} {core.program.options.name} branch {core.number}: {names}>"

    def to_html(self) -> str:
        """The run as it is now, as one page without anything from elsewhere (see `sgl.lang.record`)."""
        return self._program.record.to_html()

    def _repr_html_(self) -> str:
        return self._program.record._repr_html_()

    __iter__: ClassVar[None] = None  # `s[name]` is no item of a sequence

    # --- appending ---

    def __iadd__(self, other: Appendable) -> Self:  # type: ignore[misc] # `+` itself is refused
        self._core.append(other, user_location())
        return self

    def __add__(self, other: object) -> NoReturn:
        raise InvalidProgram(
            "a state was added to with +, which would make another one; it is appended to in place",
            hint="write s += ... in place of s = s + ...",
            location=user_location(),
        )

    def _turn(self, role: str, expr: Appendable | None) -> Any:
        location = user_location()
        if expr is not None:
            check_appendable(expr, location)
            self._core.append(ExprList((RoleExpr(role, True), expr, RoleExpr(role, False))), location)
            return None
        return self._open_turn(role, location)

    @block
    def _open_turn(self, role: str, location: SourceLocation | None) -> Iterator[None]:
        self._core.append(RoleExpr(role, True), location)
        yield  # after an exception the turn stays open: the program is over
        self._core.append(RoleExpr(role, False), location)

    def system(self, expr: Appendable | None = None) -> Any:
        """A system turn with `expr`; without it, a context manager that is the turn."""
        return self._turn("system", expr)

    def user(self, expr: Appendable | None = None) -> Any:
        """A turn of the user with `expr`; without it, a context manager that is the turn."""
        return self._turn("user", expr)

    def assistant(self, expr: Appendable | None = None) -> Any:
        """A turn of the assistant with `expr`; without it, a context manager that is the turn."""
        return self._turn("assistant", expr)

    # --- variables ---

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def set_var(self, name: str, value: Any) -> None:
        """Set a variable of this branch; it is not part of the prompt."""
        if isinstance(value, Pending):
            value.refuse("it is kept")
        self._core.define(name, Set(value))

    @block
    def var_scope(self, name: str) -> Iterator[None]:
        """Capture the text that is appended inside the `with` (markers of chat turns are not part of it)."""
        core = self._core
        start = len(core.parts)
        yield
        core.define(name, Scope([part for part in core.parts[start:] if not isinstance(part, Turn)]))

    def cancel(self) -> None:
        """Stop the whole program on the backend."""
        self._program.cancel()

    # --- branches ---

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> ProgramStateGroup[Self]:
        """`size` states that continue this one. Nothing is copied and nothing computed twice."""
        refuse(position_ids_offset=position_ids_offset)
        children = self._core.fork(size, user_location())
        return ProgramStateGroup([type(self)(self._program, child) for child in children], self)

    @block
    def copy(self, position_ids_offset: Sequence[int] | None = None) -> Iterator[Self]:
        """One fork, joined at the end of the `with`."""
        group = self.fork(1, position_ids_offset)
        yield group[0]
        group.join()

    def _nothing(self) -> Any:
        """What a method gives that does not wait."""
        return None

    def mark(self) -> Point:
        """This place of the prompt, for `rewind`. Costs nothing."""
        return self._core.mark(user_location())

    def rewind(self, point: Point) -> None:
        """Drop what was appended since `point = s.mark()`. What was computed up to there is kept.

        Values that were captured since then can still be read. Who streams the whole text has seen what is dropped.

        Example:
            >>> import sgl
            >>> @sgl.function
            ... def two(s):
            ...     s += "A number: "
            ...     point = s.mark()
            ...     s += sgl.gen("first")
            ...     s.rewind(point)
            ...     s += sgl.gen("second")
            >>> state = two.run(backend=sgl.MockBackend(["1", "2"]))
            >>> state["first"], state["second"], state.text()
            ('1', '2', 'A number: 2')
        """
        self._core.rewind(point, user_location())


class ProgramState(StateBase, Generic[R_co]):
    """One prompt state of a running program: `s` in `def program(s): ...`. Made by `run` and by `fork`.

    Example:
        >>> import sgl
        >>> @sgl.function
        ... def chat(s, question):
        ...     s += sgl.user(question) + sgl.assistant(sgl.gen("answer"))
        >>> state = chat.run("Why?", backend=sgl.MockBackend(["Because."]))
        >>> state["answer"], state.messages()[1]
        ('Because.', {'role': 'assistant', 'content': 'Because.'})
    """

    @property
    def ret_value(self) -> R_co:
        """What the program's body returned. Waits for its end."""
        self._await_body()
        self._program.raise_if_failed()
        return cast(R_co, self._program.returned)

    def _await_body(self) -> None:
        """Wait until the body, which runs on another thread, has ended or failed."""
        if self._program.body_running:
            self._program.wait_for(lambda: not self._program.body_running)

    # --- reading values ---

    @overload
    def __getitem__(self, name: GenExpr[T]) -> T: ...
    @overload
    def __getitem__(self, name: str | SelectExpr) -> Any: ...
    def __getitem__(self, name: Name) -> Any:
        return self._read(name, variables.resolve)

    def get_var(self, name: Name) -> Any:
        """The value of `name`: text of a generation or select, the value of `gen(type=T)`, a list after a join, or what
        Python set. Waits. The expression that was appended can stand for its name, and tells type checkers the type.

        Raises:
            InvalidProgram: nothing captured that name (also a `KeyError`).
            Truncated: a typed value's text ended before it was complete; `partial` holds it.
            SglError: the program failed; the error points at its line.
        """
        return self._read(name, variables.resolve)

    def _read(self, name: Name, look: Callable[[Variable], Any]) -> Any:
        variable = self._variable(name)
        self._program.wait(variables.captures(variable))
        return look(variable)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        variable = self._core.find(name)
        if variable is None:
            self._program.raise_if_failed()
            return False
        self._program.wait(variables.captures(variable))
        return True

    def value(self, name: Name) -> Any:
        """The value as what it is: int, float, bool, str for `dtype`, an object for `json_schema`; else the text.

        Raises:
            Truncated: the text ended before it was a complete value; `partial` holds it.
        """
        return self._read(name, variables.typed)

    def get_meta_info(self, name: Name) -> Any:
        """How `name` came about: `finish_reason`, token counts, log-probabilities; for a select, the scores. Waits.

        A list of these after a join.
        """
        location = user_location()
        return self._read(name, lambda variable: variables.meta(variable, str(self._name(name)), location))

    def probabilities(self, name: Name) -> dict[str, float]:
        """Of a select: each option with its probability (0 for what `all_scores=False` did not compute). Waits."""
        return variables.probabilities(self.get_meta_info(name), self._name(name))

    def _name(self, name: Name) -> str:
        return self._core.name_of(name) if isinstance(name, (GenExpr, SelectExpr)) else name

    def _variable(self, name: Name) -> Variable:
        core, program = self._core, self._program
        key = self._name(name)
        if core.find(key) is None and program.body_running:
            program.wait_for(lambda: core.find(key) is not None or not program.body_running)
        return core.variable(key)

    # --- requirements, subprograms ---

    def require(
        self,
        expr: GenExpr[T],
        check: Check,
        *,
        feedback: Feedback | None = None,
        attempts: int = 3,
    ) -> T:
        """Append a generation whose value has to pass `check`; its value, once one does.

        A value that fails is taken back (what was computed before it is kept), and another one is drawn. The prompt
        goes on from the value that passed, as if it had been the first.

        Args:
            expr: a `gen` of one value.
            check: given the value; it passes where this gives something true. What is false (`None` too), a text (the
                reason), or a `ValueError` or `AssertionError` means that it fails.
            feedback: what the model is told before the next attempt: given (value, reason), something to append after
                the failed value. It is gone from the prompt once a value passes.
            attempts: most values to draw.

        Raises:
            RequirementFailed: none passed; `value` and `reason` are those of the last one.

        Example:
            >>> import sgl
            >>> @sgl.function
            ... def even(s):
            ...     s += "An even number: "
            ...     s.require(sgl.gen("n", type=int), lambda n: n % 2 == 0)
            >>> even.run(backend=sgl.MockBackend(["3", "4"])).text()
            'An even number: 4'
        """
        location = user_location()
        steps = repairing(self._core, expr, check, feedback, attempts, location)
        read: Any = None
        while True:
            try:
                steps.send(read)
            except StopIteration as done:
                return cast(T, done.value)
            try:
                read = self[expr]
            except GenerationError as error:  # a typed value that is none
                read = error

    def calls(self, name: Name) -> list[Call]:
        """The tool calls in what `gen(name, tools=[...])` gave, in order; none where it answered. Waits."""
        location = user_location()
        return self._read(name, lambda variable: variables.calls(variable, self._name(name), location))  # type: ignore[no-any-return]

    def tools(
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
        """Let the model call Python functions until it answers; the answer, which is captured as `name`.

        Each round is a turn of the assistant; the calls in it run beside each other, and their results are told in the
        model's own form. What was called is in `s[name + "_calls"]`, a list of `CallResult`. Say what there is to call
        in a system turn (`sgl.tool_prompt`).

        Args:
            functions: typed Python functions with docstrings, plain or `async def`.
            tool_choice: for the first round: `auto`, `none`, `required`, or the name of a function.
            parallel: whether one turn may hold several calls.
            on_error: `return` tells the model what a function raised; `raise` ends the program with `ToolError`.
            max_rounds: rounds with calls at most; then the model has to answer.
            tool_format: how the model writes calls: a name of `sgl.grammars.formats.TOOL_FORMATS`; the model's own
                without it.
            role: of the turns with results; another one than `user` (as `tool`) gets each bare in a turn of its own.
            sampling: of every round, as `gen` has them.

        Raises:
            ToolError: a call failed, with `on_error="raise"`; its cause is what the function raised.

        Example:
            >>> import sgl
            >>> def add(a: int, b: int) -> int:
            ...     "Add two numbers."
            ...     return a + b
            >>> @sgl.function
            ... def sums(s, question):
            ...     s += sgl.system(sgl.tool_prompt([add])) + sgl.user(question)
            ...     return s.tools([add])
            >>> call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
            >>> state = sums.run("2 + 3?", backend=sgl.MockBackend([call, "It is 5."]))
            >>> state.ret_value, [result.value for result in state["answer_calls"]]
            ('It is 5.', [5])
        """
        location = user_location()
        expression = round_expression(functions, name, tool_choice, parallel, tool_format, sampling)
        steps = tool_loop(self._core, expression, name, on_error, max_rounds, role, location)
        sent: Any = None
        while True:
            try:
                step = steps.send(sent)
            except StopIteration:
                return str(self[name])
            sent = self.calls(step.expr) if isinstance(step, Read) else run_calls(step.calls)

    def call(self, program: SglFunction[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the body of another program on this state: what it appends and captures is appended here.

        `program.run(...)` in a body starts from an empty prompt instead.
        """
        return cast(R, body_of(program)(self, args, kwargs))

    # --- the whole state ---

    def text(self) -> str:
        """Everything in this state, template text included. Waits for what was appended."""
        program, core = self._program, self._core
        self._await_body()
        if core.number == MAIN_BRANCH:
            if program.closing:
                program.wait_end()
            if program.done is not None:
                return program.done.text
        elif core.is_joined:
            raise StateLost("this branch was joined and released", hint="read its text before the join")
        return program.read_state(core.number).text

    def messages(self) -> list[dict[str, str]]:
        """The chat turns so far, as `{"role": ..., "content": ...}`. Waits for their values."""
        history = self._core.history()
        self._program.wait(part for part in history if isinstance(part, Capture))
        return variables.turns(history)

    @property
    def usage(self) -> Usage:
        """Tokens of the whole program: prompt, cached, prefilled, generated and so on. Waits for its end."""
        self.sync()
        self._program.wait_end()
        done = self._program.done
        return done.usage if done is not None else Usage()

    def sync(self) -> None:
        """Wait until everything appended to this state is done; raises what went wrong."""
        program, core = self._program, self._core
        self._await_body()
        if program.closing:
            program.wait_end()
        elif not core.is_joined:
            program.read_state(core.number)
        else:
            program.wait(part for part in core.parts if isinstance(part, Capture))

    def error(self) -> Exception | None:
        """What went wrong so far, or `None`. Waits like `sync`."""
        try:
            self.sync()
        except Exception as error:  # noqa: BLE001 - returned: that is the question
            return error
        return None

    # --- streams ---

    def _cursor(self, var_name: str | None) -> Cursor:
        core = self._core

        def capture() -> Capture | Reasoning | None:
            found = core.find(var_name) if var_name is not None else None
            return found if isinstance(found, (Capture, Reasoning)) else None

        def final() -> Any:
            return self.get_var(var_name) if var_name is not None else ""

        return Cursor(self._program, core.number, var_name, capture, final)

    def text_iter(self, var_name: str | None = None) -> Iterator[Any]:
        """Text as it appears: of the state (of a fork child: since the fork), or of one variable.

        The pieces together are `text()`, or the variable's text. One piece comes of a run without `stream=True`, of
        a variable that no generation made (one that Python set, a scope's text, a join's list), and, in the body of a
        streaming run, of the whole state.

        Raises:
            InvalidProgram: nothing captured that name (also a `KeyError`).
            SglError: the program failed; what came before is given first.
        """
        program = self._program
        if not program.options.stream or (var_name is None and program.in_body):
            yield self.text() if var_name is None else self._whole(var_name)
            return
        if not program.body_running:
            program.flush()
            # Nobody else captures anything now; in the body itself, waiting for the end would wait for ever.
            if var_name is not None and not isinstance(self._variable(var_name), (Capture, Reasoning)):
                yield self.get_var(var_name)
                return
        for piece in iterate(program, self._cursor(var_name)):
            if piece.text != "":
                yield piece.text

    def _whole(self, name: str) -> Any:
        """The text of a capture, or the value of another variable."""
        return self._read(name, variables.streamed)

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """`text_iter` for `async for`, without a thread that waits.

        With `return_meta_data`, pairs of (piece, meta information): the tokens of that piece with their
        log-probabilities, and how many there are so far; the last pair has everything else too.
        """
        if return_meta_data and var_name is None:
            raise InvalidParameter("return_meta_data needs var_name", param="return_meta_data")
        if not self._program.body_running:
            self._program.flush()
        if not self._program.options.stream:
            raise InvalidProgram("text is streamed by a streaming run alone", hint="run the program with stream=True")
        num_tokens = 0
        async for piece in iterate_async(self._program, self._cursor(var_name)):
            num_tokens += len(piece.token_ids)
            if return_meta_data:
                yield piece.text, piece_meta(piece, num_tokens)
            elif piece.text != "":
                yield piece.text

    def events(self) -> Iterator[StreamEvent]:
        """Everything that happens, as it happens: text, deltas, values, joins and the end, of all branches.

        In a fork child, or in the body: of this branch, until its generations are done. Needs `stream=True`.

        Raises:
            SglError: the program failed; what came before is given first.

        Example:
            >>> import sgl
            >>> @sgl.function
            ... def hello(s):
            ...     s += "Hello " + sgl.gen("who")
            >>> state = hello.stream(backend=sgl.MockBackend(["new world"]))
            >>> [(event.kind, event.name, event.text) for event in state.events()]
            [('text', None, 'Hello '), ('delta', 'who', 'new'), ('delta', 'who', ' world'), \
('value', 'who', 'new world'), ('done', None, 'Hello new world')]
        """
        yield from event_stream(self._program, self._own_branches())

    async def events_async(self) -> AsyncIterator[StreamEvent]:
        """`events` for `async for`."""
        async for event in event_stream_async(self._program, self._own_branches()):
            yield event

    def _own_branches(self) -> list[BranchState] | None:
        """Those whose events are wanted: all, from outside of a program."""
        core, program = self._core, self._program
        whole = core.number == MAIN_BRANCH and (program.closing or program.body_running)
        return None if whole else [core]


def body_of(program: object) -> Callable[..., Any]:
    """What runs the body of a program on a state.

    Raises:
        InvalidProgram: it is no `@sgl.function`.
    """
    run: Callable[..., Any] | None = getattr(program, "_body_on", None)
    if run is None:
        raise InvalidProgram(
            f"s.call got {program!r}; expected a program",
            hint="decorate it with @sgl.function, or call it as the plain function that it is: helper(s, ...)",
            location=user_location(),
        )
    return run


def outer_state(state: ProgramState[Any]) -> ProgramState[Any]:
    """The same state for who started the program: a stream that is let go is cancelled."""
    outer: ProgramState[Any] = ProgramState(state._program, state._core)
    if state._program.options.stream:
        let_go_cancels(outer)
    return outer


def let_go_cancels(state: ProgramState[Any]) -> None:
    """Cancel the program when nobody holds this view of it any more: the rest of its stream is not wanted."""
    weakref.finalize(state, state._program.cancel).atexit = False
