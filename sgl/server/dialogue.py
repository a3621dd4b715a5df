"""A chat request, understood and run: what the routes of OpenAI, Anthropic and Ollama share.

Each of these dialects turns its body into a `ChatRequest`, the widest of them, and `Step`s into its own objects.
Between the two there is one way: `planned` makes the graph, `start` runs it, `steps` takes each sample's text apart
into answer, reasoning and tool calls (`sgl.grammars.formats`). Whole answers and streams go through the same parser, so
that both say the same.

Fails with `InvalidRequest` for what cannot be served as it is; `param` is a field of the chat request, and of messages
the place that the dialect has given.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import msgspec

from sgl.errors import InvalidParameter, InvalidProgram
from sgl.grammars.formats import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    ReasoningDelta,
    ReasoningFormat,
    StreamParser,
    Tool,
    ToolFormat,
    allowed_of,
    choice_of,
    merged,
    message_parser,
    reasoning_format,
    tool_format,
    tools_of,
)
from sgl.grammars.formats import Event as ParsedEvent
from sgl.grammars.spec import Constraint
from sgl.lang.graph import (
    DeltaEvent,
    Event,
    Gen,
    Graph,
    LiteralText,
    Node,
    ProgramOptions,
    Role,
    Sampling,
    Text,
    TokenLogprob,
    Tokens,
    ValueEvent,
    lower_samples,
)
from sgl.runtime.rendering import ModelRenderer
from sgl.server.call import Call, Server
from sgl.server.openai.logprobs import check_logprobs, most_logprobs
from sgl.server.openai.prompts import ChatPrompt
from sgl.server.openai.sampling import constraint_field, constraint_in, sampling_of, words_of
from sgl.server.openai.types import ChatRequest
from sgl.server.running import Running

MANY_TURNS = 32
"""Turns up to which a prompt is the engine's to render."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(frozen=True)
class Plan:
    """A request, understood.

    Attributes:
        tools: that the model may call; empty when there are none or `tool_choice` is none. It may be told of more.
        reasoning: its format where reasoning is told apart from the answer.
        one_call: later calls of a message are left out.
        opening: what the prompt ends with, which may have begun or ended the reasoning.
        is_call: the answer is calls and nothing else: what breaks off within one is no text of the model's.
    """

    graph: Graph
    options: ProgramOptions
    sampling: Sampling
    tools: tuple[Tool, ...]
    tool_format: ToolFormat
    reasoning: ReasoningFormat | None
    one_call: bool
    opening: str = ""
    is_call: bool = False

    @property
    def samples(self) -> list[int]:
        """Ids of the generations, in the order of the choices."""
        return [node.id for node in self.graph.nodes if isinstance(node, Gen)]

    def parser(self) -> StreamParser:
        """A parser for one sample."""
        return message_parser(
            self.tool_format if self.tools else None, self.reasoning, self.tools or None, prompt=self.opening
        )


async def planned(
    call: Call,
    body: ChatRequest,
    *,
    name: str = "chat",
    places: Sequence[str] = (),
    words: Mapping[str, str] | None = None,
) -> Plan:
    """What a request asks for, as a graph with its options.

    Args:
        name: of the program, for traces.
        places: of each message, its name in errors; `messages[0]` and so on by default.
        words: what fields of a chat request are called in the dialect, where that differs.

    Raises:
        InvalidRequest: it cannot be served as it is.
    """
    call.words += [words_of(body), words or {}]
    server = call.server
    server.check_model(body.model)
    server.check_generates()
    call.name(body.rid)
    draft = await call.apart(_drafted, call, body, name, places)
    plan = draft.plan
    nodes = await _settled(server, draft.prompt, plan.options, plan.sampling)
    gen = msgspec.structs.replace(draft.gen, id=len(nodes))
    samples = [gen] if plan.sampling.n == 1 else lower_samples(gen, range(1, plan.sampling.n + 1))
    opening = await _opening(server, plan.options, draft.prompt) if plan.reasoning is not None else ""
    return replace(plan, graph=Graph(nodes=(*nodes, *samples)), opening=opening)


