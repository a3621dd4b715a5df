"""Programs on an endpoint: graphs executed here, with one request for each generation.

Owns `ApiBackend` and its sessions. What an endpoint cannot do is refused when it is submitted, with the program's line,
before anything is sent. Requests run on threads of the backend, a bounded number at a time; a program holds none
while it waits. An endpoint's failure ends the program that asked, with a typed error; a cancelled program's streams are
closed, and answers that come later are dropped.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import msgspec

from sgl.errors import EngineDead, GenerationError, InternalError, SglError, Unsupported
from sgl.grammars.formats import DEFAULT_TOOL_FORMAT, message_parser, reasoning_format, tool_format
from sgl.grammars.spec import Choices, Constraint, Ebnf, JsonSchema, Regex
from sgl.lang.api import speculation
from sgl.lang.api.messages import ApiPrompt, Ask, Client, Reply
from sgl.lang.api.options import Taken, take_option
from sgl.lang.backend import EventSink
from sgl.lang.chat_template import ChatTemplate, get_chat_template
from sgl.lang.executor import Branch, GraphSession
from sgl.lang.graph import (
    DeltaEvent,
    Gen,
    Graph,
    Media,
    ProgramOptions,
    Role,
    Sampling,
    Select,
    TextEvent,
    TokenLogprob,
    Tokens,
    Usage,
    ValueEvent,
)
from sgl.lang.serial import Workers
from sgl.lang.stops import first_stop

MAX_CONCURRENCY = 64
"""Requests of one backend under way at a time."""

_ATTEMPTS = 3
"""How often a chat model is asked for a turn that has to say the program's words."""

_ALWAYS = frozenset(
    (
        "max_new_tokens",
        "n",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "stop_regex",
        "no_stop_trim",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "return_logprob",
        "top_logprobs_num",
    )
)
"""Sampling fields that are handled here, or that every endpoint takes."""


