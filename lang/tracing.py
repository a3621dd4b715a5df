"""What a program's body appends, learned without a model: the trace that compiling and explaining start from.

Owns `Unknown`, the stand-in for text that is not known yet (an argument that is left open, a value that a generation
will have), and the backend that records a body's graph and answers every generation with one. A body is traced when
somebody asks for it and never otherwise; nothing is computed, and nothing leaves the process.

An `Unknown` is a string that may be put together (`+`, f-strings, `"".join`) and nothing else. Whatever would need the
text itself (a comparison, `len`, `strip`, a lookup) raises `InvalidProgram` with the program's line. Its characters are
a marker that is found again in the texts that the body appends, and turned into a `Var`; a marker that was changed on
the way is an error as well.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import msgspec

from sgl.errors import InvalidProgram, SglError, SourceLocation
from sgl.lang.backend import EventSink
from sgl.lang.capture import Capture, user_location
from sgl.lang.forms import form_name
from sgl.lang.graph import (
    ARGUMENTS,
    ChoiceScore,
    DoneEvent,
    Fork,
    Gen,
    Graph,
    Join,
    JoinedEvent,
    LiteralText,
    Mark,
    Node,
    ProgramOptions,
    Rewind,
    Role,
    Sampling,
    Segment,
    Select,
    StateText,
    Text,
    ValueEvent,
    Var,
)
from sgl.lang.interpreter import Program
from sgl.lang.outputs import ListOutput, Output, ReasoningOutput, TextOutput
from sgl.lang.passes import merge_text
from sgl.lang.state import ProgramState
from sgl.lang.variables import Gathered, Reasoning, Variable, texts

if TYPE_CHECKING:
    from sgl.lang.function import SglFunction

_EDGE = "\U000f5347"
"""Begins and ends a marker: a private-use character that no prompt has."""

Assumed = Mapping[str, Any]
"""Values that explaining takes as given: by name, a text, or a list of texts in order of the generations."""


class Unknown(str):
    """Text that is not known while a program is traced. See the module."""

    __slots__ = ("what",)
    what: str

    @classmethod
    def of(cls, marker: str, what: str) -> Unknown:
        """The stand-in for `what` ("argument 'x'"), written as `marker`."""
        made = cls(marker)
        made.what = what
        return made

    def _refuse(self, does: str) -> NoReturn:
        raise InvalidProgram(
            f"{self.what} is not known while the program is traced, and {does} needs it",
            hint="give its value (trace(name=value), explain(assume={name: value})), or run the program untraced",
            location=user_location(),
        )

    def __add__(self, other: Any) -> Any:
        if isinstance(other, str):
            return Unknown.of(str.__add__(str.__str__(self), str.__str__(other)), self.what)
        return NotImplemented  # an expression: its own addition takes it

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, str):
            return Unknown.of(str.__add__(str.__str__(other), str.__str__(self)), self.what)
        return NotImplemented

    def __rmod__(self, other: Any) -> Any:
        return str.__mod__(other, str.__str__(self)) if isinstance(other, str) else NotImplemented

    def __format__(self, spec: str) -> str:
        if spec:
            self._refuse(f"the format {spec!r}")
        return str.__str__(self)

    def __str__(self) -> str:
        return str.__str__(self)

    def __repr__(self) -> str:
        return f"<{self.what}>{_EDGE}"  # a lone edge: what is made with it is found out

    def __hash__(self) -> int:
        self._refuse("a lookup")

    def __eq__(self, other: object) -> bool:
        self._refuse("a comparison")

    def __ne__(self, other: object) -> bool:
        self._refuse("a comparison")


_SPOKEN = {"bool": "an if", "iter": "a loop over it", "contains": "'in'", "getitem": "a slice"}


def _refusing(name: str) -> Callable[..., NoReturn]:
    shown = name.strip("_")
    does = _SPOKEN.get(shown, f"{shown}()")

    def method(self: Unknown, *_: object, **__: object) -> NoReturn:
        self._refuse(does)

    return method


_ALLOWED = {"__new__", "__init__", "__class__", "__getattribute__", "__reduce__", "__reduce_ex__", "__getnewargs__"}
for _name in (*dir(str), "__bool__", "__int__", "__float__"):
    _special = _name.startswith("__")
    if _name in vars(Unknown) or _name in _ALLOWED or (_special and _name in vars(object)):
        continue
    setattr(Unknown, _name, _refusing(_name))
for _name in ("__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Unknown, _name, lambda self, other: self._refuse("a comparison"))


class Markers:
    """The stand-ins of one trace, and how to find them again in text.

    Args:
        rough: write markers with what string functions like to change (spaces at the ends, a line break, quotes), so
            that two traces differ wherever a body has processed text that it does not know.
    """

    def __init__(self, *, rough: bool = False) -> None:
        self._shape = f" \n{_EDGE}'A\"a.%d{_EDGE}\t\n " if rough else f"{_EDGE}%d{_EDGE}"
        self._pattern = re.compile(re.escape(self._shape).replace("%d", r"(\d+)"))
        self._variables: list[Var] = []

    def stand_in(self, variable: Var, what: str) -> Unknown:
        """A new one."""
        self._variables.append(variable)
        return Unknown.of(self._shape.replace("%d", str(len(self._variables) - 1)), what)

    def segments(self, text: str, location: SourceLocation | None = None) -> tuple[Segment, ...]:
        """The literal and variable parts of a text.

        Raises:
            InvalidProgram: a marker in it was changed.
        """
        parts: list[Segment] = []
        for index, part in enumerate(self._pattern.split(text)):
            if index % 2:
                parts.append(self._variables[int(part)])
            elif _EDGE in part:
                raise InvalidProgram(
                    "text that is not known while the program is traced was changed by a string function",
                    hint="append it as it is, or run the program untraced",
                    location=location,
                )
            elif part:
                parts.append(LiteralText(part))
        return tuple(parts)


@dataclass(frozen=True)
class Trace:
    """What a body appended.

    Attributes:
        name: of the program.
        graph: all of it as one graph; text that was not known is a `Var`, arguments on the branch `ARGUMENTS`.
        parameters: arguments that were left open.
        outputs: per variable of the main state, what it is made of.
        values: by node, what generations were assumed to give.
        num_fragments: messages that the program would have sent to its backend.
        stopped: why and where the trace ended before the body did, or `None`.
    """

    name: str
    graph: Graph
    parameters: tuple[str, ...] = ()
    outputs: Mapping[str, Output] = field(default_factory=dict)
    values: Mapping[int, str] = field(default_factory=dict)
    num_fragments: int = 1
    stopped: InvalidProgram | None = None

    def __str__(self) -> str:
        return "\n".join(line_of(node) for node in self.graph.nodes)


def line_of(node: Node) -> str:
    """A node as a line for people.

    Example:
        >>> line_of(Text(id=3, branch=1, segments=(LiteralText("Q: "), Var("question", ARGUMENTS))))
        "3 [1] text 'Q: '{question}"
    """
    what = type(node).__name__.lower()
    match node:
        case Text(segments=segments):
            what += " " + "".join(repr(s.text) if isinstance(s, LiteralText) else "{" + s.name + "}" for s in segments)
        case Gen(name=name) | Select(name=name):
            what += f" {name}"
        case Fork(children=children) | Join(children=children):
            what += f" {', '.join(map(str, children))}"
        case Role(role=role, begin=begin):
            what = f"{role} {'begins' if begin else 'ends'}"
        case Mark(label=label) | Rewind(label=label):
            what += f" {label}"
        case _:
            pass
    return f"{node.id} [{node.branch}] {what}"


def trace_body(
    function: SglFunction,
    args: Iterable[Any],
    kwargs: Mapping[str, Any],
    *,
    sampling: Sampling | None = None,
    assume: Assumed | None = None,
    rough: bool = False,
    partial: bool = False,
) -> Trace:
    """Run a body against a recorder.

    Args:
        args, kwargs: the program's arguments; parameters without a default that get none are left open.
        sampling: what generations that do not say it themselves have.
        assume: values that generations are taken to give; others are `Unknown`.
        partial: where the body cannot go on, give what it appended so far instead of raising.

    Raises:
        InvalidProgram: the body needs text that is not known, or raised something else; `location` is its line.
    """
    markers = Markers(rough=rough)
    positional = tuple(args)
    given, opened = _open_parameters(function, positional, dict(kwargs), markers)
    recorder = _Recorder(markers, assume or {})
    program = Program(recorder, ProgramOptions(name=function.__name__), sampling or Sampling())
    state = ProgramState(program)
    stopped: InvalidProgram | None = None
    try:
        _finish(function.func(*function._receiver, function._body_state(state), *positional, **given))
        program.flush(finish=True)
    except InvalidProgram as error:
        stopped = error
    except SglError:
        raise
    except Exception as error:  # noqa: BLE001 - the body's own, on values that are stand-ins
        stopped = InvalidProgram(
            f"the body raised {type(error).__name__} while it was traced: {error}",
            hint="arguments and values that are not known are stand-ins while a program is traced; give their values",
            location=_body_line(error.__traceback__),
        )
        stopped.__cause__ = error
    if stopped is not None and not partial:
        raise stopped
    graph = _resolved(recorder.nodes, markers)
    outputs = {} if stopped is not None else _outputs(state, markers)
    return Trace(function.__name__, graph, opened, outputs, recorder.values, max(1, recorder.num_fragments), stopped)


def tell_unused(assume: Assumed | None, traces: Iterable[Trace]) -> None:
    """Warn of a name that values were assumed for, and that no trace, gone through to its end, has generated."""
    made: set[str] = set()
    for trace in traces:
        if trace.stopped is not None:
            return
        made.update(node.name for node in trace.graph.nodes if isinstance(node, (Gen, Select)))
    if unused := [name for name in assume or () if name not in made]:
        known = ", ".join(sorted(made)) or "nothing"
        warnings.warn(f"a value is assumed for {unused[0]!r}, which is not generated ({known})", stacklevel=3)


def _open_parameters(
    function: SglFunction, positional: tuple[Any, ...], kwargs: dict[str, Any], markers: Markers
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The named arguments, with a stand-in for each parameter that has neither a value nor a default."""
    merged = {**kwargs, **function.bind_arguments}
    opened = []
    for index, parameter in enumerate(function.__signature__.parameters.values()):
        has_value = index < len(positional) or parameter.name in merged
        kinds = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if has_value or parameter.kind in kinds or parameter.default is not parameter.empty:
            continue
        merged[parameter.name] = markers.stand_in(Var(parameter.name, ARGUMENTS), f"argument {parameter.name!r}")
        opened.append(parameter.name)
    function._arguments(positional, merged)  # checks
    return merged, tuple(opened)