class _Draft(NamedTuple):
    """What a request's body says by itself: the nodes of its prompt, its generation, and a plan without a graph."""

    prompt: Sequence[Node]
    gen: Gen
    plan: Plan


def _drafted(call: Call, body: ChatRequest, name: str, places: Sequence[str]) -> _Draft:
    server = call.server
    fmt = tool_format(server.config.tool_call_parser or server.formats.get("tool") or "hermes")
    reasoning = reasoning_of(server)
    tools = tools_of(body.tools or ())
    wanted, callable_tools = allowed_of(body.tool_choice, tools)
    choice = choice_of(wanted, callable_tools)
    parallel = body.parallel_tool_calls is not False
    sampling = sampling_of(call, body)
    check_logprobs(most_logprobs(sampling, 0, server.context_len))
    told = tools if choice.mode != "none" else ()
    call.constraint = "tools" if choice.mode == "required" and callable_tools else constraint_field(body) or "tools"
    prompt = ChatPrompt(fmt, fmt.tool_prompt(told).system if told else "")
    _write(prompt, body, places)
    gen = Gen(
        id=0,
        name="answer",
        sampling=sampling,
        constraint=_constraint(body, fmt, callable_tools, choice, parallel),
        reasoning=reasoning.name if reasoning is not None else None,
    )
    options = ProgramOptions(
        name=name,
        stream=body.stream,
        want_text=False,
        priority=body.priority or 0,
        deadline_s=body.deadline_s,
        cache_salt=call.salt(body.cache_salt),
        chat_template_kwargs=_template_kwargs(body),
    )
    plan = Plan(
        graph=Graph(nodes=()),
        options=options,
        sampling=sampling,
        tools=callable_tools if told else (),
        tool_format=fmt,
        reasoning=reasoning if body.separate_reasoning and body.include_reasoning is not False else None,
        one_call=not parallel,
        is_call=choice.mode == "required",
    )
    return _Draft(prompt.nodes, gen, plan)


def start(call: Call, plan: Plan) -> Running:
    """Run it; it ends with the call at the latest."""
    return call.start(plan.graph, plan.options)


def reasoning_of(server: Server) -> ReasoningFormat | None:
    """How the served model writes reasoning, if it does."""
    name = server.config.reasoning_parser or server.formats.get("reasoning")
    return reasoning_format(name) if name is not None else None


async def count_tokens(server: Server, plan: Plan) -> int:
    """Tokens of the prompt."""
    renderer = await server.renderer()
    return len(await asyncio.to_thread(_ids, renderer, plan.graph.nodes, plan.options))


# --- prompts --------------------------------------------------------------------------------------------------------


def _write(prompt: ChatPrompt, body: ChatRequest, places: Sequence[str]) -> None:
    if body.continue_final_message and (not body.messages or body.messages[-1].role != "assistant"):
        raise InvalidParameter(
            "continue_final_message is given and the last message is not the assistant's",
            hint="append the beginning of the answer as an assistant message",
            param="continue_final_message",
        )
    prompt.add(body.messages, open_last=body.continue_final_message, places=places)
    if not body.continue_final_message and body.add_generation_prompt:
        prompt.begin_answer()


