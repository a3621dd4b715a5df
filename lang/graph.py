"""The request graph: what a program asks of a runtime, as data.

Owns the closed union `Node` and the `Graph` that holds nodes in program order; what comes back is in `events`. Builders
are the interpreter (fragments), the tracer (whole programs) and plain requests; executors are the engine, API backends,
the mock. Everything is frozen and serializable as msgpack and JSON. The runtime imports this module and no other of
`lang`: what it needs of the others has its name here, too.

Invariants, held by construction (`__post_init__`) and by `validate`:

* Values are resolved: a node says what will happen; no default is applied later. Numbers are finite.
* Edges are implied: nodes of one branch run in order, a `Var` waits for the value it names, `Fork` makes its children
  and `Join` waits for them. Nodes of different branches are independent otherwise.
* Text is a unit until a node other than `Text` and `Role` follows on its branch; only then is it tokenized.
* Roles are symbolic; the executor renders them with the model's own chat template.
* `id` is unique in a program, branch 0 is the program's main state, and both keep counting over its fragments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from sgl.errors import InvalidParameter, InvalidProgram, SourceLocation
from sgl.grammars.spec import Constraint
from sgl.lang.events import ChoiceScore as ChoiceScore
from sgl.lang.events import DeltaEvent as DeltaEvent
from sgl.lang.events import DoneEvent as DoneEvent
from sgl.lang.events import Event as Event
from sgl.lang.events import FailedEvent as FailedEvent
from sgl.lang.events import HandlesEvent as HandlesEvent
from sgl.lang.events import JoinedEvent as JoinedEvent
from sgl.lang.events import StateHandle as StateHandle
from sgl.lang.events import StateText as StateText
from sgl.lang.events import TextEvent as TextEvent
from sgl.lang.events import TokenLogprob as TokenLogprob
from sgl.lang.events import Usage as Usage
from sgl.lang.events import ValueEvent as ValueEvent
from sgl.lang.meta import meta_info as meta_info
from sgl.lang.patterns import check_stop_pattern as check_stop_pattern
from sgl.lang.reads import Reads as Reads
from sgl.lang.sampling import LONGEST_S as LONGEST_S
from sgl.lang.sampling import Sampling as Sampling
from sgl.lang.sampling import check_integer as check_integer
from sgl.lang.sampling import check_number as check_number
from sgl.lang.sampling import plain as plain
from sgl.lang.sampling import sampling_from_mapping as sampling_from_mapping
from sgl.lang.sampling import sampling_values as sampling_values
from sgl.lang.scoring import method_scores as method_scores
from sgl.lang.template_kwargs import check_template_kwargs as check_template_kwargs
from sgl.limits import DEFAULT_LIMITS, Limits

PROTOCOL = 1
"""Version of nodes and events; an executor refuses a graph with another number."""

MAIN_BRANCH = 0
ARGUMENTS = -1
"""The branch of a `Var` that is a parameter of a compiled program: a hole, filled before the graph is executed."""


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool that a generation may call: `parameters` is canonical JSON schema text."""

    name: str
    description: str
    parameters: str


# --- nodes ----------------------------------------------------------------------------------------------------------

ChoicesMethod: TypeAlias = Literal[
    "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
]
MediaKind: TypeAlias = Literal["image", "video", "audio"]


class LiteralText(msgspec.Struct, frozen=True, tag="literal"):
    """Text known now."""

    text: str


class Var(msgspec.Struct, frozen=True, tag="var"):
    """The value of the generation `name` on `branch`, once it exists."""

    name: str
    branch: int = MAIN_BRANCH


Segment: TypeAlias = LiteralText | Var