def _finish(result: object) -> None:
    """Wait for the body of an async program; nothing in it waits for anything outside."""
    if not inspect.isawaitable(result):
        return

    async def body() -> None:
        await result

    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(body())
        except BaseException as error:  # noqa: BLE001 - raised below, on the caller's thread
            failures.append(error)

    thread = threading.Thread(target=run, name="sgl-trace")  # the caller's own may have a loop that runs
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def _body_line(frames: TracebackType | None) -> SourceLocation | None:
    """The innermost line of a traceback that is the program's (see `capture.user_location`)."""
    found = None
    while frames is not None:
        code = frames.tb_frame.f_code
        if not frames.tb_frame.f_globals.get("__name__", "").startswith(("sgl.lang.", "sgl.grammars.")):
            found = SourceLocation(code.co_filename, frames.tb_lineno, code.co_name)
        frames = frames.tb_next
    return found


def _resolved(nodes: Iterable[Node], markers: Markers) -> Graph:
    """The recorded nodes as one graph, markers turned into variables."""
    found: list[Node] = []
    for node in nodes:
        if isinstance(node, Text):
            text = "".join(segment.text for segment in node.segments if isinstance(segment, LiteralText))
            node = msgspec.structs.replace(node, segments=markers.segments(text, node.location))
        found.append(node)
    return merge_text(Graph(nodes=tuple(found)))


