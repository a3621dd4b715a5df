"""What a program writes on one of its branches: nodes for the backend, parts and variables for whoever reads.

Owns `BranchState`, the data behind every state object that users touch: it turns expressions into graph nodes, keeps
the branch's parts (text, captures, turns) and its variables, and makes forks, joins, marks and rewinds. It never waits;
reading is the states' (`state`, `async_state`). Each branch holds no thread.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from sgl.errors import InvalidParameter, InvalidProgram, SglError, SourceLocation
from sgl.lang.capture import Capture, UnknownName, user_location
from sgl.lang.defaults import model_format
from sgl.lang.expr import OWN_REASONING, Expr, ExprList, GenExpr, MediaExpr, RoleExpr, SelectExpr
from sgl.lang.graph import (
    MAIN_BRANCH,
    Fork,
    Gen,
    Join,
    LiteralText,
    Mark,
    Media,
    Node,
    Rewind,
    Role,
    Select,
    Text,
    lower_samples,
)
from sgl.lang.interpreter import Program
from sgl.lang.pending import Pending
from sgl.lang.tools import ToolPromptExpr
from sgl.lang.variables import Collected, Gathered, Part, Reasoning, Turn, Variable
from sgl.limits import DEFAULT_LIMITS

JoinMode = Literal["gather_variable", "concate_and_append"]
REASONING = "_reasoning_content"
"""After the name of a generation: the name of the reasoning in it."""
_MODES: dict[str, Literal["gather", "append"]] = {"gather_variable": "gather", "concate_and_append": "append"}


class Point:
    """A place in a branch that `rewind` goes back to. Made by `mark`."""

    __slots__ = ("branch", "label", "num_parts", "role")

    def __init__(self, branch: BranchState, label: str) -> None:
        self.branch = branch
        self.label = label
        self.num_parts = len(branch.parts)
        self.role = branch.role


class BranchState:
    """One branch of a running program.

    Args:
        program: what it belongs to.
        number: of the branch.
        parent: the branch that it was forked from; its variables and history so far are shared, not copied.
        path: its place in the tree of forks, from which seeds are derived.
    """

    def __init__(
        self,
        program: Program,
        number: int = MAIN_BRANCH,
        parent: BranchState | None = None,
        path: tuple[int, ...] = (),
        variables: Mapping[str, Variable] | None = None,
        history: tuple[Part, ...] = (),
    ) -> None:
        self.program = program
        self.number = number
        self.path = path
        self.inherited: Mapping[str, Variable] = variables or {}
        self.own: dict[str, Variable] = {}
        self.before = history
        self.parts: list[Part] = []
        self.role: str | None = parent.role if parent is not None else None
        self.joined: SourceLocation | None = None
        self.is_joined = False
        # Unnamed ones by identity, with the name they got; those before a fork belong to its children too.
        self._expressions: dict[int, tuple[Expr, str]] = dict(parent._expressions) if parent is not None else {}
        self._num_drawn = 0
        self._num_forks = 0
        self._num_marks = 0
        self._points: list[Point] = []  # that can be gone back to
        if number != MAIN_BRANCH:
            weakref.finalize(self, program.abandon, number).atexit = False

    def history(self) -> tuple[Part, ...]:
        """Everything on the branch, what was before its fork included."""
        return (*self.before, *self.parts)

    def names(self) -> dict[str, Variable]:
        """Every variable that can be read here."""
        return {**self.inherited, **self.own}

    def find(self, name: str) -> Variable | None:
        """The variable, or `None`."""
        found = self.own.get(name)
        return found if found is not None else self.inherited.get(name)

    def variable(self, name: str) -> Variable:
        """The variable.

        Raises:
            InvalidProgram: nothing captured that name (also a `KeyError`).
        """
        variable = self.find(name)
        if variable is None:
            self.program.raise_if_failed()
            known = ", ".join(repr(known) for known in self.names())
            hint = f"names here: {known}" if known else f"append it first: s += sgl.gen({name!r})"
            if self._num_forks:
                hint += f"; what a fork's branches have is here after join(), before it as branches[i][{name!r}]"
            raise UnknownName(f"nothing is captured as {name!r}", hint=hint, location=user_location())
        return variable

    def name_of(self, expr: GenExpr | SelectExpr) -> str:
        """The name under which a generation or select that was appended here is captured."""
        if expr.name is not None:
            return expr.name
        found = self._expressions.get(id(expr))
        if found is None:
            raise UnknownName("that expression was not appended to this state", location=user_location())
        return found[1]

    def define(self, name: str, variable: Variable) -> None:
        """Set a variable of this branch."""
        self.own[name] = variable
        self.program.notify()

    # --- appending ---

    def append(self, other: object, location: SourceLocation | None) -> None:
        """Append text or an expression."""
        if self.is_joined:
            raise InvalidProgram(
                f"this branch was joined at {self.joined}; nothing can be appended to it",
                hint="append before the join, or to the parent",
                location=location,
            )
        try:
            self._append(other, location)
        except SglError as error:
            raise error.at(location)  # noqa: B904 - the same error, with its place

    def _append(self, other: object, location: SourceLocation | None) -> None:
        match other:
            case str():
                self._append_text(str(other), location)  # of a subclass, its characters
            case ExprList():
                for item in other.items:
                    self._append(item, location)
            case GenExpr():
                self._append_gen(other, location)
            case SelectExpr():
                self._append_select(other, location)
            case RoleExpr():
                self._append_role(other, location)
            case MediaExpr():
                self._append_media(other, location)
            case ToolPromptExpr():
                text = other.toolbox.prompt(self.program.backend)
                is_first = bool(self.parts) and isinstance(self.parts[-1], Turn)
                self._append_text(text.lstrip("\n") if is_first else text, location)
            case _:
                check_appendable(other, location)

    def _append_text(self, text: str, location: SourceLocation | None) -> None:
        if text:
            self.parts.append(text)
            self.program.append(Text(id=0, branch=self.number, location=location, segments=(LiteralText(text),)))

    def _append_gen(self, expr: GenExpr, location: SourceLocation | None) -> None:
        name = self._name(expr)
        node, capture = self._asked(expr, name, location)
        if node.sampling.n == 1:
            nodes: tuple[Node, ...] = (node,)
        else:
            nodes = lower_samples(node, self.program.new_branches(node.sampling.n - 1), continued=True)
        captures: list[Capture] = []
        for each in nodes:
            if isinstance(each, Gen):
                captures.append(capture(each.branch))
            self.program.append(each, captures[-1] if isinstance(each, Gen) else None)
        self.parts.append(captures[0])  # of samples, the first goes on
        self._put(name, captures, expr.list_append)
        if node.reasoning is not None:
            self._put(f"{name}{REASONING}", [Reasoning(sample) for sample in captures], expr.list_append)

    def _asked(self, expr: GenExpr, name: str, location: SourceLocation | None) -> tuple[Gen, Callable[[int], Capture]]:
        """The node of a generation with everything resolved, and what makes the place of a value on a branch."""
        toolbox = expr.toolbox.on(self.program.backend) if expr.toolbox is not None else None
        form = toolbox.form() if toolbox is not None else expr.form
        reasoning = self._reasoning(expr.reasoning)
        inside = self._starts_inside(reasoning)
        sampling = expr.sampling(self.program.sampling)
        if sampling.seed is None and self.program.seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=self._seed())
        node = Gen(
            id=0,
            branch=self.number,
            location=location,
            name=name,
            sampling=sampling,
            constraint=toolbox.constraint() if toolbox is not None else expr.constraint,
            reasoning=reasoning,
            tools=toolbox.specs() if toolbox is not None else (),
            tool_choice=toolbox.choice if toolbox is not None else "auto",
            parallel_tool_calls=toolbox.parallel if toolbox is not None else True,
            tool_format=toolbox.format.name if toolbox is not None else "",
        )
        return node, lambda branch: Capture(name, branch, location, form, reasoning, toolbox, inside)

    def _reasoning(self, name: str | None) -> str | None:
        """A reasoning format by name: the model's own, where none was named."""
        if name != OWN_REASONING:
            return name
        found = model_format(self.program.backend, "reasoning")
        if found is None:
            raise InvalidParameter(
                "the backend does not say how its model reasons", hint='name it: model_type="qwen3"', param="model_type"
            )
        return found

    def _starts_inside(self, reasoning: str | None) -> bool | None:
        """Whether the text that the program wrote last has opened the reasoning; `None` where it says nothing of it."""
        if reasoning is None:
            return None
        from sgl.grammars.formats import opened_by

        written = list(itertools.takewhile(lambda part: isinstance(part, str), reversed(self.history())))
        return opened_by(reasoning, "".join(map(str, reversed(written))))

    def _append_select(self, expr: SelectExpr, location: SourceLocation | None) -> None:
        name = self._name(expr)
        node = Select(
            id=0,
            branch=self.number,
            location=location,
            name=name,
            choices=expr.choices,
            method=expr.method,
            temperature=expr.temperature,
            seed=expr.seed if expr.seed is not None else self._seed(),
            all_scores=expr.all_scores,
        )
        capture = Capture(name, self.number, location)
        self.program.append(node, capture)
        self.parts.append(capture)
        self._put(name, [capture], expr.list_append)

    def _append_media(self, expr: MediaExpr, location: SourceLocation | None) -> None:
        self.program.append(
            Media(
                id=0,
                branch=self.number,
                location=location,
                kind=expr.kind,
                digest=hashlib.sha256(expr.data).hexdigest(),
                data=expr.data,
                num_frames=expr.num_frames,
            )
        )

    def _append_role(self, expr: RoleExpr, location: SourceLocation | None) -> None:
        if expr.begin and self.role is not None:
            raise InvalidProgram(
                f"role {expr.role!r} begins inside role {self.role!r}",
                hint=f"end {self.role!r} first: roles do not nest",
                location=location,
            )
        if not expr.begin and self.role != expr.role:
            raise InvalidProgram(
                f"role {expr.role!r} ends, but {'no role' if self.role is None else repr(self.role)} is open",
                hint=f"begin {expr.role!r} before its end",
                location=location,
            )
        self.program.append(Role(id=0, branch=self.number, location=location, role=expr.role, begin=expr.begin))
        self.role = expr.role if expr.begin else None
        self.parts.append(Turn(self.role))

    def _name(self, expr: GenExpr | SelectExpr) -> str:
        if expr.name is not None:
            return expr.name
        name = self.program.unnamed()
        self._expressions[id(expr)] = (expr, name)
        return name

    def _put(self, name: str, values: Sequence[Variable], list_append: bool) -> None:
        """Define a captured name, or add to its list; several values are those of samples."""
        variable = values[0] if len(values) == 1 else Gathered(list(values))
        if list_append:
            before = self.find(name)
            if before is not None and not isinstance(before, Collected):
                raise InvalidProgram(
                    f"{name!r} has a value already, which is no list to append to",
                    hint="give list_append=True from the first one on, or another name",
                )
            variable = Collected([*(before.variables if before is not None else ()), variable])
        self.define(name, variable)

    def _seed(self) -> int | None:
        """For the next generation here: derived from the program's seed and this place in it."""
        if self.program.seed is None:
            return None
        self._num_drawn += 1
        return derived_seed(self.program.seed, *self.path, "node", self._num_drawn)

    # --- forks ---

    def fork(self, size: int, location: SourceLocation | None) -> list[BranchState]:
        """`size` branches that continue this one."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidParameter(f"size is {size!r}; expected an integer >= 1", param="size")
        if size > DEFAULT_LIMITS.max_fork:
            raise InvalidParameter(
                f"fork of {size}; at most {DEFAULT_LIMITS.max_fork} are allowed",
                hint="fork several times",
                location=location,
                param="size",
            )
        if self.is_joined:
            self.append("", location)  # raises
        children = self.program.new_branches(size)
        self.program.append(Fork(id=0, branch=self.number, location=location, children=children))
        variables, history = self.names(), self.history()
        self._num_forks += 1
        return [
            BranchState(self.program, child, self, (*self.path, self._num_forks, index), variables, history)
            for index, child in enumerate(children)
        ]

    def join(self, children: Sequence[BranchState], mode: str, location: SourceLocation | None) -> None:
        """Take the children's values as lists in fork order (or their text), and let the children go."""
        if mode not in _MODES:
            raise InvalidParameter(f"mode is {mode!r}; expected one of {', '.join(_MODES)}", param="mode")
        if any(child.is_joined for child in children):
            raise InvalidProgram("these branches were joined already", location=location)
        numbers = tuple(child.number for child in children)
        self.program.append(Join(id=0, branch=self.number, location=location, children=numbers, mode=_MODES[mode]))
        names = dict.fromkeys(name for child in children for name in child.own)
        for name in names:
            self.define(name, Gathered([child.own[name] for child in children if name in child.own]))
        for child in children:
            if _MODES[mode] == "append":
                self.parts.extend(child.parts)
            child.is_joined, child.joined = True, location
            self.program.abandon(child.number)

    # --- marks ---

    def mark(self, location: SourceLocation | None) -> Point:
        """This place, to come back to."""
        self._num_marks += 1
        point = Point(self, f"mark {self._num_marks}")
        self.program.append(Mark(id=0, branch=self.number, location=location, label=point.label))
        self._points.append(point)
        return point

    def rewind(self, point: Point, location: SourceLocation | None) -> None:
        """Drop what was appended since `point`; values that were captured since then can still be read."""
        if not isinstance(point, Point) or point.branch is not self:
            raise InvalidProgram(
                "rewind needs a mark of the same branch",
                hint="point = s.mark(); ...; s.rewind(point)",
                location=location,
            )
        if point not in self._points:
            raise InvalidProgram(
                "that mark was rewound past", hint="rewind to an earlier one, or mark again", location=location
            )
        del self._points[self._points.index(point) + 1 :]
        self.program.append(Rewind(id=0, branch=self.number, location=location, label=point.label))
        del self.parts[point.num_parts :]
        self.role = point.role


def check_appendable(other: object, location: SourceLocation | None) -> None:
    """Raise unless `other` is text or an expression."""
    if isinstance(other, (str, Expr)):
        return
    if isinstance(other, Pending):
        other.refuse("it is appended")
    shown = "None" if other is None else f"{other!r} ({type(other).__name__})"
    hint = "did a helper return nothing?" if other is None else "convert it with str(...)"
    if isinstance(other, Iterable) and hasattr(other, "join"):
        shown, hint = "a fork's group of states", "join it, and append what its states captured: s[name] is the list"
    elif hasattr(other, "_body_on"):
        hint = "s.call(program, ...) runs it on this state"
    elif hasattr(other, "_core"):
        hint = "append its text: state.text(); s.call(program, ...) goes on with this state"
    elif inspect.isawaitable(other):
        hint = "await it"
    raise InvalidProgram(
        f"{shown} cannot be appended to a prompt; expected text or an expression", hint=hint, location=location
    )


def derived_seed(seed: int, *place: object) -> int:
    """A seed for one place of a program, below 2^63.

    Example:
        >>> derived_seed(1, "node", 1) == derived_seed(1, "node", 1) != derived_seed(1, "node", 2)
        True
    """
    data = ":".join(map(str, (seed, *place))).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
