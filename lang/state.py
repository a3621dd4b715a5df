"""`ProgramState`: the prompt that a program writes, and the values that come back.

Owns what users touch as `s`: appending, reading, roles, forks. Each state is one branch of a running `Program` and
holds no thread. Reading a value is the only thing that waits.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from sgl.errors import InvalidParameter, InvalidProgram, SglError, SourceLocation, StateLost, Truncated
from sgl.grammars.spec import JsonSchema
from sgl.lang.expressions import Appendable, Expr, ExprList, GenExpr, MediaExpr, RoleExpr, SelectExpr, refuse
from sgl.lang.graph import (
    MAIN_BRANCH,
    Fork,
    Gen,
    Join,
    LiteralText,
    Media,
    Role,
    Select,
    Text,
    lower_samples,
    meta_info,
)
from sgl.lang.interpreter import Capture, Program, UnknownName, user_location
from sgl.lang.streams import Cursor, iterate, iterate_async
from sgl.limits import DEFAULT_LIMITS


class _Scope:
    """A variable that is the text between two points of a branch."""

    def __init__(self, parts: list[str | Capture]) -> None:
        self.parts = parts


class _Set:
    """A variable that Python code has set."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Gathered:
    """A variable that a join made: one value per child that has it, in fork order; or the samples of one generation."""

    def __init__(self, variables: list[_Variable]) -> None:
        self.variables = variables


_Variable: TypeAlias = "Capture | _Scope | _Set | _Gathered"


class _Turn:
    """A place where a chat turn begins (`role`) or ends (`None`)."""

    def __init__(self, role: str | None) -> None:
        self.role = role