async def _settled(
    server: Server, nodes: Sequence[Node], options: ProgramOptions, sampling: Sampling
) -> Sequence[Node]:
    """The same prompt; of many turns as tokens, made here: the engine's loop renders all of it again at each turn."""
    num_turns = sum(isinstance(node, Role) and node.begin for node in nodes)
    if num_turns <= MANY_TURNS or sampling.token_healing:
        return nodes
    ids = await asyncio.to_thread(_ids, await server.renderer(), nodes, options)
    return [Tokens(id=0, token_ids=tuple(ids))]


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """Variables for the chat template; what the request says itself goes before what `reasoning_effort` implies."""
    effort = body.reasoning_effort
    if effort not in (None, *EFFORTS):
        raise InvalidParameter(
            f"reasoning_effort is {effort!r}; expected {', '.join(EFFORTS[:-1])} or {EFFORTS[-1]}",
            param="reasoning_effort",
        )
    implied: dict[str, Any] = {}
    if effort == "none":
        implied = {"enable_thinking": False, "thinking": False}
    elif effort is not None:
        implied = {"reasoning_effort": effort}
    return {**implied, **(body.chat_template_kwargs or {})}


def _constraint(
    body: ChatRequest, fmt: ToolFormat, tools: Sequence[Tool], choice: Any, parallel: bool
) -> Constraint | None:
    asked = constraint_in(body)
    if not tools:
        return asked
    if asked is not None and choice.mode != "required":
        return asked
    return fmt.constraint(tools, choice, parallel=parallel)  # a format is for an answer, not for a call that is wanted


async def _opening(server: Server, options: ProgramOptions, nodes: Sequence[Node]) -> str:
    """The end of the prompt: what the template writes before an answer, or the text that the answer continues."""
    last = nodes[-1]
    if isinstance(last, Text):
        return "".join(segment.text for segment in last.segments if isinstance(segment, LiteralText))
    if not (isinstance(last, Role) and last.begin):
        return ""
    renderer = await server.renderer()
    kwargs = msgspec.json.encode(options.chat_template_kwargs, order="sorted")
    return await asyncio.to_thread(_generation_prompt, renderer, kwargs)


@lru_cache(maxsize=64)
def _generation_prompt(renderer: ModelRenderer, kwargs: bytes) -> str:
    """What the template writes between a user's turn and the answer."""
    state = renderer.state(template_kwargs=msgspec.json.decode(kwargs))
    try:
        state.begin("user")
        state.add_text("?")
        state.end()
        before = len(state.text)
        state.begin("assistant")
    except InvalidProgram:  # it wants other turns first: the format's own rule decides
        return ""
    return state.text[before:]


def _ids(renderer: ModelRenderer, nodes: Sequence[Node], options: ProgramOptions) -> list[int]:
    """The prompt's tokens, in time linear in it."""
    turns: list[dict[str, str]] = []
    role, content = "", ""
    for node in nodes:
        match node:
            case Tokens(token_ids=ids):
                return list(ids)
            case Role(begin=True):
                role, content = node.role, ""
            case Role():
                turns.append({"role": role, "content": content})
                role = ""
            case Text(segments=segments):
                content += "".join(segment.text for segment in segments if isinstance(segment, LiteralText))
            case _:
                break
    state = renderer.state(options.now, options.chat_template_kwargs)
    is_open = bool(role)
    if not is_open:
        role, content = turns[-1]["role"], turns.pop()["content"]
    state.take_turns(turns)
    state.begin(role)
    state.add_text(content)
    if not is_open:
        state.end()
    state.flush()
    return state.ids


# --- answers --------------------------------------------------------------------------------------------------------


class Said(NamedTuple):
    """More of the answer's text."""

    text: str


class Thought(NamedTuple):
    """More of the reasoning."""

    text: str


class CallBegins(NamedTuple):
    """A tool call begins; calls of a message are numbered from 0."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments, which together are the text of a JSON object."""

    number: int
    text: str


class CallEnds(NamedTuple):
    """A call is over; a cut one has arguments that break off."""

    number: int


Piece: TypeAlias = Said | Thought | CallBegins | CallArguments | CallEnds


class Step(NamedTuple):
    """What an event of the engine adds to a sample; `value` comes with its last one, and then counts all its tokens.

    `breaks_off` in the last one: it ends within a call, which so has no whole arguments.
    """

    sample: int
    pieces: list[Piece]
    logprobs: Sequence[TokenLogprob] = ()
    value: ValueEvent | None = None
    num_tokens: int = 0
    breaks_off: bool = False