class NodeBase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Common fields: `id` in the program, the `branch` it extends, the program line that made it."""

    id: int
    branch: int = MAIN_BRANCH
    location: SourceLocation | None = None


class Text(NodeBase, frozen=True, tag="text"):
    """Append text as written: special tokens in it are plain characters."""

    segments: tuple[Segment, ...]


class Tokens(NodeBase, frozen=True, tag="tokens"):
    """Append token ids as they are (a prompt that was tokenized elsewhere)."""

    token_ids: tuple[int, ...]


class Role(NodeBase, frozen=True, tag="role"):
    """Begin or end a chat turn."""

    role: str
    begin: bool


class Media(NodeBase, frozen=True, tag="media"):
    """Append an image, video or audio part; `digest` (SHA-256, hex) is its identity in the cache."""

    kind: MediaKind
    digest: str
    data: bytes = b""
    num_frames: int | None = None


class Gen(NodeBase, frozen=True, tag="gen"):
    """Generate until a stop; the value is stored under `name` (unnamed ones get a name of their own).

    `tools` are those that it may call, for an executor that tells its model of tools itself; `tool_choice` (`auto`,
    `none`, `required`, or the name of one) and `parallel_tool_calls` say which calls it may write, `tool_format` (a
    name of `sgl.grammars.formats`) how the value has them. Where the program tells the model, `constraint` says all of
    it.

    With `reasoning`, the name of a format (`sgl.grammars.formats`), the value is everything that was generated, and the
    state keeps the answer in it alone.

    `next_text` is a hint that changes no value: literal text that is known to follow on the branch, whatever was
    generated (`sgl.lang.passes.known_next`). An executor may speculate with it or compute it early.
    """

    name: str
    sampling: Sampling = Sampling()
    constraint: Constraint | None = None
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    tool_format: str = ""
    next_text: str = ""
    reasoning: str | None = None


class Select(NodeBase, frozen=True, tag="select"):
    """Append the best-scoring option, or one drawn from the scores when `temperature` > 0.

    Without `all_scores` only as many option tokens are computed as it takes to know the best one.
    """

    name: str
    choices: tuple[str, ...]
    method: ChoicesMethod = "token_length_normalized"
    temperature: float = 0.0
    seed: int | None = None
    all_scores: bool = True

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, low=0.0, high=1000.0)
        if not self.choices:
            raise InvalidParameter(
                "choices is empty; expected at least one option",
                hint="pass the options to choose from",
                param="choices",
            )
        if len(self.choices) > DEFAULT_LIMITS.max_choices:
            raise InvalidParameter(
                f"{len(self.choices)} choices; at most {DEFAULT_LIMITS.max_choices} are allowed", param="choices"
            )
        for choice in self.choices:
            if not isinstance(choice, str) or not choice:
                raise InvalidParameter(f"choices contains {choice!r}; expected non-empty strings", param="choices")
        if self.seed is not None:
            check_integer("seed", self.seed, low=0)
        if len(set(self.choices)) != len(self.choices):
            raise InvalidParameter("choices contains the same option twice", param="choices")
        if self.method not in get_args(ChoicesMethod):
            raise InvalidParameter(
                f"choices method is {self.method!r}; expected one of {', '.join(get_args(ChoicesMethod))}",
                param="choices_method",
            )
        if not self.all_scores and self.temperature > 0:
            raise InvalidParameter(
                "all_scores=False finds the best option only, and temperature > 0 draws from the scores of all",
                hint="leave all_scores out, or set temperature to 0",
                param="all_scores",
            )


class Fork(NodeBase, frozen=True, tag="fork"):
    """New branches that continue this one; nothing is copied and nothing computed twice."""

    children: tuple[int, ...]


class Join(NodeBase, frozen=True, tag="join"):
    """Wait for all values of `children`. `gather` adds no text; `append` appends each child's text since the fork."""

    children: tuple[int, ...]
    mode: Literal["gather", "append"] = "gather"


class Tool(NodeBase, frozen=True, tag="tool"):
    """A call site: the caller runs the tool whose call `call` generated and answers in a later fragment."""

    name: str
    call: str


class Release(NodeBase, frozen=True, tag="release"):
    """The branch is used no more; its pages become cache."""


class Mark(NodeBase, frozen=True, tag="mark"):
    """Name this point of the branch."""

    label: str


class Rewind(NodeBase, frozen=True, tag="rewind"):
    """Truncate the branch to a mark; its KV up to there is kept."""

    label: str


Node: TypeAlias = Text | Tokens | Role | Media | Gen | Select | Fork | Join | Tool | Release | Mark | Rewind


