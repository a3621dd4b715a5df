"""The values that are appended to a prompt: generations, choices, turns, media, and their sums with text.

Owns the immutable expression classes. `expressions` and `turns` have the functions that users call to make them;
`branches` turns them into graph nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeAlias

import msgspec

from sgl.errors import InvalidProgram
from sgl.grammars.spec import Constraint
from sgl.lang.forms import Form
from sgl.lang.graph import ChoicesMethod, MediaKind, Sampling

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import TypeVar

    from sgl.lang.tools import Toolbox

    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)


OWN_REASONING = "model"
"""In the place of a reasoning format: the one of the model that will generate."""


class Expr:
    """Something that can be appended to a prompt. Immutable; `+` with another one or with text gives a sequence."""

    __slots__ = ()

    def __add__(self, other: object) -> ExprList:
        if not isinstance(other, (str, Expr)):
            return NotImplemented
        return ExprList((*items_of(self), *items_of(other)))

    def __radd__(self, other: object) -> ExprList:
        if not isinstance(other, str):
            return NotImplemented
        return ExprList((other, *items_of(self)))

    def __str__(self) -> str:
        raise InvalidProgram(
            f"{type(self).__name__} was turned into text (by an f-string, str() or format())",
            hint='join it with +: "text " + sgl.gen("name"), and not f"text {sgl.gen(...)}"',
        )

    def __format__(self, spec: str) -> str:
        return str(self)

    def __bool__(self) -> bool:
        raise InvalidProgram(
            f"{type(self).__name__} was used as a condition; it has no value yet",
            hint='append it, and read its value: s += sgl.gen("name"); if s["name"] == ...',
        )


@dataclass(frozen=True)
class ExprList(Expr):
    """Expressions and text in order."""

    items: tuple[str | Expr, ...]


@dataclass(frozen=True)
class GenExpr(Expr, Generic[T_co]):
    """A generation: `given` holds the sampling fields that the caller set, as `Sampling` stores them.

    `T_co` is what `s[expr]` gives: text, or the type of `gen(type=T)`.
    """

    name: str | None
    given: tuple[tuple[str, Any], ...] = ()
    constraint: Constraint | None = None
    form: Form | None = None
    list_append: bool = False
    reasoning: str | None = None
    toolbox: Toolbox | None = None

    def sampling(self, base: Sampling) -> Sampling:
        """The fields given here over those of the run; the stops of the value's form come on top.

        Not where reasoning comes first: they would end it.
        """
        values = dict(self.given)
        stops = values.get("stop", base.stop)
        own = self.form.stops if self.form is not None and self.reasoning is None else ()
        extra = tuple(stop for stop in own if stop not in stops)
        if not values and not extra:
            return base
        return msgspec.structs.replace(base, **(values | {"stop": stops + extra} if extra else values))

    def with_seed(self, seed: int) -> Self:
        """The same with another seed."""
        return replace(self, given=(*(pair for pair in self.given if pair[0] != "seed"), ("seed", seed)))


@dataclass(frozen=True)
class SelectExpr(Expr):
    """A choice between options by score."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod = "token_length_normalized"
    temperature: float = 0.0
    seed: int | None = None
    all_scores: bool = True
    list_append: bool = False


@dataclass(frozen=True)
class RoleExpr(Expr):
    """The beginning or end of a chat turn."""

    role: str
    begin: bool


@dataclass(frozen=True)
class MediaExpr(Expr):
    """An image or video part; `data` are the bytes of the file."""

    kind: MediaKind
    data: bytes
    num_frames: int | None = None


Appendable: TypeAlias = str | Expr


def items_of(value: Appendable) -> tuple[str | Expr, ...]:
    """An expression's parts in order."""
    return value.items if isinstance(value, ExprList) else (value,)