class ProgramState:
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

    def __init__(
        self,
        program: Program,
        branch: int = MAIN_BRANCH,
        parent: ProgramState | None = None,
        variables: Mapping[str, _Variable] | None = None,
        history: tuple[str | Capture | _Turn, ...] = (),
    ) -> None:
        self.ret_value: Any = None
        """What the program's body returned."""
        self._program = program
        self._branch = branch
        self._inherited: Mapping[str, _Variable] = variables or {}
        self._own: dict[str, _Variable] = {}
        self._before: tuple[str | Capture | _Turn, ...] = history  # shared by siblings
        self._parts: list[str | Capture | _Turn] = []
        self._role: str | None = parent._role if parent is not None else None
        self._joined: SourceLocation | None = None
        self._is_joined = False
        if branch != MAIN_BRANCH:
            weakref.finalize(self, program.abandon, branch).atexit = False
        elif program.options.stream:  # whoever lets a stream go does not want the rest of it
            weakref.finalize(self, program.cancel).atexit = False

    def __repr__(self) -> str:
        names = ", ".join({**self._inherited, **self._own})
        return f"<ProgramState {self._program.options.name} branch {self._branch}: {names or 'no values'}>"

    def _history(self) -> tuple[str | Capture | _Turn, ...]:
        return (*self._before, *self._parts)

    # --- appending ---

    def __iadd__(self, other: Appendable) -> ProgramState:
        self._append(other, user_location())
        return self

    def _append(self, other: object, location: SourceLocation | None) -> None:
        if self._is_joined:
            raise InvalidProgram(
                f"this branch was joined at {self._joined}; nothing can be appended to it",
                hint="append before the join, or to the parent",
                location=location,
            )
        try:
            self._append_checked(other, location)
        except SglError as error:
            raise error.at(location)  # noqa: B904 - the same error, with its place

    def _append_checked(self, other: object, location: SourceLocation | None) -> None:
        match other:
            case str():
                other = str(other)  # of a subclass, its characters
                if other:
                    self._parts.append(other)
                    self._program.append(
                        Text(id=0, branch=self._branch, location=location, segments=(LiteralText(other),))
                    )
            case ExprList():
                for item in other.items:
                    self._append_checked(item, location)
            case GenExpr():
                self._append_gen(other, location)
            case SelectExpr():
                name = other.name or self._program.unnamed()
                node = Select(
                    id=0,
                    branch=self._branch,
                    location=location,
                    name=name,
                    choices=other.choices,
                    method=other.method,
                    temperature=other.temperature,
                    seed=other.seed,
                    all_scores=other.all_scores,
                )
                self._capture(node, Capture(name, self._branch, location, None, False))
            case RoleExpr():
                self._append_role(other, location)
            case MediaExpr():
                digest = hashlib.sha256(other.data).hexdigest()
                self._program.append(
                    Media(
                        id=0,
                        branch=self._branch,
                        location=location,
                        kind=other.kind,
                        digest=digest,
                        data=other.data,
                        num_frames=other.num_frames,
                    )
                )
            case _:
                self._check_appendable(other, location)

    def _check_appendable(self, other: object, location: SourceLocation | None) -> None:
        if isinstance(other, (str, Expr)):
            return
        shown = "None" if other is None else f"{other!r} ({type(other).__name__})"
        hint = "did a helper return nothing?" if other is None else "convert it with str(...)"
        raise InvalidProgram(
            f"{shown} cannot be appended to a prompt; expected text or an expression", hint=hint, location=location
        )

    def _append_gen(self, expr: GenExpr, location: SourceLocation | None) -> None:
        name = expr.name or self._program.unnamed()
        sampling = expr.sampling(self._program.sampling)
        is_json = isinstance(expr.constraint, JsonSchema)
        node = Gen(
            id=0, branch=self._branch, location=location, name=name, sampling=sampling, constraint=expr.constraint
        )
        if sampling.n == 1:
            self._capture(node, Capture(name, self._branch, location, expr.dtype, is_json))
            return
        samples: list[_Variable] = []
        for each in lower_samples(node, self._program.new_branches(sampling.n)):
            capture = None
            if isinstance(each, Gen):
                capture = Capture(name, each.branch, location, expr.dtype, is_json)
                samples.append(capture)
            self._program.append(each, capture)
        self._define(name, _Gathered(samples))

    def _capture(self, node: Gen | Select, capture: Capture) -> None:
        self._program.append(node, capture)
        self._parts.append(capture)
        self._define(capture.name, capture)

    def _define(self, name: str, variable: _Variable) -> None:
        self._own[name] = variable
        self._program.notify()

    def _append_role(self, expr: RoleExpr, location: SourceLocation | None) -> None:
        if expr.begin and self._role is not None:
            raise InvalidProgram(
                f"role {expr.role!r} begins inside role {self._role!r}",
                hint=f"end {self._role!r} first: roles do not nest",
                location=location,
            )
        if not expr.begin and self._role != expr.role:
            raise InvalidProgram(
                f"role {expr.role!r} ends, but {'no role' if self._role is None else repr(self._role)} is open",
                hint=f"begin {expr.role!r} before its end",
                location=location,
            )
        self._program.append(Role(id=0, branch=self._branch, location=location, role=expr.role, begin=expr.begin))
        self._role = expr.role if expr.begin else None
        self._parts.append(_Turn(self._role))

    # --- roles ---

    def _turn(self, role: str, expr: Appendable | None) -> Any:
        location = user_location()
        if expr is not None:
            self._check_appendable(expr, location)
            self._append(ExprList((RoleExpr(role, True), expr, RoleExpr(role, False))), location)
            return None
        return self._open_turn(role, location)

    @contextmanager
    def _open_turn(self, role: str, location: SourceLocation | None) -> Iterator[None]:
        self._append(RoleExpr(role, True), location)
        yield  # after an exception the turn stays open: the program is over
        self._append(RoleExpr(role, False), location)

    def system(self, expr: Appendable | None = None) -> Any:
        """A system turn with `expr`; without it, a context manager that is the turn."""
        return self._turn("system", expr)

    def user(self, expr: Appendable | None = None) -> Any:
        """A turn of the user with `expr`; without it, a context manager that is the turn."""
        return self._turn("user", expr)

    def assistant(self, expr: Appendable | None = None) -> Any:
        """A turn of the assistant with `expr`; without it, a context manager that is the turn."""
        return self._turn("assistant", expr)

    # --- reading values ---

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def get_var(self, name: str) -> Any:
        """The value of `name`: text of a generation or select, a list after a join, or what Python set. Waits.

        Raises:
            InvalidProgram: nothing captured that name (also a `KeyError`).
            SglError: the program failed; the error points at its line.
        """
        return self._resolve(self._variable(name))

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def set_var(self, name: str, value: Any) -> None:
        """Set a variable of this branch; it is not part of the prompt."""
        self._define(name, _Set(value))

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        variable = self._find(name)
        if variable is None:
            self._program.raise_if_failed()
            return False
        self._resolve(variable)
        return True

    def value(self, name: str) -> Any:
        """The value as what it is: int, float, bool, str for `dtype`, an object for `json_schema`; else the text.

        Raises:
            Truncated: the text ended before it was a complete value; `partial` holds it.
        """
        return self._typed(self._variable(name))

    def get_meta_info(self, name: str) -> Any:
        """How `name` came about: `finish_reason`, token counts, log-probabilities; for a select, the scores. Waits.

        A list of these after a join.
        """
        return self._meta(self._variable(name), name)

    def probabilities(self, name: str) -> dict[str, float]:
        """Of a select: each option with its probability (0 for what `all_scores=False` did not compute). Waits."""
        meta = self.get_meta_info(name)
        if isinstance(meta, list):
            raise InvalidProgram(
                f"{name!r} has several values, from a join or from n",
                hint=f"ask the branch that selected: branch.probabilities({name!r})",
            )
        if not isinstance(meta, dict) or "probabilities" not in meta:
            raise InvalidProgram(f"{name!r} is not a select", hint="only selects have probabilities of options")
        found: dict[str, float] = meta["probabilities"]
        return found

    def _find(self, name: str) -> _Variable | None:
        found = self._own.get(name)
        return found if found is not None else self._inherited.get(name)

    def _variable(self, name: str) -> _Variable:
        program = self._program
        if self._find(name) is None and program.body_running:
            program.wait_for(lambda: self._find(name) is not None or not program.body_running)
        variable = self._find(name)
        if variable is None:
            program.raise_if_failed()
            known = ", ".join(repr(known) for known in {**self._inherited, **self._own}) or "none yet"
            raise UnknownName(f"nothing is captured as {name!r}", hint=f"names here: {known}", location=user_location())
        return variable

    def _resolve(self, variable: _Variable) -> Any:
        match variable:
            case Capture():
                return self._program.wait(variable).value
            case _Scope():
                return "".join(self._text_of(part) for part in variable.parts)
            case _Set():
                return variable.value
            case _Gathered():
                return [self._resolve(item) for item in variable.variables]

    def _text_of(self, part: str | Capture) -> str:
        return part if isinstance(part, str) else self._program.wait(part).value

    def _typed(self, variable: _Variable) -> Any:
        if isinstance(variable, _Gathered):
            return [self._typed(item) for item in variable.variables]
        if not isinstance(variable, Capture) or (variable.dtype is None and not variable.is_json):
            return self._resolve(variable)
        text = self._program.wait(variable).value
        try:
            if variable.is_json:
                return json.loads(text)
            return _PARSERS[str(variable.dtype)](text.strip())
        except (ValueError, KeyError) as error:
            raise Truncated(
                f"{variable.name!r} is not a complete {variable.dtype or 'JSON value'}: {text!r}",
                hint="raise max_tokens",
                location=variable.location,
                partial=text,
            ) from error

    def _meta(self, variable: _Variable, name: str) -> Any:
        if isinstance(variable, _Gathered):
            return [self._meta(item, name) for item in variable.variables]
        if not isinstance(variable, Capture):
            raise InvalidProgram(f"{name!r} was not generated; it has no meta information", location=user_location())
        return meta_info(self._program.wait(variable))

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """Capture the text that is appended inside the `with` (markers of chat turns are not part of it)."""
        start = len(self._parts)
        yield
        self._define(name, _Scope([part for part in self._parts[start:] if not isinstance(part, _Turn)]))

    # --- the whole state ---

    def text(self) -> str:
        """Everything in this state, template text included. Waits for what was appended."""
        program = self._program
        if program.body_running:
            program.wait_for(lambda: not program.body_running)
        if self._branch == MAIN_BRANCH:
            if program.closing:
                program.wait_end()
            if program.done is not None:
                return program.done.text
        elif self._is_joined:
            raise StateLost("this branch was joined and released", hint="read its text before the join")
        return program.read_state(self._branch).text

    def messages(self) -> list[dict[str, str]]:
        """The chat turns so far, as `{"role": ..., "content": ...}`. Waits for their values."""
        found: list[dict[str, str]] = []
        role: str | None = None
        content: list[str] = []
        for part in (*self._history(), _Turn(None)):
            if not isinstance(part, _Turn):
                if role is not None:
                    content.append(self._text_of(part))
                continue
            if role is not None:
                found.append({"role": role, "content": "".join(content)})
            role, content = part.role, []
        return found

    def sync(self) -> None:
        """Wait until everything appended to this state is done; raises what went wrong."""
        program = self._program
        if program.body_running:
            program.wait_for(lambda: not program.body_running)
        if program.closing:
            program.wait_end()
        elif not self._is_joined:
            program.read_state(self._branch)
        else:
            for part in self._parts:
                if isinstance(part, Capture):
                    program.wait(part)

    def error(self) -> Exception | None:
        """What went wrong so far, or `None`. Waits like `sync`."""
        try:
            self.sync()
        except Exception as error:  # noqa: BLE001 - returned: that is the question
            return error
        return None

    def cancel(self) -> None:
        """Stop the whole program on the backend."""
        self._program.cancel()

    # --- streams ---

    def _cursor(self, var_name: str | None) -> Cursor:
        def capture() -> Capture | None:
            found = self._find(var_name) if var_name is not None else None
            return found if isinstance(found, Capture) else None

        def final() -> Any:
            return self.get_var(var_name) if var_name is not None else ""

        return Cursor(self._program, self._branch, var_name, capture, final)

    def text_iter(self, var_name: str | None = None) -> Iterator[Any]:
        """Text as it appears: of the state (of a fork child: since the fork), or of one variable.

        The pieces together are `text()`, or the variable's value. One piece comes of a run without `stream=True`, of
        a variable that no generation made (one that Python set, a scope's text, a join's list), and, in the body of a
        streaming run, of the whole state.

        Raises:
            InvalidProgram: nothing captured that name (also a `KeyError`).
            SglError: the program failed; what came before is given first.
        """
        program = self._program
        if not program.options.stream or (var_name is None and program.in_body):
            yield self.text() if var_name is None else self.get_var(var_name)
            return
        if not program.body_running:
            program.flush()
            # Nobody else captures anything now; in the body itself, waiting for the end would wait for ever.
            if var_name is not None and not isinstance(self._variable(var_name), Capture):
                yield self.get_var(var_name)
                return
        yield from iterate(self._program, self._cursor(var_name))

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """`text_iter` for `async for`, without a thread that waits.

        With `return_meta_data`, pairs of (piece, meta information): `{}` until the variable is complete.
        """
        if return_meta_data and var_name is None:
            raise InvalidParameter("return_meta_data needs var_name", param="return_meta_data")
        if not self._program.body_running:
            self._program.flush()
        if not self._program.options.stream:
            raise InvalidProgram("text_async_iter needs a streaming run", hint="run the program with stream=True")
        async for piece in iterate_async(self._program, self._cursor(var_name)):
            if not return_meta_data:
                yield piece
                continue
            found = self._find(var_name) if var_name is not None else None
            complete = isinstance(found, Capture) and found.event is not None
            yield piece, meta_info(found.event) if complete and isinstance(found, Capture) and found.event else {}

    # --- branches ---

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> ProgramStateGroup:
        """`size` states that continue this one. Nothing is copied and nothing computed twice."""
        refuse(position_ids_offset=position_ids_offset)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidParameter(f"size is {size!r}; expected an integer >= 1", param="size")
        location = user_location()
        if size > DEFAULT_LIMITS.max_fork:
            raise InvalidParameter(
                f"fork of {size}; at most {DEFAULT_LIMITS.max_fork} are allowed",
                hint="fork several times",
                location=location,
                param="size",
            )
        if self._is_joined:
            self._append("", location)
        children = self._program.new_branches(size)
        self._program.append(Fork(id=0, branch=self._branch, location=location, children=children))
        variables = {**self._inherited, **self._own}
        history = self._history()
        states = [ProgramState(self._program, child, self, variables, history) for child in children]
        return ProgramStateGroup(states, self)

    @contextmanager
    def copy(self, position_ids_offset: Sequence[int] | None = None) -> Iterator[ProgramState]:
        """One fork, joined at the end of the `with`."""
        group = self.fork(1, position_ids_offset)
        yield group[0]
        group.join()