class ApiBackend:
    """A backend over an endpoint.

    Args:
        client: speaks with it; it is owned.
        name: of model and endpoint, for people.
        style: how turns are written out where the endpoint continues a text.
    """

    def __init__(self, client: Client, name: str, style: ChatTemplate | None = None) -> None:
        self.client = client
        self.name = name
        self.epoch = uuid.uuid4().hex
        self.style = style or get_chat_template("chatml")
        self.takes_turns = client.capabilities.is_chat or style is not None
        self.events = Workers("sgl-api")
        self.requests = Workers("sgl-api-request", MAX_CONCURRENCY)
        self._lock = threading.Lock()
        self._sessions: set[ApiSession] = set()
        self._closed = False

    def open(self, sink: EventSink, options: ProgramOptions) -> ApiSession:
        """Start a program.

        Raises:
            EngineDead: the backend was shut down.
        """
        with self._lock:
            if self._closed:
                raise EngineDead(f"{self.name} was shut down", hint="make a new backend")
            session = self.session(sink, options)
            self._sessions.add(session)
        return session

    def session(self, sink: EventSink, options: ProgramOptions) -> ApiSession:
        """What executes one program."""
        return ApiSession(self, sink, options)

    def forget(self, session: ApiSession) -> None:
        """A session has ended."""
        with self._lock:
            self._sessions.discard(session)

    def flush_cache(self) -> bool:
        """Its cache is the endpoint's own: False."""
        return False

    def server_info(self) -> Mapping[str, Any]:
        """The model and what its endpoint is taken to be able to do."""
        return {"backend": type(self).__name__, "model": self.name, "capabilities": asdict(self.client.capabilities)}

    def shutdown(self) -> None:
        """Close connections; open programs fail. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sessions = list(self._sessions)
        for session in sessions:
            session.stop.set()
            self.events.post(partial(session.fail, EngineDead(f"{self.name} was shut down")))
        self.client.close()

    def __enter__(self) -> ApiBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class ApiSession(GraphSession[ApiPrompt]):
    """One program on an endpoint."""

    def __init__(self, backend: ApiBackend, sink: EventSink, options: ProgramOptions) -> None:
        super().__init__(sink, options, backend.events.post, backend.epoch, ApiPrompt(backend.style))
        self._backend = backend
        self._able = backend.client.capabilities
        self._started: dict[int, float] = {}

    # --- what the endpoint can do ---

    def check(self, graph: Graph) -> None:
        """Raise `Unsupported` for options of the program, or the first node, that the endpoint cannot execute."""
        if self.options.chat_template_kwargs and not self._able.chat_template_kwargs:
            raise Unsupported(
                f"{self._backend.name} takes no chat_template_kwargs",
                hint="leave them out, or declare that this endpoint takes them (capabilities=)",
                param="chat_template_kwargs",
            )
        for node in graph.nodes:
            reason = None
            if isinstance(node, Gen):
                reason = self._constraint_reason(node) or self._sampling_reason(node.sampling)
            elif isinstance(node, Media):
                able = {"image": self._able.images, "video": self._able.video}.get(node.kind, False)
                reason = None if able else f"takes no {node.kind} part"
            elif isinstance(node, Role) and not self._backend.takes_turns:
                reason = "continues a text, and no chat_template says how turns are written"
            elif isinstance(node, Tokens):
                reason = "takes no token ids"
            if reason is not None:
                raise Unsupported(
                    f"{self._backend.name} {reason}",
                    hint="leave it out, use another backend, or declare what this endpoint can do (capabilities=)",
                    location=node.location,
                )

    def _constraint_reason(self, node: Gen) -> str | None:
        if node.tools:
            return None if self._able.tools else "calls no tools"
        able: dict[type[Constraint], bool] = {
            JsonSchema: self._able.json_schema,
            Regex: self._able.regex,
            Ebnf: self._able.ebnf,
        }
        constraint = node.constraint
        if constraint is None or isinstance(constraint, Choices) or able.get(type(constraint), False):
            return None
        return f"cannot hold a generation to a {type(constraint).__name__}"

    def _sampling_reason(self, sampling: Sampling) -> str | None:
        for name in sampling.__struct_fields__:
            if name in _ALWAYS or name in self._able.sampling:
                continue
            if getattr(sampling, name) != getattr(_DEFAULT, name):
                return f"takes no {name}"
        if sampling.temperature > self._able.max_temperature:
            return f"takes temperatures up to {self._able.max_temperature:g}"
        if sampling.return_logprob and not (self._able.top_logprobs or self._able.echo_logprobs):
            return "gives no log-probabilities"
        return None

    # --- prompts ---

    def copy(self, prompt: ApiPrompt) -> ApiPrompt:
        """The same."""
        return prompt.copy()

    def add_media(self, branch: Branch[ApiPrompt], node: Media) -> None:
        """Append it where it stands."""
        branch.prompt.add_media(node)

    def ending(self) -> None:
        """The backend forgets it."""
        self._backend.forget(self)

    def _ask(self, prompt: ApiPrompt, node: Gen | Select, sampling: Sampling) -> Ask:
        """The request for what comes next.

        Raises:
            Unsupported: a chat endpoint is not about to speak.
        """
        seed = sampling.seed if self._able.seed else None
        ask = Ask(msgspec.structs.replace(sampling, seed=seed), sampling.max_new_tokens)
        if not self._able.is_chat:
            return replace(ask, prompt=prompt.text)
        turns, prefix, outside = prompt.turns()
        if outside.strip():
            raise Unsupported(
                f"{self._backend.name} takes turns, and the prompt has text outside of them: {outside.strip()[:40]!r}",
                hint="put it into system(), user() or assistant()",
                location=node.location,
            )
        if prompt.role != "assistant":
            raise Unsupported(
                f"{self._backend.name} speaks in assistant turns, and {node.name!r} stands "
                + (f"in a {prompt.role} turn" if prompt.role else "outside of turns"),
                hint="put it into assistant(...)",
                location=node.location,
            )
        return replace(ask, turns=turns, prefix=prefix, template_kwargs=self.options.chat_template_kwargs or None)

    # --- generations ---

    def generate(self, branch: Branch[ApiPrompt], node: Gen) -> None:
        """Take the value from what the model wrote ahead, or ask for it."""
        if isinstance(node.constraint, Choices):
            self.select(branch, _as_select(node, node.constraint))
            return
        if branch.prompt.role is not None and not self._able.is_chat:
            stops = (*node.sampling.stop, *branch.prompt.style.stop_str)
            node = msgspec.structs.replace(node, sampling=msgspec.structs.replace(node.sampling, stop=stops))
        if (cut := speculation.take_ahead(branch.prompt, node)) is not None:
            surplus, ended = branch.prompt.ahead[len(cut.text) :], branch.prompt.ahead_ended
            self._value(branch, node, cut.text, "stop", cut.matched or None, Reply("", "stop"), surplus, ended)
            return
        ask = self._ask(branch.prompt, node, node.sampling)
        spec = self.options.num_api_spec_tokens if speculation.can_speculate(node) else None
        if self._able.is_chat and ask.prefix and not self._able.prefill:
            self._generate_block(branch, node, ask, spec)
            return
        own_stops = bool(node.sampling.stop_regex) or node.sampling.no_stop_trim or spec is not None
        stops = () if own_stops else node.sampling.stop[: self._able.max_stops]
        streams = self.options.stream and len(stops) == len(node.sampling.stop) and not own_stops
        ask = replace(
            ask,
            max_tokens=max(ask.max_tokens, spec or 0),
            stops=stops,
            constraint=None if node.tools else node.constraint,
            tools=node.tools,
            tool_choice=node.tool_choice,
            parallel_tool_calls=node.parallel_tool_calls,
            top_logprobs=node.sampling.top_logprobs_num if node.sampling.return_logprob else None,
            on_text=self._teller(branch, node) if streams else None,
        )

        def work() -> Callable[[], None]:
            reply = self._backend.client.ask(ask)
            return lambda: self._answered(branch, node, ask, reply)

        self._run(node, work)

    def _generate_block(self, branch: Branch[ApiPrompt], node: Gen, ask: Ask, spec: int | None) -> None:
        """Have a chat model write the whole turn, which has to begin as the program did."""
        if spec is None:
            raise Unsupported(
                f"{self._backend.name} cannot continue an assistant turn, and {node.name!r} stands behind text in one",
                hint="let it come first in its turn, or give the function num_api_spec_tokens and it a stop",
                location=node.location,
            )
        prefix = ask.prefix
        whole = replace(ask, prefix="", max_tokens=max(ask.max_tokens, spec))

        def work() -> Callable[[], None]:
            usage, last = Usage(), ""
            for _ in range(_ATTEMPTS):
                reply = self._backend.client.ask(whole)
                usage, last = usage + reply.usage, reply.text
                if reply.text.startswith(prefix):
                    rest = replace(reply, text=reply.text[len(prefix) :], usage=usage)
                    return lambda: self._answered(branch, node, whole, rest)
            raise GenerationError(
                f"{node.name!r} stands behind {prefix[-40:]!r} in its turn; the model wrote {last[:80]!r} instead",
                hint="show it examples of the whole turn, or let the generation come first",
            )

        self._run(node, work)

    def _teller(self, branch: Branch[ApiPrompt], node: Gen) -> Callable[[str], bool]:
        """Passes text on as it comes."""

        def tell(text: str) -> bool:
            self.later(lambda: self.emit(DeltaEvent(node.id, branch.id, node.name, text)))
            return not self.stop.is_set()

        return tell

    def _answered(self, branch: Branch[ApiPrompt], node: Gen, ask: Ask, reply: Reply) -> None:
        """A generation's answer has come: cut it, and keep what is beyond."""
        text = _with_calls(reply, node)
        cut = first_stop(text, node.sampling)
        if cut is not None:
            self._value(
                branch, node, cut.text, "stop", cut.matched, reply, text[len(cut.text) :], reply.finish == "stop",
                streamed=ask.on_text is not None,
            )  # fmt: skip
            return
        if reply.finish == "length" and ask.max_tokens > node.sampling.max_new_tokens:
            # It ran past the generation's own budget without a stop: nobody here can count tokens, so ask again.
            again = replace(
                ask, max_tokens=node.sampling.max_new_tokens, stops=node.sampling.stop[: self._able.max_stops]
            )

            def work() -> Callable[[], None]:
                second = self._backend.client.ask(again)
                both = replace(second, usage=second.usage + reply.usage)
                return lambda: self._answered(branch, node, again, both)

            self._run(node, work)
            return
        self._value(branch, node, text, reply.finish, None, reply, "", False, streamed=ask.on_text is not None)

    def _value(
        self,
        branch: Branch[ApiPrompt],
        node: Gen,
        text: str,
        finish: str,
        matched: str | None,
        reply: Reply,
        surplus: str,
        ended: bool,
        *,
        streamed: bool = False,
    ) -> None:
        prompt = branch.prompt
        if self.options.stream and not streamed and text:
            self.emit(DeltaEvent(node.id, branch.id, node.name, text))
        said = text
        if node.reasoning is not None:
            said = message_parser(reasoning=reasoning_format(node.reasoning)).parse(text).content
        prompt.add_text(said)
        if self.options.num_api_spec_tokens is not None and node.reasoning is None:
            speculation.keep_ahead(prompt, surplus, ended)
        self.finish(
            branch,
            node,
            ValueEvent(
                node=node.id,
                branch=branch.id,
                name=node.name,
                value=text,
                finish=finish,
                matched=matched,
                usage=reply.usage,
                logprobs=tuple(TokenLogprob(_NO_ID, token.logprob) for token in reply.tokens),
                latency_s=time.monotonic() - self._started.pop(node.id, time.monotonic()),
            ),
        )

    # --- selects ---

    def select(self, branch: Branch[ApiPrompt], node: Select) -> None:
        """Have the endpoint take an option."""
        ask = self._ask(branch.prompt, node, Sampling(temperature=0.0, seed=node.seed))
        if ask.prefix and not self._able.prefill:
            raise Unsupported(
                f"{self._backend.name} cannot continue an assistant turn, and {node.name!r} stands behind text in one",
                hint="let the select come first in its turn",
                location=node.location,
            )

        def work() -> Callable[[], None]:
            taken = self._option(node, ask)
            return lambda: self._taken(branch, node, taken)

        self._run(node, work)

    def _option(self, node: Select, ask: Ask) -> Taken:
        return take_option(self._backend.client, node, ask)

    def _taken(self, branch: Branch[ApiPrompt], node: Select, taken: Taken) -> None:
        branch.prompt.add_text(taken.choice)
        if self.options.stream:
            self.emit(TextEvent(branch.id, taken.choice))
        self.finish(
            branch,
            node,
            ValueEvent(
                node=node.id,
                branch=branch.id,
                name=node.name,
                value=taken.choice,
                usage=taken.usage,
                choices=taken.scores,
                latency_s=time.monotonic() - self._started.pop(node.id, time.monotonic()),
            ),
        )

    # --- requests ---

    def _run(self, node: Gen | Select, work: Callable[[], Callable[[], None]]) -> None:
        """Have a thread do requests; what they come to is a job of the program."""
        self._started.setdefault(node.id, time.monotonic())

        def request() -> None:
            if self.stop.is_set():
                return
            try:
                then = work()
            except SglError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - a client's own: it ends the program, and not the thread
                failure = InternalError(f"the client of {self._backend.name} raised {type(error).__name__}: {error}")
            else:
                self.later(then)
                return
            self.later(lambda: self.fail(failure, node))

        self._backend.requests.post(request)


def _as_select(node: Gen, options: Choices) -> Select:
    """A generation that has to be one of some texts, as endpoints can do it; whether they can, `select` finds out."""
    sampling = node.sampling
    return Select(
        id=node.id,
        branch=node.branch,
        location=node.location,
        name=node.name,
        choices=options.options,
        temperature=sampling.temperature,
        seed=sampling.seed,
    )


_DEFAULT = Sampling()
_NO_ID = -1
"""Endpoints tell of tokens as texts; they have no ids here."""


def _with_calls(reply: Reply, node: Gen) -> str:
    """The text, with tool calls as the node's tool format writes them."""
    if not reply.calls:
        return reply.text
    calls = [(name, _arguments(name, text, node)) for name, text in reply.calls]
    written = tool_format(node.tool_format or DEFAULT_TOOL_FORMAT).render(calls)
    return f"{reply.text}\n{written}" if reply.text else written


def _arguments(name: str, text: str, node: Gen) -> Mapping[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise GenerationError(
            f"the arguments of the call of {name!r} in {node.name!r} are no JSON object: {text[:80]!r}",
            hint="generate it again",
            location=node.location,
        )
    return found