# --- graph ----------------------------------------------------------------------------------------------------------


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes in program order: a whole program, or a fragment that continues the branches in `handles`.

    `protocol` is always written, so that whoever reads a graph of another one finds out.
    """

    protocol: int = PROTOCOL
    nodes: tuple[Node, ...]
    handles: tuple[StateHandle, ...] = ()


LATEST_S = 2.0**37
"""The latest time that a program may say it is: in the year 6325. Calendars end in 9999."""


class ProgramOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What holds for a whole program, given when it is opened.

    Args:
        name: of the program, for traces and errors.
        deadline_s: seconds from opening after which it fails with `DeadlineExceeded`; `None` is unlimited.
        lease_s: seconds that it may rest, all that was submitted being done, before it fails with `StateLost`; `None`
            is what the engine allows.
        priority: larger is more urgent.
        stream: send `TextEvent` and `DeltaEvent` as text appears, not only values.
        want_text: `DoneEvent` carries the main branch's text.
        cache_salt: computed prefixes are shared with programs of the same salt only, for example one per tenant.
        num_api_spec_tokens: API backends let a generation run on for so many tokens past its end, and match the surplus
            against the program (see `sgl.lang.api.speculation`). Others have no use for it.
        now: seconds since the epoch (at most `LATEST_S`), the time that chat templates see; the clock's without it.
        chat_template_kwargs: further variables of the chat template, such as `enable_thinking`; JSON values. Templates
            pass over those that they do not know. What is written into the prompt of them is plain text.
    """

    name: str = "program"
    deadline_s: float | None = None
    lease_s: float | None = None
    priority: int = 0
    stream: bool = False
    want_text: bool = True
    cache_salt: str = ""
    num_api_spec_tokens: int | None = None
    now: float | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not isinstance(self.cache_salt, str):
            raise InvalidParameter(f"cache_salt is {self.cache_salt!r}; expected a string", param="cache_salt")
        if self.num_api_spec_tokens is not None:
            check_integer("num_api_spec_tokens", self.num_api_spec_tokens, low=1)
        if self.lease_s is not None:
            check_number("lease_s", self.lease_s, low=0.0, open_low=True)
        if self.now is not None:
            check_number("now", self.now, low=0.0, high=LATEST_S)
        check_template_kwargs(self.chat_template_kwargs)


class Head(msgspec.Struct, frozen=True):
    """What is read first of a graph or a compiled program that somebody wrote."""

    protocol: int | None = None


def encode(graph: Graph) -> bytes:
    """msgpack of a graph."""
    return _ENCODER.encode(graph)


def decode(data: bytes) -> Graph:
    """The graph in `data` (msgpack).

    Raises:
        InvalidProgram: not a graph, of another protocol, or without the number of one.
    """
    try:
        check_head(_HEAD.decode(data))
        graph = _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise InvalidProgram(f"not a request graph: {error}") from None
    check_protocol(graph)
    return graph


def lone_surrogate(error: UnicodeEncodeError) -> InvalidParameter:
    """The error of text in a graph, or beside it, that is not Unicode and so cannot be sent."""
    return InvalidParameter(
        f"text has a lone surrogate at character {error.start}",
        hint="decode the input with errors='replace' before passing it on",
        param="text",
    )


def to_json(graph: Graph) -> bytes:
    """A graph as JSON text, the portable file form."""
    return msgspec.json.encode(graph)


def from_json(data: bytes | str) -> Graph:
    """The graph in a JSON text; raises `InvalidProgram` like `decode`."""
    try:
        check_head(msgspec.json.decode(data, type=Head))
        graph = msgspec.json.decode(data, type=Graph)
    except msgspec.MsgspecError as error:
        raise InvalidProgram(f"not a request graph: {error}") from None
    check_protocol(graph)
    return graph


def check_head(head: Head) -> None:
    """Raise `InvalidProgram` where no protocol is named: it could be any."""
    if head.protocol is None:
        raise InvalidProgram(
            f"protocol is missing; this side speaks {PROTOCOL}",
            hint=f'write the graph with sgl, or give it "protocol": {PROTOCOL}',
        )


def check_protocol(graph: Graph) -> None:
    """Raise `InvalidProgram` unless this code speaks the graph's protocol."""
    if graph.protocol != PROTOCOL:
        raise InvalidProgram(
            f"graph protocol {graph.protocol}; this side speaks {PROTOCOL}",
            hint="use the same sgl version on both sides",
        )


def digest(graph: Graph) -> str:
    """SHA-256 (hex) of what the graph does: two graphs that differ only in source locations are equal.

    It is that of the graph as it is after a round trip, in which a temperature that was given as 0 is 0.0.
    """
    bare = msgspec.structs.replace(
        graph, nodes=tuple(msgspec.structs.replace(node, location=None) for node in graph.nodes)
    )
    return hashlib.sha256(_SORTED.encode(_DECODER.decode(_ENCODER.encode(bare)))).hexdigest()