class ProgramStateGroup:
    """The states that one `fork` made, in order."""

    def __init__(self, states: list[ProgramState], parent: ProgramState) -> None:
        self._states = states
        self._parent = parent

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: int) -> ProgramState:
        return self._states[index]

    def __setitem__(self, index: int, value: ProgramState) -> None:
        """What `group[i] += ...` does at its end; putting another state there is an error."""
        if value is not self._states[index]:
            raise InvalidProgram("a branch of a fork cannot be replaced", location=user_location())

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._states)

    def __iadd__(self, other: Appendable | Sequence[Appendable] | Callable[[int], Appendable]) -> ProgramStateGroup:
        location = user_location()
        if isinstance(other, (list, tuple)):
            if len(other) != len(self._states):
                raise InvalidProgram(
                    f"a list of {len(other)} for {len(self._states)} branches", hint="one per branch", location=location
                )
            items: list[object] = list(other)
        elif callable(other):
            items = [other(index) for index in range(len(self._states))]
        else:
            items = [other] * len(self._states)
        for state, item in zip(self._states, items, strict=True):
            state._append(item, location)
        return self

    def join(self, mode: Literal["gather_variable", "concate_and_append"] = "gather_variable") -> None:
        """Give the children's values to the parent as lists in fork order, and let the children go.

        Each name that a child captured or set since the fork becomes a list; it replaces what the parent had under
        that name. `concate_and_append` appends the children's text since the fork to the parent instead.
        """
        modes: dict[str, Literal["gather", "append"]] = {"gather_variable": "gather", "concate_and_append": "append"}
        if mode not in modes:
            raise InvalidParameter(f"mode is {mode!r}; expected one of {', '.join(modes)}", param="mode")
        location = user_location()
        if any(state._is_joined for state in self._states):
            raise InvalidProgram("these branches were joined already", location=location)
        parent = self._parent
        children = tuple(state._branch for state in self._states)
        parent._program.append(
            Join(id=0, branch=parent._branch, location=location, children=children, mode=modes[mode])
        )
        names = dict.fromkeys(name for state in self._states for name in state._own)
        for name in names:
            found = [state._own[name] for state in self._states if name in state._own]
            parent._define(name, _Gathered(found))
        for state in self._states:
            if modes[mode] == "append":
                parent._parts.extend(state._parts)
            state._is_joined, state._joined = True, location
            parent._program.abandon(state._branch)


def _bool(text: str) -> bool:
    return {"True": True, "False": False}[text]


_PARSERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": json.loads, "bool": _bool}
