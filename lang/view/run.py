"""The page of a run: what each branch says, where it came from, how probable it was and how long it took.

Called by `sgl.lang.record.RunRecord`. A branch is a box; its forks stand in it where they were made. Text of the
program is shown as prompt, and as far as the cache had it, as cached; what the model wrote as generated, and as forced
where a constraint left no choice. How many tokens were cached is exact; which characters these are is in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sgl.errors import SglError
from sgl.lang.dataflow import reads_of
from sgl.lang.graph import (
    MAIN_BRANCH,
    FailedEvent,
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
    Tokens,
    ValueEvent,
    Var,
)
from sgl.lang.view.page import Markup, element, page, part

if TYPE_CHECKING:
    from sgl.lang.record import RunRecord

_ROLE = "\0role"
"""The title of what is no text but a place where a turn begins or ends."""

_KEY = (
    ("prompt", "prompt"),
    ("cached", "cached"),
    ("generated", "generated"),
    ("forced", "forced"),
    ("select", "select"),
)


def run_page(record: RunRecord) -> str:
    """A page that stands alone."""
    return page(f"Run of {record.name}", *_Run(record).content())


def run_part(record: RunRecord) -> str:
    """The same as part of another page."""
    return part(*_Run(record).content())


class _Run:
    """One rendering."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._branches: dict[int, list[Node]] = {}
        for node in record.nodes:
            self._branches.setdefault(node.branch, []).append(node)
        self._reads = reads_of(record.nodes)
        self._pieces = _piece_maker(record)

    def content(self) -> list[Markup]:
        """Everything below the title."""
        record = self._record
        found = [element("h1", f"Run of {record.name}"), self._summary()]
        found.append(element("p", *(element("span", label, class_=kind) for kind, label in _KEY), class_="key"))
        if record.end is not None and isinstance(record.end[1], FailedEvent):
            error = SglError.from_info(record.end[1].error)
            found.append(element("div", f"{type(error).__name__}: {error}", class_="failed"))
        if not record.complete:
            found.append(element("p", "too long to be kept whole: this is its beginning", class_="note"))
        found.append(self._branch(MAIN_BRANCH, 0.0, 0))
        found += [element("h2", "When"), self._timeline()]
        return found

    def _summary(self) -> Markup:
        events = [event for _, event in self._record.values.values()]
        prompt = sum(event.usage.prompt_tokens for event in events)
        cached = sum(event.usage.cached_tokens for event in events)
        completion = sum(event.usage.completion_tokens for event in events)
        forced = sum(event.usage.forced_tokens for event in events)
        seconds = f"{self._record.end[0]:.2f} s" if self._record.end is not None else "still running"
        facts = (
            f"{len(events)} values, {len(self._branches)} branches, {len(self._record.fragments)} messages, {seconds}; "
            f"{prompt:,} prompt tokens, {cached:,} of them cached; {completion:,} generated, {forced:,} of them forced"
        )
        return element("p", facts, class_="note")

    # --- branches ---

    def _branch(self, branch: int, chars: float, tokens: int) -> Markup:
        """A branch with its forks. `chars` and `tokens` are what it inherits; tokens as far as they are known."""
        inside: list[Markup] = []
        waiting: list[tuple[str, str]] = []  # text of the program, with a title, since the last value
        for node in self._branches.get(branch, ()):
            match node:
                case Text() | Tokens() | Media():
                    waiting += self._said(node)
                case Role(role=role, begin=begin):
                    waiting.append((role if begin else f"end of {role}", _ROLE))
                case Gen() | Select():
                    found = self._record.values.get(node.id)
                    event = found[1] if found is not None else None
                    inside += self._prompt(waiting, event, chars, tokens)
                    chars += sum(len(text) for text, title in waiting if title != _ROLE)
                    waiting = []
                    if event is None:
                        inside.append(element("span", f"{node.name}: nothing came", class_="note", title=_place(node)))
                        continue
                    tokens = event.usage.prompt_tokens - event.usage.scored_tokens + len(event.token_ids)
                    chars += len(event.value)
                    inside.append(self._value(node, event))
                case Fork(children=children):
                    inside += self._prompt(waiting, self._event_behind(children), chars, tokens)
                    chars += sum(len(text) for text, title in waiting if title != _ROLE)
                    waiting = []
                    inside += [self._branch(child, chars, tokens) for child in children]
                case Join(mode=mode):
                    inside += self._prompt(waiting, None, chars, tokens)
                    waiting = []
                    inside.append(element("div", f"join ({mode})", class_="note", title=_place(node)))
                case Mark(label=label) | Rewind(label=label):
                    inside += self._prompt(waiting, None, chars, tokens)
                    waiting = []
                    what = "mark" if isinstance(node, Mark) else "rewind to"
                    inside.append(element("span", f" {what} {label} ", class_="note", title=_place(node)))
                case _:
                    pass
        inside += self._prompt(waiting, None, chars, tokens)
        label = "main" if branch == MAIN_BRANCH else f"branch {branch}"
        summary = element("summary", element("span", label, class_="note"))
        return element("details", summary, element("div", *inside, class_="text"), class_="branch", open="")

    def _said(self, node: Text | Tokens | Media) -> list[tuple[str, str]]:
        """What a node of the program appended, with its line."""
        place = _place(node)
        if isinstance(node, Tokens):
            return [("".join(self._pieces(node.token_ids)), place)]
        if isinstance(node, Media):
            return [(f"[{node.kind}, {len(node.data):,} bytes]", place)]
        found = []
        for segment in node.segments:
            if isinstance(segment, LiteralText):
                found.append((segment.text, place))
            else:
                found.append((self._read(segment, node), f"value of {segment.name}\n{place}"))
        return found

    def _read(self, variable: Var, node: Text) -> str:
        source = self._reads.of(variable, node.id)
        found = self._record.values.get(source) if source is not None else None
        return found[1].value if found is not None else ""

    def _prompt(
        self, said: list[tuple[str, str]], event: ValueEvent | None, chars: float, tokens: int
    ) -> Iterator[Markup]:
        """Text of the program, in two colours where a part of it was cached."""
        own = sum(len(text) for text, title in said if title != _ROLE)
        left = round(own * _cached_share(event, own, chars, tokens))
        note = ""
        if event is not None:
            base = event.usage.prompt_tokens - event.usage.scored_tokens
            note = f"\nprompt: {base:,} tokens, {event.usage.cached_tokens:,} cached"
        for text, title in said:
            if title == _ROLE:
                yield element("span", text, class_="role")
                continue
            cached, computed = text[:left], text[left:]
            left -= len(cached)
            for kind, piece in (("cached", cached), ("prompt", computed)):
                if piece:
                    yield element("span", piece, class_=kind, title=title + note)

    def _event_behind(self, children: tuple[int, ...]) -> ValueEvent | None:
        """The first value on the branches of a fork: what it tells of its prompt holds for the text before the fork."""
        for child in children:
            for node in self._branches.get(child, ()):
                found = self._record.values.get(node.id)
                if found is not None:
                    return found[1]
        return None

    # --- values ---

    def _value(self, node: Gen | Select, event: ValueEvent) -> Markup:
        usage = event.usage
        about = [node.name, f"{event.latency_s * 1000:.0f} ms", f"ended by {event.finish}"]
        if event.matched is not None:
            about[-1] += f" at {event.matched!r}"
        about.append(f"{usage.completion_tokens} tokens, {usage.forced_tokens} forced")
        about.append(_place(node))
        if isinstance(node, Select):
            return element("span", event.value, class_="select value", title="\n".join([*about[:2], *_options(event)]))
        return element("span", *self._written(event), class_="value", title="\n".join(about))

    def _written(self, event: ValueEvent) -> Iterator[Markup]:
        """The tokens of a generation, each with its probability; or its text, where they are not known."""
        pieces = self._pieces(event.token_ids)
        if "".join(pieces)[: len(event.value)] != event.value:
            all_forced = 0 < event.usage.completion_tokens == event.usage.forced_tokens
            yield element("span", event.value, class_="forced" if all_forced else "generated")
            return
        forced = {index for start, count in event.forced for index in range(start, start + count)}
        left = len(event.value)
        for index, piece in enumerate(pieces):
            shown = piece[:left]
            left -= len(shown)
            if not shown:
                continue
            title = self._probability(event, index)
            kind = "forced" if index in forced else "generated"
            yield element("span", shown, class_=f"{kind} token" if title else kind, title=title)

    def _probability(self, event: ValueEvent, index: int) -> str | None:
        if index >= len(event.logprobs):
            return None
        entry = event.logprobs[index]
        lines = [f"{_percent(entry.logprob)} {''.join(self._pieces((entry.token_id,)))!r}"]
        for token_id, logprob in entry.top:
            lines.append(f"{_percent(logprob)} {''.join(self._pieces((token_id,)))!r}")
        return "\n".join(dict.fromkeys(lines))

    # --- times ---

    def _timeline(self) -> Markup:
        """A row for each value: its name, its seconds, and a bar from when it was asked for."""
        values = sorted(self._record.values.values(), key=lambda found: found[0])
        whole = max((at for at, _ in values), default=0.0) or 1.0
        rows = []
        for at, event in values:
            start = max(0.0, at - event.latency_s)
            place = f"left:{100 * start / whole:.2f}%;width:{100 * (at - start) / whole:.2f}%"
            bar = element("div", element("i", style=place), class_="bar")
            usage = event.usage
            counts = f"{usage.cached_tokens:,} / {usage.prefill_tokens:,} / {usage.completion_tokens:,}"
            cells = [f"{event.name} [{event.branch}]", f"{at - start:.3f} s", counts, bar]
            rows.append(element("tr", *(element("td", cell) for cell in cells)))
        head = element("tr", *(element("th", name) for name in ("value", "took", "cached / prefilled / generated", "")))
        return element("table", head, *rows)


def _cached_share(event: ValueEvent | None, own: float, chars: float, tokens: int) -> float:
    """How much of the text since the last value was cached, as far as counts tell."""
    if event is None or not own:
        return 0.0
    prompt = event.usage.prompt_tokens - event.usage.scored_tokens
    start = tokens or round(prompt * chars / (chars + own))
    new = prompt - start
    return min(1.0, max(0.0, (event.usage.cached_tokens - start) / new)) if new > 0 else 0.0


def _options(event: ValueEvent) -> list[str]:
    ranked = sorted(event.choices, key=lambda score: -score.probability)
    return [f"{100 * score.probability:.1f} % {score.choice!r}" for score in ranked]


def _percent(logprob: float | None) -> str:
    return "forced" if logprob is None else f"{100 * math.exp(min(0.0, logprob)):.1f} %"


def _place(node: Node) -> str:
    return f"at {node.location}" if node.location is not None else ""


def _piece_maker(record: RunRecord) -> Any:
    """What gives the text of each token id; nothing where the backend has no tokenizer."""
    make = getattr(record.backend, "renderer", None)
    pieces = getattr(make(), "pieces", None) if make is not None else None
    return pieces if pieces is not None else lambda ids: [""] * len(ids)
