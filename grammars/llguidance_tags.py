"""Structural tags as grammars for llguidance.

Owns the writer from the tree of `sgl.grammars.structural_tag` to the Lark dialect. Called by `llguidance_backend`.

The engine's lexer takes the longest word, so that nothing may be split in the wrong place: literals are written one
character per terminal; neighbours that are regular become one terminal; free text ends, lazily, with the first trigger
or end. A regex right before an end stops at the first end after which it matches. Text of a special token (such as
`<|python_tag|>`) is that token, which free text never contains.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sgl.grammars import ebnf
from sgl.grammars.charsets import escaped
from sgl.grammars.ebnf import lark_text
from sgl.grammars.regex import translate
from sgl.grammars.structural_tag import (
    AnyText,
    ConstString,
    Format,
    GrammarFormat,
    Optional,
    Or,
    Plus,
    RegexFormat,
    SchemaFormat,
    Sequence,
    Star,
    Tag,
    TagsWithSeparator,
    TriggeredTags,
    trigger_of,
)
from sgl.limits import Limits

_ANY = "(?s:.*)"


class TagWriter:
    """Writes one structural tag.

    Args:
        rewrite: a schema as the engine is to see it, white space included.
        specials: text of each special token -> its id.
    """

    def __init__(self, rewrite: Callable[[Any], Any], specials: Mapping[str, int], limits: Limits) -> None:
        self.rewrite = rewrite
        self.specials = specials
        self.limits = limits
        self.lines: list[str] = []

    def grammar(self, fmt: Format) -> str:
        """The whole grammar as Lark text."""
        start = self.write(fmt, ("",), last=True)
        return "\n".join([f"start: {start}", *self.lines])

    def write(self, fmt: Format, ends: tuple[str, ...], *, last: bool) -> str:
        """A rule expression of `fmt` and one of `ends`. `last`: only the end of the output follows."""
        has_end = ends != ("",)
        regular = self.regular(fmt)
        if regular is not None and not is_separable(fmt):
            if has_end and not any(self.special_in(end) for end in ends):
                return self.lazy(f"{regular} ({self.options(ends, regular=True)})", is_lazy=not last)
            return f"{self.terminal(regular)} {self.end(ends)}"
        match fmt:
            case ConstString(value=value):
                return f"{self.literal(value)} {self.end(ends)}"
            case SchemaFormat(json_schema=schema):
                return f"{self.rule(f'%json {json.dumps(self.rewrite(schema))}')} {self.end(ends)}"
            case GrammarFormat(grammar=grammar):
                return f"{self.embedded(grammar).start} {self.end(ends)}"
            case AnyText(excludes=excludes):
                return self.text(ends, (*excludes, *ends) if has_end else excludes)
            case Sequence(elements=elements):
                return self.sequence(elements, ends, last)
            case Or(elements=elements):
                written = [self.write(element, ends, last=last) for element in elements]
                return self.rule(" | ".join(written))
            case Optional(content=content):
                return self.rule(f"{self.write(content, ends, last=last)} | {self.end(ends)}")
            case Star(content=content) | Plus(content=content):
                inner = self.rule(self.write(content, ("",), last=False))
                return f"({inner}){'*' if isinstance(fmt, Star) else '+'} {self.end(ends)}"
            case Tag():
                inner_last = last and not has_end
                return (
                    f"{self.literal(fmt.begin)} {self.write(fmt.content, fmt.ends, last=inner_last)} {self.end(ends)}"
                )
            case TriggeredTags():
                return self.triggered(fmt, ends)
            case TagsWithSeparator():
                return self.separated(fmt, ends)
        raise TypeError(f"no writer for {type(fmt).__name__}")

    # --- parts ---

    def sequence(self, elements: tuple[Format, ...], ends: tuple[str, ...], last: bool) -> str:
        """Elements in order; neighbours that are regular are one terminal, so that none swallows the next."""
        runs: list[list[Format]] = []
        for element in elements:
            before = runs[-1][-1] if runs else None
            both = before is not None and self.regular(element) is not None and self.regular(before) is not None
            texts = isinstance(element, ConstString) and isinstance(before, ConstString)
            if both and before is not None and (texts or not (is_separable(element) and is_separable(before))):
                runs[-1].append(element)
            else:
                runs.append([element])
        written = []
        for index, run in enumerate(runs):
            at_end = index == len(runs) - 1
            only_text = all(isinstance(element, ConstString) for element in run)
            joined = ConstString("".join(e.value for e in run if isinstance(e, ConstString))) if only_text else None
            fmt = joined or (run[0] if len(run) == 1 else Sequence(tuple(run)))
            written.append(self.write(fmt, ends if at_end else ("",), last=last and at_end))
        return self.rule(" ".join(written))

    def triggered(self, fmt: TriggeredTags, ends: tuple[str, ...]) -> str:
        excluded = (*fmt.triggers, *fmt.excludes, *(end for end in ends if end))
        tags = [f"{self.literal(tag.begin)} {self.write(tag.content, tag.ends, last=False)}" for tag in fmt.tags]
        segments = []
        for trigger in fmt.triggers:
            rests = [
                f"{self.literal(tag.begin[len(trigger) :])} {self.write(tag.content, tag.ends, last=False)}"
                for tag in fmt.tags
                if trigger_of(tag, fmt.triggers) == trigger
            ]
            if rests:
                segments.append(f"{self.text((trigger,), excluded)} {self.rule(' | '.join(rests))}")
        segment = self.rule(" | ".join(segments))
        free = self.text(ends, excluded)
        first = self.rule(" | ".join(tags))
        if fmt.at_least_one:
            return f"{first} {self.end(ends)}" if fmt.stop_after_first else f"{first} ({segment})* {free}"
        if fmt.stop_after_first:
            return self.rule(f"{segment} {self.end(ends)} | {free}")
        return f"({segment})* {free}"

    def separated(self, fmt: TagsWithSeparator, ends: tuple[str, ...]) -> str:
        tag = self.rule(" | ".join(self.write(tag, ("",), last=False) for tag in fmt.tags))
        many = tag if fmt.stop_after_first else f"{tag} ({self.literal(fmt.separator)} {tag})*"
        return f"{many if fmt.at_least_one else f'({many})?'} {self.end(ends)}"

    def text(self, ends: tuple[str, ...], excluded: tuple[str, ...]) -> str:
        """Free text without `excluded`, and one of `ends`: the first that comes, since free text does not hold it."""
        # What a special token writes cannot be in the text, whose characters come from ordinary tokens.
        plain = [text for text in excluded if text and not self.special_in(text)]
        free = f"(/{_ANY}/ & ~/{_holding(plain)}/)" if plain else f"/{_ANY}/"
        literal = [end for end in ends if end and not self.special_in(end)]
        special = [end for end in ends if end and self.special_in(end)]
        options = []
        if literal:
            # The text before an end may overlap with it, so it is the lazy match that finds the first.
            others = [text for text in plain if text not in literal]
            before = f"(/{_ANY}/ & ~/{_holding(others)}/)" if others else f"/{_ANY}/"
            options.append(self.lazy(f"{before} ({self.options(tuple(literal), regular=True)})", is_lazy=True))
        if special or not literal:
            body = self.terminal(free)
            options.append(f"{body} {self.end(tuple(special))}" if special else body)
        return self.rule(" | ".join(options))

    def regular(self, fmt: Format) -> str | None:
        """`fmt` as the body of one terminal; `None` when it is not regular or holds special tokens."""
        match fmt:
            case ConstString(value=value):
                return None if self.special_in(value) else lark_text(value, regular=True)
            case RegexFormat(pattern=pattern, excludes=excludes):
                terminal = _regex_terminal(translate(pattern, limits=self.limits))
                return f"({terminal} & ~/{_holding(excludes)}/)" if excludes else terminal
            case GrammarFormat(grammar=grammar):
                rules = ebnf.parse(grammar, self.limits)
                return None if ebnf.is_recursive(rules) else self.embedded(grammar).start
            case Sequence(elements=elements) | Or(elements=elements):
                parts = [self.regular(element) for element in elements]
                between = " " if isinstance(fmt, Sequence) else " | "
                return None if None in parts else f"({between.join(part for part in parts if part)})"
            case Optional(content=content) | Star(content=content) | Plus(content=content):
                inner = self.regular(content)
                mark = {Optional: "?", Star: "*", Plus: "+"}[type(fmt)]
                return None if inner is None else f"({inner}){mark}"
            case Tag() if not any(self.special_in(text) for text in (fmt.begin, *fmt.ends)):
                inner = self.regular(fmt.content)
                begin, end = lark_text(fmt.begin, regular=True), self.options(fmt.ends, regular=True)
                return None if inner is None else f"({begin} {inner} ({end}))"
        return None

    # --- definitions ---

    def embedded(self, grammar: str) -> ebnf.Written:
        written = ebnf.to_lark(ebnf.parse(grammar, self.limits), prefix=f"g{len(self.lines)}")
        self.lines += written.lines
        return written

    def rule(self, body: str) -> str:
        self.lines.append(f"n{len(self.lines)}: {body}")
        return self.lines[-1].partition(":")[0]

    def terminal(self, body: str) -> str:
        self.lines.append(f"N{len(self.lines)}: {body}")
        return self.lines[-1].partition(":")[0]

    def lazy(self, body: str, *, is_lazy: bool) -> str:
        terminal = self.terminal(body)
        if not is_lazy:
            return terminal
        self.lines.append(f"n{len(self.lines)}[lazy]: {terminal}")
        return self.lines[-1].partition("[")[0]

    def end(self, ends: tuple[str, ...]) -> str:
        return self.literal(ends[0]) if len(ends) == 1 else self.rule(self.options(ends, regular=False))

    def options(self, ends: tuple[str, ...], *, regular: bool) -> str:
        return " | ".join(lark_text(end, regular=True) if regular else self.literal(end) for end in ends)

    def literal(self, text: str) -> str:
        """Text in a rule: a terminal per character, and special tokens by their ids."""
        parts = []
        while name := self.special_in(text):
            before, _, text = text.partition(name)
            parts += [lark_text(before, regular=False)] if before else []
            parts.append(f"<[{self.specials[name]}]>")
        return " ".join([*parts, lark_text(text, regular=False)] if text or not parts else parts)

    def special_in(self, text: str) -> str:
        """The special token that comes first in a text, the longest of those; empty if there is none."""
        found = [(text.find(name), -len(name), name) for name in self.specials if name in text]
        return min(found)[2] if found else ""


def is_separable(fmt: Format) -> bool:
    """Whether a format needs no terminal of its own to be told from its neighbours: literals, and tags with an end.

    As one terminal it would be taken for the longer word wherever another option begins alike, and never be empty.
    """
    match fmt:
        case ConstString():
            return True
        case Tag():
            return all(fmt.ends)
        case Sequence(elements=elements) | Or(elements=elements):
            return all(is_separable(element) for element in elements)
        case Optional(content=content) | Star(content=content) | Plus(content=content):
            return is_separable(content)
    return False


def _regex_terminal(pattern: str) -> str:
    return f"/{pattern}/" if pattern else '""'


def _holding(texts: Iterable[str]) -> str:
    """A pattern of all texts in which one of `texts` stands."""
    return f"(?s:.*({'|'.join(map(_regex, texts))}).*)"


def _regex(text: str) -> str:
    return "".join(escaped(ord(char)) for char in text)
