"""The process in which values are checked: `python -m sgl.grammars.validation_helper` (see `sgl.grammars.helper`).

Owns jsonschema-rs. A request is `{"schema": text}`, to learn whether values can be checked with it, or also has a
`value`, as JSON text. The answer is `{}` when all is well, `{"fault": text, "pointer": ...}` for a schema that cannot
be read, and `{"broken": text, "pointer": ..., "schema_pointer": ...}` for a value that is not valid. References outside
the document are not followed: nothing is fetched.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from typing import Any

from sgl.grammars.helper import serve
from sgl.grammars.pointers import pointer_of

_BACKTRACK_LIMIT = 1_000_000
"""Steps of one pattern on one string."""
_CACHE_SIZE = 64


def make(first: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What answers requests."""
    import jsonschema_rs

    patterns = jsonschema_rs.FancyRegexOptions(backtrack_limit=_BACKTRACK_LIMIT)

    @lru_cache(maxsize=_CACHE_SIZE)
    def validator(text: str) -> Any:
        schema = json.loads(text)
        if isinstance(schema, dict):
            # Another base address would turn references within the document into ones that must be fetched.
            schema = {word: value for word, value in schema.items() if word not in ("$schema", "$id")}
        return jsonschema_rs.Draft202012Validator(
            schema,
            validate_formats=True,
            ignore_unknown_formats=False,
            retriever=_fetch_nothing,
            pattern_options=patterns,
        )

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            checks = validator(request["schema"])
        except jsonschema_rs.ValidationError as error:
            return {"fault": error.message[:300], "pointer": pointer_of(error.instance_path)}
        if "value" not in request:
            return {}
        try:
            checks.validate(json.loads(request["value"], parse_float=Decimal))
        except jsonschema_rs.ValidationError as error:
            pointers = {"pointer": pointer_of(error.instance_path), "schema_pointer": pointer_of(error.schema_path)}
            return {"broken": error.message[:300], **pointers}
        return {}

    return answer


def _fetch_nothing(uri: str) -> Any:
    raise ValueError(f"{uri} is outside this document")


if __name__ == "__main__":
    serve(make)
