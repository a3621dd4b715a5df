"""Structural tags: free text in which a trigger begins a constrained part. Both known forms, as one tree.

Owns the formats, the reader of both forms and the checks that need no engine. Called by `sgl.grammars.compiler`, and
by the backends, which write the tree in their own languages. No grammar engine is imported.

* Legacy: `{"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}`.
* Current: `{"type": "structural_tag", "format": F}` with F one of the formats below, named as in xgrammar.

Where text is free, no trigger may be in it but one that begins a tag. With `at_least_one` the output begins with a tag;
with `stop_after_first` it ends after one.

Fails with `InvalidGrammar` whose `pointer` says where; schemas inside fail as schemas do, with the pointer from the
root of the tag.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn, TypeAlias

import msgspec

from sgl.errors import ConstraintTooComplex, InvalidGrammar, SglError
from sgl.grammars import ebnf
from sgl.grammars.keywords import check_schema, is_deeper
from sgl.grammars.regex import translate
from sgl.grammars.spec import canonical_schema
from sgl.limits import DEFAULT_LIMITS, Limits

MAX_FORMATS = 1024
"""Formats in one structural tag; each is a rule of a grammar."""


class ConstString(msgspec.Struct, frozen=True, tag_field="type", tag="const_string", forbid_unknown_fields=True):
    """Exactly this text."""

    value: str


class SchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """One JSON value valid under the schema."""

    json_schema: dict[str, Any] | bool


class RegexFormat(msgspec.Struct, frozen=True, tag_field="type", tag="regex", forbid_unknown_fields=True):
    """A full match of a Python regular expression, without any of `excludes` in it."""

    pattern: str
    excludes: tuple[str, ...] = ()


class GrammarFormat(msgspec.Struct, frozen=True, tag_field="type", tag="grammar", forbid_unknown_fields=True):
    """A text of an EBNF grammar (see `sgl.grammars.ebnf`)."""

    grammar: str


class AnyText(msgspec.Struct, frozen=True, tag_field="type", tag="any_text", forbid_unknown_fields=True):
    """Free text without any of `excludes`, up to the end of the tag that it is in."""

    excludes: tuple[str, ...] = ()


class Sequence(msgspec.Struct, frozen=True, tag_field="type", tag="sequence", forbid_unknown_fields=True):
    """One after another."""

    elements: tuple[Format, ...]


class Or(msgspec.Struct, frozen=True, tag_field="type", tag="or", forbid_unknown_fields=True):
    """One of them."""

    elements: tuple[Format, ...]


class Optional(msgspec.Struct, frozen=True, tag_field="type", tag="optional", forbid_unknown_fields=True):
    """The content or nothing."""

    content: Format


class Star(msgspec.Struct, frozen=True, tag_field="type", tag="star", forbid_unknown_fields=True):
    """The content any number of times."""

    content: Format


class Plus(msgspec.Struct, frozen=True, tag_field="type", tag="plus", forbid_unknown_fields=True):
    """The content once or more."""

    content: Format


class Tag(msgspec.Struct, frozen=True, tag_field="type", tag="tag", forbid_unknown_fields=True):
    """`begin`, the content, then `end` or one of several ends."""

    begin: str
    content: Format
    end: str | tuple[str, ...] = ""

    @property
    def ends(self) -> tuple[str, ...]:
        """The ends as a tuple."""
        return (self.end,) if isinstance(self.end, str) else self.end


class TriggeredTags(msgspec.Struct, frozen=True, tag_field="type", tag="triggered_tags", forbid_unknown_fields=True):
    """Free text in which each trigger begins one of the tags."""

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: tuple[str, ...] = ()


class TagsWithSeparator(
    msgspec.Struct, frozen=True, tag_field="type", tag="tags_with_separator", forbid_unknown_fields=True
):
    """Tags and nothing else, with `separator` between them."""

    tags: tuple[Tag, ...]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format: TypeAlias = (
    ConstString | SchemaFormat | RegexFormat | GrammarFormat | AnyText | Sequence | Or | Optional | Star | Plus | Tag
    | TriggeredTags | TagsWithSeparator
)  # fmt: skip


class _Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    schema: dict[str, Any] | bool
    end: str


class _Legacy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    structures: tuple[_Structure, ...]
    triggers: tuple[str, ...]


class _Current(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    format: Format


_PATH = re.compile(r" - at `\$(.*)`$")


def parse(text: str, limits: Limits = DEFAULT_LIMITS) -> Format:
    """The format that a structural tag in either form describes; its content is not checked yet.

    Raises:
        InvalidGrammar: not JSON, neither form, an unknown format or field.
        ConstraintTooComplex: too large or too deep.

    Example:
        >>> parse('{"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}')
        ConstString(value='a')
    """
    if len(text.encode("utf-8", "surrogatepass")) > limits.max_schema_bytes:
        raise ConstraintTooComplex(
            f"the structural tag is larger than {limits.max_schema_bytes} bytes", hint="shorten its schemas"
        )
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(f"the structural tag is not JSON: {error}", hint="mend the text", pointer="") from None
    if is_deeper(data, limits.max_json_depth):
        raise ConstraintTooComplex(f"the structural tag is nested deeper than {limits.max_json_depth}", pointer="")
    if not isinstance(data, dict) or data.get("type") != "structural_tag":
        _fail('the structural tag has no "type": "structural_tag"', "/type", "set it")
    try:
        if "format" in data:
            return msgspec.convert(data, _Current).format
        legacy = msgspec.convert(data, _Legacy)
    except msgspec.ValidationError as error:
        message = str(error)
        found = _PATH.search(message)
        pointer = re.sub(r"\.|\[(\d+)\]", lambda part: f"/{part[1] or ''}", found[1]) if found else ""
        _fail(f"the structural tag cannot be read: {_PATH.sub('', message)}", pointer, "see the formats' fields")
    tags = tuple(Tag(item.begin, SchemaFormat(item.schema), item.end) for item in legacy.structures)
    return TriggeredTags(legacy.triggers, tags)


def check(text: str, backend: str, limits: Limits = DEFAULT_LIMITS) -> None:
    """Everything about a structural tag that can be told without an engine.

    Raises:
        InvalidGrammar, InvalidRegex, InvalidSchema, UnsupportedSchema, ConstraintTooComplex: with `pointer`.

    Example:
        >>> check('{"type": "structural_tag", "format": {"type": "any_text"}}', "llguidance")
    """
    fmt = parse(text, limits)
    if '"format"' not in text or "format" not in json.loads(text):
        _LegacyCheck(backend, limits).visit(fmt, "", is_last=True)
    else:
        _Check(backend, limits).visit(fmt, "/format", is_last=True)


def trigger_of(tag: Tag, triggers: tuple[str, ...]) -> str:
    """The trigger that begins a tag; the check has seen to it that there is one."""
    return next(trigger for trigger in triggers if tag.begin.startswith(trigger))


class _Check:
    """One walk over one tree. `is_last`: whether only the end of the output, or of a tag with an end, follows."""

    tags_at = "/tags"

    def __init__(self, backend: str, limits: Limits) -> None:
        self.backend = backend
        self.limits = limits
        self.count = 0

    def visit(self, fmt: Format, at: str, *, is_last: bool) -> None:
        self.count += 1
        if self.count > MAX_FORMATS:
            raise ConstraintTooComplex(f"the structural tag has more than {MAX_FORMATS} formats", pointer=at)
        match fmt:
            case SchemaFormat(json_schema=schema):
                self.content(at + "/json_schema", lambda: self.schema(schema))
            case RegexFormat(pattern=pattern, excludes=excludes):
                self.content(at + "/pattern", lambda: translate(pattern, limits=self.limits))
                self.texts(excludes, at + "/excludes")
            case GrammarFormat(grammar=grammar):
                self.content(at + "/grammar", lambda: ebnf.parse(grammar, self.limits))
            case AnyText(excludes=excludes):
                self.texts(excludes, at + "/excludes")
                self.open(at, is_last)
            case Sequence(elements=elements) | Or(elements=elements):
                if not elements:
                    _fail("a list of elements is empty", at + "/elements", "give at least one")
                for index, element in enumerate(elements):
                    last = is_last and (isinstance(fmt, Or) or index == len(elements) - 1)
                    self.visit(element, f"{at}/elements/{index}", is_last=last)
            case Optional(content=content):
                self.visit(content, at + "/content", is_last=is_last)
            case Star(content=content) | Plus(content=content):
                self.visit(content, at + "/content", is_last=False)
            case Tag():
                self.tag(fmt, at, is_last=is_last)
            case TriggeredTags():
                self.triggered(fmt, at, is_last)
            case TagsWithSeparator(tags=tags):
                self.tags(tags, at)

    def tag(self, tag: Tag, at: str, *, is_last: bool = False) -> None:
        if not tag.ends:
            _fail("a tag has an empty list of ends", at + "/end", "give one")
        if len(tag.ends) > 1:
            self.texts(tag.ends, at + "/end")
        self.visit(tag.content, at + "/content", is_last=all(tag.ends) or is_last)

    def tags(self, tags: tuple[Tag, ...], at: str) -> None:
        if not tags:
            _fail("a list of tags is empty", at + self.tags_at, "give at least one")
        for index, tag in enumerate(tags):
            self.tag(tag, f"{at}{self.tags_at}/{index}")

    def triggered(self, fmt: TriggeredTags, at: str, is_last: bool) -> None:
        self.open(at, is_last or (fmt.at_least_one and fmt.stop_after_first))
        if not fmt.triggers:
            _fail("the list of triggers is empty", at + "/triggers", "give at least one")
        self.texts(fmt.triggers, at + "/triggers")
        self.texts(fmt.excludes, at + "/excludes")
        for index, trigger in enumerate(fmt.triggers):
            for other in fmt.triggers:
                if trigger != other and other in trigger:
                    _fail(
                        f"the trigger {trigger!r} contains the trigger {other!r}, and so never begins a tag",
                        f"{at}/triggers/{index}",
                        "remove it",
                    )
        self.tags(fmt.tags, at)
        for index, tag in enumerate(fmt.tags):
            if not any(tag.begin.startswith(trigger) for trigger in fmt.triggers):
                _fail(
                    f"no trigger begins the tag {tag.begin!r}",
                    f"{at}{self.tags_at}/{index}/begin",
                    "add a trigger that is its prefix",
                )

    def open(self, at: str, is_last: bool) -> None:
        if not is_last:
            _fail(
                "free text stands where its end cannot be told",
                at,
                "put it in a tag with an end, or last in the structural tag",
            )

    def texts(self, texts: tuple[str, ...], at: str) -> None:
        if "" in texts:
            _fail("an empty text stands in a list", f"{at}/{texts.index('')}", "remove it")

    def schema(self, schema: Any) -> None:
        check_schema(canonical_schema(schema), self.backend, self.limits, checkable=False)

    def content(self, at: str, run: Any) -> None:
        """Run a check of what stands at `at`; its errors get the pointer from the root of the tag."""
        try:
            run()
        except SglError as error:
            details = {**error.details, "pointer": at + str(error.details.get("pointer") or "")}
            raise type(error)(f"{error.message}, in the structural tag at {at}", hint=error.hint, **details) from None


class _LegacyCheck(_Check):
    """The same with the pointers of the older form."""

    tags_at = "/structures"

    def schema(self, schema: Any) -> None:
        check_schema(canonical_schema(schema), self.backend, self.limits, checkable=False)

    def content(self, at: str, run: Any) -> None:
        super().content(at.replace("/content/json_schema", "/schema"), run)


def _fail(what: str, pointer: str, hint: str) -> NoReturn:
    raise InvalidGrammar(f"{what}, at {pointer or 'the root'}", hint=hint, pointer=pointer)