def _outputs(state: ProgramState, markers: Markers) -> dict[str, Output]:
    """Every variable of a state; what is not made of texts is left out."""
    found = {}
    for name, variable in state._core.names().items():
        output = _output(variable, markers)
        if output is not None:
            found[name] = output
    return found


def _output(variable: Variable, markers: Markers) -> Output | None:
    match variable:
        case Capture(form=form):
            text = TextOutput(markers.segments(str.__str__(variable.done.value)))
            return msgspec.structs.replace(text, form=form_name(form), is_typed=form is not None and form.is_typed)
        case Reasoning(capture=capture):
            (place,) = markers.segments(str.__str__(capture.done.value)) or (None,)
            return ReasoningOutput(place) if isinstance(place, Var) else None
        case Gathered(variables=each):
            items = [_output(item, markers) for item in each]
            return ListOutput(tuple(item for item in items if item is not None)) if None not in items else None
        case _:
            return _text_output(texts(variable), markers)


def _text_output(value: Any, markers: Markers) -> Output | None:
    if isinstance(value, str):
        return TextOutput(markers.segments(str.__str__(value)))
    if not isinstance(value, (list, tuple)):
        return None
    items = [_text_output(item, markers) for item in value]
    return ListOutput(tuple(item for item in items if item is not None)) if None not in items else None


