"""A program as an artefact: its graph with holes for the arguments, checked, optimized, and free of its Python code.

Owns `CompiledProgram` (JSON and msgpack round trip, a stable hash, binding of arguments) and running it: one submission
per run, no body, no thread per row. Made by `SglFunction.compile`. A compiled program sends what the body would when it
is run; a body whose control flow depends on values cannot be compiled, and the error names the line where it does.

What is lost without the body: classes of Python (`gen(type=Person)` gives the decoded JSON), the calls of tools as
values, and streams.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from sgl.errors import InvalidParameter, InvalidProgram, SglError, SourceLocation
from sgl.lang import passes
from sgl.lang.backend import Backend
from sgl.lang.branches import derived_seed
from sgl.lang.checks import check
from sgl.lang.compiled_run import CompiledRun, Ends
from sgl.lang.dataflow import captures
from sgl.lang.defaults import backend_of, sampling_defaults
from sgl.lang.graph import (
    ARGUMENTS,
    MAIN_BRANCH,
    PROTOCOL,
    Gen,
    Graph,
    Head,
    LiteralText,
    Node,
    ProgramOptions,
    Release,
    Sampling,
    Segment,
    Select,
    Text,
    Var,
    check_head,
    check_integer,
    check_protocol,
    digest,
    sampling_values,
)
from sgl.lang.outputs import Output, renamed, variables_of
from sgl.lang.tracing import trace_body

if TYPE_CHECKING:
    from sgl.lang.function import SglFunction


class CompiledProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A program as data. Compiled with `fn.compile()`, or read with `CompiledProgram.load(path)`.

    Attributes:
        name: of the program.
        parameters: the arguments that a run has to give.
        graph: its nodes; a `Var` on the branch `ARGUMENTS` is a parameter.
        outputs: what its variables are made of.

    Example:
        >>> import sgl
        >>> @sgl.function
        ... def capital(s, country):
        ...     s += f"The capital of {country} is " + sgl.gen("city", stop=".")
        >>> program = capital.compile()
        >>> program.parameters, program.run(country="France", backend=sgl.MockBackend(["Paris."]))["city"]
        (('country',), 'Paris')
        >>> CompiledProgram.from_json(program.to_json()).digest == program.digest
        True
    """

    name: str
    parameters: tuple[str, ...]
    graph: Graph
    outputs: dict[str, Output]
    num_api_spec_tokens: int | None = None
    protocol: int = PROTOCOL

    # --- as data ---

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of what the program does: the same for programs that differ in source locations only."""
        facts = [self.name, self.parameters, digest(self.graph), self.outputs, self.num_api_spec_tokens]
        return hashlib.sha256(msgspec.msgpack.encode(facts, order="sorted")).hexdigest()

    def to_json(self) -> bytes:
        """The portable file form."""
        return msgspec.json.encode(self)

    def to_msgpack(self) -> bytes:
        """The compact form."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def from_json(data: bytes | str) -> CompiledProgram:
        """The program in a JSON text.

        Raises:
            InvalidProgram: not a program, of another protocol, or one whose graph does not make sense.
        """
        return _checked(lambda kind: msgspec.json.decode(data, type=kind))

    @staticmethod
    def from_msgpack(data: bytes) -> CompiledProgram:
        """The program in msgpack bytes; raises like `from_json`."""
        return _checked(lambda kind: msgspec.msgpack.decode(data, type=kind))

    def save(self, path: str | Path) -> None:
        """Write it as indented JSON; a file that exists is replaced."""
        Path(path).write_bytes(msgspec.json.format(self.to_json(), indent=2) + b"\n")

    @staticmethod
    def load(path: str | Path) -> CompiledProgram:
        """Read what `save` wrote; raises like `from_json`."""
        return CompiledProgram.from_json(Path(path).read_bytes())

    # --- running ---

    def bind(self, *args: Any, **arguments: Any) -> Graph:
        """The graph with its arguments filled in: what a run submits.

        Raises:
            InvalidParameter: an argument is missing, unknown, given twice, or neither text nor a number.
        """
        if len(args) > len(self.parameters):
            raise InvalidParameter(
                f"{len(args)} arguments for {self.name}, which takes {len(self.parameters)}: {self.parameters}"
            )
        values = dict(zip(self.parameters, args, strict=False))
        if twice := values.keys() & arguments.keys():
            raise InvalidParameter(f"{self.name} got {min(twice)!r} twice", param=min(twice))
        values.update(arguments)
        for name in (*values, *self.parameters):
            if name not in self.parameters or name not in values:
                what = "is missing" if name in self.parameters else "is no parameter"
                raise InvalidParameter(
                    f"{name!r} {what}", hint=f"{self.name} takes {', '.join(self.parameters) or 'none'}", param=name
                )
            if isinstance(values[name], bool) or not isinstance(values[name], (str, int, float)):
                raise InvalidParameter(f"{name} is {values[name]!r}; expected text or a number", param=name)

        def fill(segment: Segment) -> Segment:
            is_hole = isinstance(segment, Var) and segment.branch == ARGUMENTS
            return LiteralText(str(values[segment.name])) if is_hole and isinstance(segment, Var) else segment

        nodes = tuple(
            msgspec.structs.replace(node, segments=tuple(map(fill, node.segments))) if isinstance(node, Text) else node
            for node in self.graph.nodes
        )
        return passes.known_next(passes.merge_text(Graph(nodes=nodes)))

    def run(
        self,
        *args: Any,
        backend: Backend | None = None,
        deadline_s: float | None = None,
        cache_salt: str = "",
        seed: int | None = None,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> CompiledRun:
        """Run it and wait for its end.

        Args:
            seed: each generation without one gets a seed derived from it and from its place in the graph (another one
                than the body's run with the same seed gives it).
            chat_template_kwargs: further variables for the model's chat template, such as `{"enable_thinking": False}`.

        Raises:
            InvalidParameter: see `bind`; nothing was run.
            SglError: the program failed; `location` is its line.
        """
        graph = _seeded(self.bind(*args, **arguments), seed)
        run = CompiledRun(self, graph, self._options(deadline_s, cache_salt, priority, chat_template_kwargs), Ends())
        try:
            run.start(backend_of(backend))
            return run.wait()
        except BaseException:
            run.cancel()
            raise

    def run_batch(
        self,
        rows: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Backend | None = None,
        deadline_s: float | None = None,
        on_error: Literal["raise", "return"] = "raise",
        cache_salt: str = "",
        seed: int | None = None,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run it for every row, all at once and without a thread for any of them; the runs in the order of the rows.

        Args:
            on_error: `raise` the first error as soon as it is there, and cancel the other rows; `return` it in the
                place of its row.
        """
        if on_error not in ("raise", "return"):
            raise InvalidParameter(f"on_error is {on_error!r}; expected 'raise' or 'return'", param="on_error")
        graphs = [self.bind(**row) if isinstance(row, Mapping) else self.bind(*row) for row in rows]
        chosen = backend_of(backend)
        options = self._options(deadline_s, cache_salt, priority, chat_template_kwargs)
        ends = Ends()
        runs = [
            CompiledRun(
                self, _seeded(graph, derived_seed(seed, "row", row) if seed is not None else None), options, ends
            )
            for row, graph in enumerate(graphs)
        ]
        try:
            for run in runs:
                run.start(chosen)
            if on_error == "raise" and (failed := ends.first_failure(runs)) is not None:
                failed.wait()  # raises
            return [_result(run) if on_error == "return" else run.wait() for run in runs]
        except BaseException:
            for run in runs:
                run.cancel()
            raise

    def _options(
        self,
        deadline_s: float | None,
        cache_salt: str,
        priority: int,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> ProgramOptions:
        return ProgramOptions(
            name=self.name,
            deadline_s=deadline_s,
            priority=priority,
            cache_salt=cache_salt,
            num_api_spec_tokens=self.num_api_spec_tokens,
            chat_template_kwargs=dict(chat_template_kwargs or {}),
        )


def _result(run: CompiledRun) -> CompiledRun | SglError:
    try:
        return run.wait()
    except SglError as error:
        return error


def _seeded(graph: Graph, seed: int | None) -> Graph:
    """With a seed of its own for each generation that has none."""
    if seed is None:
        return graph
    check_integer("seed", seed, low=0)
    nodes: list[Node] = []
    for node in graph.nodes:
        if isinstance(node, Gen) and node.sampling.seed is None:
            own = msgspec.structs.replace(node.sampling, seed=derived_seed(seed, "compiled", node.id))
            node = msgspec.structs.replace(node, sampling=own)
        elif isinstance(node, Select) and node.seed is None:
            node = msgspec.structs.replace(node, seed=derived_seed(seed, "compiled", node.id))
        nodes.append(node)
    return msgspec.structs.replace(graph, nodes=tuple(nodes))


def _checked(decode: Callable[[Any], Any]) -> CompiledProgram:
    try:
        check_head(decode(Head))
        program: CompiledProgram = decode(CompiledProgram)
    except msgspec.MsgspecError as error:
        raise InvalidProgram(f"not a compiled program: {error}") from None
    check_protocol(msgspec.structs.replace(program.graph, protocol=program.protocol))
    check(program.graph, program.parameters)
    made = captures(program.graph)
    for name, output in program.outputs.items():
        for variable in variables_of(output):
            if variable.branch != ARGUMENTS and (variable.branch, variable.name) not in made:
                raise InvalidProgram(f"output {name!r} reads {variable.name!r}, which nothing captures")
    return program


def compile_function(
    function: SglFunction,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    independent: Collection[str] = (),
    scores: bool | Collection[str] = True,
    sampling: Mapping[str, Any] | None = None,
    backend: Backend | None = None,
) -> CompiledProgram:
    """What `SglFunction.compile` does; see there."""
    for param, given in (("independent", independent), ("scores", scores)):
        if isinstance(given, str):
            raise InvalidParameter(f"{param} is {given!r}; expected a list of names", hint=f"[{given!r}]", param=param)
    base = sampling_defaults(backend) if backend is not None else Sampling()
    resolved = msgspec.structs.replace(base, **sampling_values(dict(sampling or {})))
    trace = trace_body(function, args, kwargs, sampling=resolved)
    again = trace_body(function, args, kwargs, sampling=resolved, rough=True)
    if digest(again.graph) != digest(trace.graph) or again.outputs != trace.outputs:
        raise InvalidProgram(
            f"{function.__name__} does not append the same each time it is traced",
            hint="it changes text that is not known yet (strip, replace, dedent, ...), or depends on something besides "
            "its arguments; append texts as they are",
            location=_first_difference(trace.graph, again.graph),
        )
    check(trace.graph, trace.parameters)
    made = {node.name for node in trace.graph.nodes if isinstance(node, Gen)}
    if unknown := sorted(set(independent) - made):
        raise InvalidParameter(
            f"independent names {unknown[0]!r}, which {function.__name__} does not generate",
            hint=f"it generates {', '.join(sorted(made)) or 'nothing'}",
            param="independent",
        )
    graph = passes.fork_groups(passes.independent(trace.graph, independent))
    if scores is not True:
        graph = passes.select_tries(graph, scores or ())
    released = {node.branch for node in graph.nodes if isinstance(node, Release)}
    dead = {node.branch for node in graph.nodes} - {MAIN_BRANCH, *released}
    graph = passes.known_next(passes.liveness(passes.merge_text(graph), dead))
    check(graph, trace.parameters)
    names = _captured(trace.graph)
    moved = dict(zip(names, _captured(graph), strict=True))
    outputs = {
        name: renamed(output, lambda v: moved.get(v, v))
        for name, output in trace.outputs.items()
        if all(variable in moved or variable.branch == ARGUMENTS for variable in variables_of(output))
    }
    return CompiledProgram(
        name=trace.name,
        parameters=trace.parameters,
        graph=graph,
        outputs=outputs,
        num_api_spec_tokens=function.num_api_spec_tokens,
    )


def _captured(graph: Graph) -> list[Var]:
    """Where each value is found, in program order."""
    return [Var(node.name, node.branch) for node in graph.nodes if isinstance(node, (Gen, Select))]


def _first_difference(one: Graph, other: Graph) -> SourceLocation | None:
    for left, right in zip(one.nodes, other.nodes, strict=False):
        if left != right:
            return left.location
    return one.nodes[-1].location if one.nodes else None
