"""Values checked after decoding, for what no backend enforces while they are written.

Owns the two halves of `JsonSchema.unsupported == "check"`: `loosened`, the schema without what the backend would not
enforce, which is compiled, and `CheckedGrammar`, which knows the whole schema. Called by `sgl.grammars.compiler`; the
runtime calls `CheckedGrammar.check` with the finished text, off the step loop.

The validator is jsonschema-rs, draft 2020-12, formats included, in a process of its own that has the time and memory of
a compilation: a schema whose alternatives multiply costs that process. It starts with the first schema that needs it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sgl.errors import ConstraintTooComplex, InvalidSchema, SchemaViolation, UnsupportedSchema
from sgl.grammars.helper import Helpers
from sgl.grammars.keywords import parse_schema
from sgl.grammars.matcher import CompiledGrammar, Matcher
from sgl.grammars.pointers import steps_of
from sgl.limits import DEFAULT_LIMITS, Limits

_LOOSER = {"oneOf": "anyOf"}
"""Words that have a looser form; others are left out where they are not enforced."""


def loosened(schema_text: str, pointers: Iterable[str], limits: Limits = DEFAULT_LIMITS) -> str:
    """The schema without what is at `pointers`; `oneOf` becomes `anyOf`.

    Example:
        >>> loosened('{"type": "array", "uniqueItems": true, "oneOf": [{}]}', ["/uniqueItems", "/oneOf"])
        '{"type":"array","anyOf":[{}]}'
    """
    schema: Any = parse_schema(schema_text, limits)
    for pointer in pointers:
        *steps, word = steps_of(pointer)
        place = schema
        for step in steps:
            place = place[int(step) if isinstance(place, list) else step]
        if word == "patternProperties":
            place.pop("additionalProperties", None)  # which spoke of the names that no pattern matches
        looser = _LOOSER.get(word, "")
        if looser and looser not in place:
            # In its place: the order of properties is the order of generation.
            items = [(looser if name == word else name, value) for name, value in place.items()]
            place.clear()
            place.update(items)
        else:
            del place[word]
    return json.dumps(schema, separators=(",", ":"), ensure_ascii=False)


class Validator:
    """The process that checks values.

    Args:
        limits: `max_compile_s` and `max_compile_bytes` bound one check, too.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._helper = Helpers("sgl.grammars.validation_helper", {}, limits.max_compile_bytes)

    def check_schema(self, schema_text: str) -> None:
        """Check that values can be checked with the schema.

        Raises:
            InvalidSchema: it cannot be read, or refers to what is not there.
            UnsupportedSchema: a format that is not known.
            ConstraintTooComplex: reading it takes too long.
        """
        answer = self._ask({"schema": schema_text})
        if "fault" in answer:
            unknown = str(answer["fault"]).startswith("Unknown format")
            kind = UnsupportedSchema if unknown else InvalidSchema
            raise kind(
                f"values cannot be checked with the JSON schema: {answer['fault']}",
                hint="use another format, or a pattern" if unknown else "mend it there",
                pointer=answer["pointer"],
            )

    def check(self, schema_text: str, value_text: str) -> None:
        """Check a value, as JSON text.

        Raises:
            SchemaViolation: it is not valid.
            ConstraintTooComplex: checking it takes too long.
        """
        answer = self._ask({"schema": schema_text, "value": value_text})
        if "broken" in answer or "error" in answer:
            pointer, keyword = answer.get("pointer", ""), answer.get("schema_pointer", "")
            what = answer.get("broken") or answer["error"]
            raise SchemaViolation(
                f"the value breaks {keyword or 'its schema'} at {pointer or 'its root'}: {what}",
                hint="generate it again, or write the schema so that it is enforced while decoding",
                value=value_text,
                pointer=pointer,
                schema_pointer=keyword,
            )

    def close(self) -> None:
        """End the process."""
        self._helper.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = self._helper.ask(request, self._limits.max_compile_s)
        if answer is None:
            raise ConstraintTooComplex(
                f"the value could not be checked within {self._limits.max_compile_s:g} s and "
                f"{self._limits.max_compile_bytes} bytes",
                hint="write the schema with fewer alternatives in alternatives",
                pointer="",
            )
        return answer


class CheckedGrammar:
    """A compiled grammar of a looser schema, with the whole one."""

    def __init__(self, inner: CompiledGrammar, schema_text: str, validator: Validator) -> None:
        self.inner = inner
        self._schema_text = schema_text
        self._validator = validator

    def matcher(self) -> Matcher:
        """A new matcher of the looser schema, at the start."""
        return self.inner.matcher()

    def check(self, value_text: str) -> None:
        """Check a finished value; takes up to `limits.max_compile_s`.

        Raises:
            SchemaViolation, ConstraintTooComplex: as `Validator.check`.
        """
        self._validator.check(self._schema_text, value_text)