@dataclass
class ToolCall:
    """A call of an answer; `arguments` is JSON text."""

    name: str
    arguments: str = ""


@dataclass
class Answer:
    """A sample, put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    value: ValueEvent | None = None
    breaks_off: bool = False

    def take(self, step: Step) -> None:
        """Add a step's pieces."""
        for piece in step.pieces:
            match piece:
                case Said(text=text):
                    self.content += text
                case Thought(text=text):
                    self.reasoning += text
                case CallBegins(name=name):
                    self.calls.append(ToolCall(name))
                case CallArguments(number=number, text=text):
                    self.calls[number].arguments += text
        self.value = step.value or self.value
        self.breaks_off = step.breaks_off


async def steps(plan: Plan, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Step, None]:
    """The samples as they grow, or whole where the program does not stream."""
    samples = {node: _Sample(plan, index) for index, node in enumerate(plan.samples)}
    async for event in events:
        match event:
            case DeltaEvent():
                sample = samples[event.node]
                yield Step(sample.index, sample.feed(event.text), event.logprobs, num_tokens=len(event.token_ids))
            case ValueEvent():
                sample = samples[event.node]
                pieces = sample.end(event)
                yield Step(sample.index, pieces, value=event, breaks_off=sample.breaks_off)
            case _:
                pass


async def answers(plan: Plan, events: AsyncGenerator[Event, None]) -> list[Answer]:
    """All samples, put together."""
    found = [Answer() for _ in plan.samples]
    async for step in steps(plan, events):
        found[step.sample].take(step)
    return found


class _Sample:
    """A sample's parser, and what was told of it."""

    def __init__(self, plan: Plan, index: int) -> None:
        self.index = index
        self.breaks_off = False
        self._parser = plan.parser()
        self._one_call = plan.one_call
        self._is_call = plan.is_call
        self._length = 0
        self._num_calls = 0
        self._hidden: set[int] = set()

    def feed(self, text: str) -> list[Piece]:
        """What more text adds."""
        self._length += len(text)
        return self._pieces(self._parser.feed(text))

    def end(self, event: ValueEvent) -> list[Piece]:
        """What the rest of the whole text adds; markup of a call that had to come and was cut off adds nothing."""
        rest, closing = self._parser.feed(event.value[self._length :]), self._parser.close()
        pieces = self._pieces([*rest, *closing])
        self.breaks_off = any(
            isinstance(each, CallEnd) and each.status == "truncated" and each.index not in self._hidden
            for each in closing
        )
        if not (self._is_call and (event.finish == "length" or isinstance(event.matched, str))):
            return pieces
        return [piece for piece in pieces if not isinstance(piece, Said)]

    def _pieces(self, parsed: Sequence[ParsedEvent]) -> list[Piece]:
        events = merged(parsed)
        malformed = {event.index for event in events if isinstance(event, CallEnd) and event.status == "malformed"}
        begun = {event.index for event in events if isinstance(event, CallStart)}
        self._hidden |= malformed & begun  # nobody was told of them: their text is content
        return [piece for event in events if (piece := self._piece(event)) is not None]

    def _piece(self, event: ParsedEvent) -> Piece | None:
        match event:
            case ContentDelta(text=text):
                return Said(text)
            case ReasoningDelta(text=text):
                return Thought(text)
            case CallStart(index=index, name=name) if index not in self._hidden:
                if self._one_call and self._num_calls:
                    self._hidden.add(index)
                    return None
                self._num_calls += 1
                return CallBegins(self._num_calls - 1, name)
            case ArgumentsDelta(index=index, text=text) if index not in self._hidden:
                return CallArguments(self._num_calls - 1, text)
            case CallEnd(status="malformed", text=text) if text:
                return Said(text)
            case CallEnd(index=index) if index not in self._hidden:
                return CallEnds(self._num_calls - 1)
            case _:
                return None
