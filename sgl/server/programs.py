"""Programs over HTTP: request graphs in, values or events out.

Owns the routes below and the programs that are open. What is executed is the graph as `sgl.lang.graph` has it, so that
`sgl.RemoteEngine` runs any program exactly as in process; a graph that is a file (`fn.compile().save(...)`) is posted
as it is, with its arguments.

    POST   /v1/programs                          a whole program, or the first fragment of one that goes on
    POST   /v1/programs/{id}/fragments           the next fragment
    GET    /v1/programs/{id}/branches/{branch}   the text and the tokens of a live branch
    DELETE /v1/programs/{id}                     stop it

A whole program without `stream` is answered with its values. A stream has the program's events; it is the program's
lease as well: when its reader goes away, the state on the server is freed. One that rests longer than `program_lease`,
all that it was sent being done and no state being read, fails with `StateLost`; the engine, which alone knows when it
rests, counts.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from sgl.errors import InvalidParameter, NotFound, SglError
from sgl.lang.compile import CompiledProgram
from sgl.lang.graph import (
    ARGUMENTS,
    LONGEST_S,
    PROTOCOL,
    DoneEvent,
    Event,
    FailedEvent,
    Graph,
    LiteralText,
    ProgramOptions,
    Text,
    ValueEvent,
    Var,
    from_json,
)
from sgl.server.bodies import check_count, check_expanded
from sgl.server.call import Call
from sgl.server.routes import Routes
from sgl.server.running import Running, merged

routes = Routes()

MAX_ROWS = 1024
"""Bindings of one request: each is a program."""

MAX_NODES = 2**18
"""Nodes of all these programs together."""

_NUMBER = re.compile("[0-9]{1,18}")


class ProgramRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/programs`.

    Attributes:
        graph: the nodes with their `protocol` number, in place of `program`.
        program: a compiled program; its arguments are in `bindings`: one object, or a list of them for several runs.
        options: fields of `sgl.lang.graph.ProgramOptions`.
        finish: nothing follows; without it the program stays open for fragments (`stream` must be on).
        stream: events as they come.
    """

    graph: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    program: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    bindings: dict[str, Any] | list[dict[str, Any]] | None = None
    options: dict[str, Any] = {}
    finish: bool = True
    stream: bool = False


class FragmentRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/programs/{id}/fragments`."""

    graph: msgspec.Raw
    finish: bool = False


class Started(msgspec.Struct, frozen=True, tag="program"):
    """The first event of a stream: the program's id, for fragments."""

    id: str
    protocol: int = PROTOCOL


class OpenProgram(NamedTuple):
    """A program that takes fragments; no key but the one that opened it reaches it."""

    running: Running
    key: str | None


@routes.post("/v1/programs", "user", ProgramRequest)
async def start_program(call: Call, body: ProgramRequest) -> Any:
    """Run a program, or begin one that goes on."""
    graphs, single = await asyncio.to_thread(_graphs, body)
    options = _options(call, body)
    if not body.finish and not (body.stream and single):
        raise InvalidParameter(
            "finish is false, which wants stream and a single program", hint="set stream to true", param="finish"
        )
    if body.stream and single:
        return call.stream(_one(call, graphs[0], options, body.finish), done=False, named=_type)
    programs = [call.start(graph, options) for graph in graphs]
    if body.stream:
        return call.stream(_rows(programs), done=False, named=lambda event: _type(event["event"]))
    answers = await call.while_connected(_values(programs))
    return answers[0] if single else {"rows": answers}


def _graphs(body: ProgramRequest) -> tuple[list[Graph], bool]:
    """The graphs to run, and whether one was asked for."""
    graph, file = bytes(body.graph), bytes(body.program)
    if bool(graph) == bool(file):
        raise InvalidParameter("give one of graph and program", param="graph")
    if graph:
        if body.bindings is not None:
            raise InvalidParameter(
                "bindings go with program: a graph has no arguments", hint="leave them out", param="bindings"
            )
        return [from_json(graph)], True
    program = CompiledProgram.from_json(file)
    rows = body.bindings if isinstance(body.bindings, list) else [body.bindings or {}]
    check_count("bindings", len(rows), MAX_ROWS)
    _check_size(program.graph, rows)
    return [program.bind(**row) for row in rows], not isinstance(body.bindings, list)


def _check_size(graph: Graph, rows: Sequence[Mapping[str, Any]]) -> None:
    """Before there are copies of the template: each row holds its nodes, and its text with the arguments in it."""
    if (num_nodes := len(graph.nodes) * len(rows)) > MAX_NODES:
        raise InvalidParameter(
            f"{len(rows)} bindings of {len(graph.nodes)} nodes make {num_nodes}; at most {MAX_NODES} are taken",
            hint="send fewer bindings at a time",
            param="bindings",
        )
    segments = [segment for node in graph.nodes if isinstance(node, Text) for segment in node.segments]
    written = sum(len(segment.text) for segment in segments if isinstance(segment, LiteralText))
    uses = Counter(segment.name for segment in segments if isinstance(segment, Var) and segment.branch == ARGUMENTS)
    size = written * len(rows) + sum(
        uses[name] * len(value) for row in rows for name, value in row.items() if isinstance(value, str)
    )
    check_expanded("bindings", size)


def _options(call: Call, body: ProgramRequest) -> ProgramOptions:
    try:
        options = msgspec.convert({**body.options, "stream": body.options.get("stream", body.stream)}, ProgramOptions)
    except msgspec.ValidationError as error:
        raise InvalidParameter(f"options: {error}", param="options") from None
    unknown = sorted(set(body.options) - set(ProgramOptions.__struct_fields__))
    if unknown:
        raise InvalidParameter(f"unknown program option {unknown[0]!r}", param=f"options.{unknown[0]}")
    lease_s = min(options.lease_s or LONGEST_S, call.server.config.program_lease)
    return msgspec.structs.replace(options, cache_salt=call.salt(options.cache_salt or None), lease_s=lease_s)


async def _one(
    call: Call, graph: Graph, options: ProgramOptions, finish: bool
) -> AsyncGenerator[Event | Started, None]:
    server = call.server
    program = call.start(graph, options, finish=finish)
    id = server.open_program(OpenProgram(program, call.key))
    try:
        yield Started(id)
        async for event in program.events(failures=True):
            yield event
    finally:
        server.close_program(id)


async def _rows(programs: list[Running]) -> AsyncGenerator[dict[str, Any], None]:
    async for row, event in merged(programs, failures=True):
        yield {"row": row, "event": event}


async def _values(programs: list[Running]) -> list[dict[str, Any]]:
    """Of each program its text, values and usage; one that failed has its error in their place."""
    answers: list[dict[str, Any]] = [{"values": []} for _ in programs]
    failures: dict[int, FailedEvent] = {}
    async for row, event in merged(programs, failures=True):
        match event:
            case ValueEvent():
                answers[row]["values"].append(event)
            case DoneEvent():
                answers[row].update(text=event.text, usage=event.usage)
            case FailedEvent():
                failures[row] = event
            case _:
                pass
    if len(programs) == 1 and failures:
        raise SglError.from_info(failures[0].error)
    for row, event in failures.items():
        answers[row]["error"] = event.error
    return answers


def _type(event: Any) -> str:
    return str(type(event).__struct_config__.tag)


def _opened(call: Call) -> OpenProgram:
    found = call.server.program(call.request.path_params["id"])
    if found is None or found.key != call.key:
        raise NotFound("there is no such program", hint="it ended, or belongs to another key")
    return found


@routes.post("/v1/programs/{id}/fragments", "user", FragmentRequest, goes_on=True)
async def add_fragment(call: Call, body: FragmentRequest) -> Any:
    """Continue a program; its events come on its stream."""
    opened = _opened(call)
    graph = await asyncio.to_thread(from_json, bytes(body.graph))
    opened.running.submit(graph, finish=body.finish)
    return call.json({"status": "ok"}, 202)


@routes.get("/v1/programs/{id}/branches/{branch}", "user", goes_on=True)
async def read_branch(call: Call) -> Any:
    """The text and token ids of a live branch, after everything submitted so far."""
    session = _opened(call).running.session
    branch = call.request.path_params["branch"]
    if not _NUMBER.fullmatch(branch):
        raise NotFound(f"there is no branch {branch[:32]!r}", hint="give the number of a branch of the program's graph")
    state = await call.while_connected(asyncio.wrap_future(session.read_state(int(branch))))
    return call.json(state)


@routes.delete("/v1/programs/{id}", "user", goes_on=True)
async def stop_program(call: Call) -> Any:
    """Stop a program and free its state."""
    _opened(call).running.cancel()
    return {"status": "ok"}
