"""What goes to an endpoint and what comes back, whoever's it is; and the prompt of a branch as turns.

Owns `Ask` and `Reply`, the values between `session` and the clients, and `ApiPrompt`. Text outside of turns is for
endpoints that continue a text; those get turns written out by a chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sgl.errors import InvalidProgram
from sgl.grammars.spec import Constraint
from sgl.lang.api.capabilities import Capabilities
from sgl.lang.chat_template import ChatTemplate
from sgl.lang.graph import Media, Sampling, ToolSpec, Usage

_NOTHING = Usage()


@dataclass(frozen=True)
class Turn:
    """A chat turn; an image or video stands where it was appended."""

    role: str
    parts: tuple[str | Media, ...]

    @property
    def text(self) -> str:
        """Its text alone."""
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        turns: of a chat; `prefix` is the beginning of the assistant turn that is to be continued.
        prompt: of an endpoint that continues a text.
        stops: strings to stop at there; the rest is looked for here.
        template_kwargs: variables for the endpoint's chat template.
        on_text: told of text as it comes; False ends the request.
    """

    sampling: Sampling
    max_tokens: int
    turns: tuple[Turn, ...] = ()
    prefix: str = ""
    prompt: str | None = None
    stops: tuple[str, ...] = ()
    constraint: Constraint | None = None
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    view: Any = None
    top_logprobs: int | None = None
    template_kwargs: Mapping[str, Any] | None = None
    on_text: Callable[[str], bool] | None = None


@dataclass(frozen=True)
class TokenText:
    """A token as an endpoint tells of it: its text, log-probability, and those of the most probable ones there."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Reply:
    """An answer; `finish` is `stop` or `length`, `calls` are tool calls as (name, JSON arguments)."""

    text: str
    finish: str = "stop"
    usage: Usage = _NOTHING
    tokens: tuple[TokenText, ...] = ()
    calls: tuple[tuple[str, str], ...] = ()


class Client(Protocol):
    """Speaks with one endpoint. Calls block; they raise `SglError` and nothing else."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    def ask(self, ask: Ask) -> Reply:
        """Send a request and wait for its answer."""

    def score(self, prompts: list[str]) -> list[list[tuple[int, float]]]:
        """Of each text, its tokens as (end in characters, log-probability); needs `echo_logprobs`."""

    def close(self) -> None:
        """Let go of connections."""


@dataclass
class ApiPrompt:
    """A branch's prompt: text, and where turns begin and end.

    Attributes:
        style: how turns are written out in `text`.
        ahead: what the model has written beyond this prompt (see `sgl.lang.api.speculation`), and `ahead_ended`: that
            it ended there of itself.
    """

    style: ChatTemplate
    items: list[Any] = field(default_factory=list)  # str, Media, or a role's beginning or end
    role: str | None = None
    text: str = ""
    ahead: str = ""
    ahead_ended: bool = False

    def copy(self) -> ApiPrompt:
        """The same."""
        return ApiPrompt(self.style, list(self.items), self.role, self.text, self.ahead, self.ahead_ended)

    def add_text(self, text: str) -> None:
        """Append; what the model wrote ahead is kept as far as it says the same."""
        self.items.append(text)
        self.text += text
        self.ahead = self.ahead.removeprefix(text) if self.ahead.startswith(text) else ""

    def add_media(self, node: Media) -> None:
        """Append a part that is no text."""
        self.items.append(node)
        self.text += f"<{node.kind} {node.digest[:8]}>"
        self.ahead = ""

    def begin(self, role: str) -> None:
        """Begin a turn."""
        if self.role is not None:
            raise InvalidProgram(f"role {role!r} begins inside role {self.role!r}")
        default = self.style.default_system_prompt
        if default and role != "system" and not any(isinstance(item, _Begin) for item in self.items):
            self.begin("system")
            self.add_text(default)
            self.end()
        self.role = role
        self._mark(self.style.begin(role), _Begin(role))

    def end(self) -> None:
        """End the open turn."""
        if self.role is None:
            raise InvalidProgram("a role ends that did not begin")
        after = self.style.end(self.role)
        self.role = None
        self._mark(after, _END)

    def _mark(self, text: str, item: object) -> None:
        self.items.append(item)
        self.text += text
        self.ahead = ""

    def flush(self) -> None:
        """Nothing: text goes out as text."""

    def turns(self) -> tuple[tuple[Turn, ...], str, str]:
        """The closed turns, the text of the open one, and all text outside of turns."""
        turns: list[Turn] = []
        parts: list[str | Media] = []
        role: str | None = None
        outside: list[str] = []
        for item in self.items:
            if isinstance(item, _Begin):
                role, parts = item.role, []
            elif item is _END and role is not None:
                turns.append(Turn(role, tuple(parts)))
                role, parts = None, []
            elif role is not None:
                parts.append(item)
            elif isinstance(item, str):
                outside.append(item)
        return tuple(turns), "".join(part for part in parts if isinstance(part, str)), "".join(outside)


@dataclass(frozen=True)
class _Begin:
    role: str


_END = object()