class _Recorder:
    """A backend that computes nothing: it keeps the nodes, and answers at once."""

    def __init__(self, markers: Markers, assume: Assumed) -> None:
        self.nodes: list[Node] = []
        self.values: dict[int, str] = {}
        self.num_fragments = 0
        self._markers = markers
        self._assume = {name: list(v) if isinstance(v, (list, tuple)) else v for name, v in assume.items()}

    def open(self, sink: EventSink, options: ProgramOptions) -> _Recording:
        return _Recording(self, sink)

    def flush_cache(self) -> bool:
        return False

    def server_info(self) -> Mapping[str, Any]:
        return {"backend": "trace"}

    def shutdown(self) -> None:
        """Nothing to release."""

    def answer(self, node: Gen | Select) -> ValueEvent:
        value = self._value(node)
        choices: tuple[ChoiceScore, ...] = ()
        if isinstance(node, Select):
            share = 1 / len(node.choices)
            choices = tuple(ChoiceScore(choice, (), (), 0.0, share) for choice in node.choices)
        return ValueEvent(node=node.id, branch=node.branch, name=node.name, value=value, choices=choices)

    def _value(self, node: Gen | Select) -> str:
        given = self._assume.get(node.name)
        if isinstance(given, list):
            given = given.pop(0) if given else None
        elif callable(given):
            given = given(node)
        if given is None:
            return self._markers.stand_in(Var(node.name, node.branch), f"the value of {node.name!r}")
        if isinstance(node, Select) and given not in node.choices:
            raise InvalidProgram(
                f"{given!r} is assumed for {node.name!r}, which chooses between {', '.join(map(repr, node.choices))}",
                hint="assume one of the options",
                location=node.location,
            )
        self.values[node.id] = str(given)
        return str(given)


class _Recording:
    """The session of a trace."""

    def __init__(self, recorder: _Recorder, sink: EventSink) -> None:
        self._recorder = recorder
        self._sink = sink

    def submit(self, graph: Graph, *, finish: bool = False) -> None:
        recorder = self._recorder
        recorder.num_fragments += 1
        recorder.nodes.extend(graph.nodes)
        for node in graph.nodes:
            if isinstance(node, (Gen, Select)):
                self._sink(recorder.answer(node))
            elif isinstance(node, Join):
                self._sink(JoinedEvent(node.id, node.branch))
        if finish:
            self._sink(DoneEvent())

    def read_state(self, branch: int) -> Future[StateText]:
        future: Future[StateText] = Future()
        stand_in = self._recorder._markers.stand_in(Var("text()", branch), "the text of the state")
        future.set_result(StateText(cast(str, stand_in)))
        return future

    def cancel(self) -> None:
        self._sink(DoneEvent())


__all__ = ["Assumed", "Markers", "Trace", "Unknown", "line_of", "trace_body"]
