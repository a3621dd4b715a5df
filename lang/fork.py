"""The states that one fork made, as a group.

Owns appending to all of them, and the join. A group of synchronous states can also be streamed as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic

from sgl.errors import InvalidProgram
from sgl.lang.branches import JoinMode
from sgl.lang.capture import user_location
from sgl.lang.expr import Appendable
from sgl.lang.streams import StreamEvent, event_stream

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from sgl.lang.state import ProgramState, StateBase

    S = TypeVar("S", bound=StateBase, default=ProgramState)
else:
    from typing import TypeVar

    S = TypeVar("S")


class ProgramStateGroup(Generic[S]):
    """The states that one `fork` made, in order.

    Example:
        >>> import sgl
        >>> @sgl.function
        ... def colours(s):
        ...     s += "A colour: "
        ...     branches = s.fork(2)
        ...     branches += sgl.gen("colour")
        ...     branches.join()
        >>> colours.run(backend=sgl.MockBackend(["red", "blue"]))["colour"]
        ['red', 'blue']
    """

    def __init__(self, states: list[S], parent: S) -> None:
        self._states = states
        self._parent = parent

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: int) -> S:
        return self._states[index]

    def __setitem__(self, index: int, value: S) -> None:
        """What `group[i] += ...` does at its end; putting another state there is an error."""
        if value is not self._states[index]:
            raise InvalidProgram("a branch of a fork cannot be replaced", location=user_location())

    def __iter__(self) -> Iterator[S]:
        return iter(self._states)

    def __iadd__(self, other: Appendable | Sequence[Appendable] | Callable[[int], Appendable]) -> ProgramStateGroup[S]:
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
            state._core.append(item, location)
        return self

    def text_iter(self, var_name: str | None = None) -> Iterator[tuple[int, str]]:
        """(index of the child, piece) of what the children generate (of one variable alone), as it appears.

        Ends when everything that was appended to them so far is there. Needs a streaming run.
        """
        numbers = {state._core.number: index for index, state in enumerate(self._states)}
        for event in self.events():
            if event.kind == "delta" and event.text and var_name in (None, event.name):
                yield numbers[event.branch], event.text

    def events(self) -> Iterator[StreamEvent]:
        """What happens on the children, until everything that was appended to them so far is there."""
        return event_stream(self._parent._program, [state._core for state in self._states])

    def join(self, mode: JoinMode = "gather_variable") -> Any:
        """Give the children's values to the parent as lists in fork order, and let the children go.

        Each name that a child captured or set since the fork becomes a list; it replaces what the parent had under
        that name. `concate_and_append` appends the children's text since the fork to the parent instead.
        It does not wait; in an `async def` program it may be awaited all the same.
        """
        self._parent._core.join([state._core for state in self._states], mode, user_location())
        return self._parent._nothing()