def validate(graph: Graph, live: Iterable[int] = (MAIN_BRANCH,), limits: Limits = DEFAULT_LIMITS) -> set[int]:
    """Check a graph against the rules above; the set of branches that live after it.

    Args:
        live: branches that exist before it: only the main one for a whole program.

    Raises:
        InvalidProgram: at the first node that breaks a rule, with its location.

    Example:
        >>> sorted(validate(Graph(nodes=(Fork(id=0, children=(1, 2)), Release(id=1, branch=1)))))
        [0, 2]
    """
    check_protocol(graph)
    if len(graph.nodes) > limits.max_graph_nodes:
        raise InvalidProgram(f"{len(graph.nodes)} nodes in one graph; at most {limits.max_graph_nodes} are allowed")
    alive = set(live)
    used = set(alive)
    roles: dict[int, str | None] = {}
    marked: dict[tuple[int, str], str | None] = {}
    last_id = -1
    for node in graph.nodes:
        if node.id <= last_id:
            raise InvalidProgram(f"node id {node.id} does not increase", location=node.location)
        last_id = node.id
        if node.branch not in alive:
            state = "was released" if node.branch in used else "does not exist"
            raise InvalidProgram(f"branch {node.branch} {state}", location=node.location)
        match node:
            case Fork(children=children):
                if len(children) > limits.max_fork:
                    raise InvalidProgram(
                        f"fork of {len(children)}; at most {limits.max_fork} are allowed", location=node.location
                    )
                if len(set(children)) != len(children) or used & set(children):
                    raise InvalidProgram("fork reuses a branch number", location=node.location)
                alive.update(children)
                used.update(children)
                roles.update({child: roles.get(node.branch) for child in children})
            case Join(children=children):
                if missing := set(children) - alive:
                    raise InvalidProgram(f"join of unknown branches {sorted(missing)}", location=node.location)
            case Release():
                alive.discard(node.branch)
            case Gen(sampling=Sampling(n=n)) if n != 1:
                raise InvalidProgram(
                    f"generation {node.name!r} has n={n}; a node draws one sample",
                    hint="give each sample a node of its own (in Python: sgl.lang.graph.lower_samples)",
                    location=node.location,
                )
            case Role(role=role, begin=begin):
                current = roles.get(node.branch)
                if begin and current is not None:
                    raise InvalidProgram(
                        f"role {role!r} begins inside role {current!r}",
                        hint=f"end {current!r} first: roles do not nest",
                        location=node.location,
                    )
                roles[node.branch] = role if begin else None
            case Text(segments=segments):
                for segment in segments:
                    if isinstance(segment, Var) and segment.branch == ARGUMENTS:
                        raise InvalidProgram(
                            f"argument {segment.name!r} has no value",
                            hint="bind the arguments of a compiled program before it is executed",
                            location=node.location,
                        )
            case Mark(label=label):
                marked[node.branch, label] = roles.get(node.branch)
            case Rewind(label=label):
                roles[node.branch] = marked.get((node.branch, label))  # of an earlier fragment's mark it is not known
            case _:
                pass
    return alive


def lower_samples(node: Gen, children: Sequence[int], *, continued: bool = False) -> tuple[Node, ...]:
    """A generation of n samples as nodes that a backend executes: a fork into `children`, one sample on each of them, a
    join that waits for all, and their release. The branch goes on from where it was.

    With `continued` the branch itself takes sample 0, and goes on behind it; there is a child for each other sample.

    Sample 0 has the node's seed, so that it is what the same generation with n=1 gives; each other has one derived from
    it. Without a seed the backend draws one for each node. Ids count from the node's.

    Example:
        >>> node = Gen(id=7, name="x", sampling=Sampling(n=2, seed=1))
        >>> lowered = lower_samples(node, [3, 4])
        >>> [type(each).__name__ for each in lowered], lowered[1].branch, lowered[1].sampling.seed
        (['Fork', 'Gen', 'Gen', 'Join', 'Release', 'Release'], 3, 1)
        >>> [(type(each).__name__, each.branch) for each in lower_samples(node, [3], continued=True)]
        [('Fork', 0), ('Gen', 0), ('Gen', 3), ('Join', 0), ('Release', 3)]
    """
    sampling = node.sampling
    branch, location = node.branch, node.location
    nodes: list[Node] = [Fork(id=0, branch=branch, location=location, children=tuple(children))]
    for index, taker in enumerate((branch, *children) if continued else children):
        own = msgspec.structs.replace(sampling, n=1, seed=_sample_seed(sampling.seed, index))
        nodes.append(msgspec.structs.replace(node, branch=taker, sampling=own))
    nodes.append(Join(id=0, branch=branch, location=location, children=tuple(children)))
    nodes.extend(Release(id=0, branch=child, location=location) for child in children)
    return tuple(msgspec.structs.replace(each, id=node.id + offset) for offset, each in enumerate(nodes))


def _sample_seed(seed: int | None, index: int) -> int | None:
    if seed is None or index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


_ENCODER = msgspec.msgpack.Encoder()
_SORTED = msgspec.msgpack.Encoder(order="sorted")
_DECODER = msgspec.msgpack.Decoder(Graph)
_HEAD = msgspec.msgpack.Decoder(Head)
