"""The process in which xgrammar compiles: `python -m sgl.grammars.xgrammar_helper` (see `sgl.grammars.helper`).

Owns one xgrammar compiler. The first message holds the `tokenizer`; requests are `{"kind": ..., ...}`, answered by
`{"grammar": text}` or `{"error": text}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl.grammars.helper import serve


def make(first: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What answers requests for the tokenizer in `first`."""
    import xgrammar

    tokenizer = xgrammar.TokenizerInfo.deserialize_json(first["tokenizer"])
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
    return lambda request: {"grammar": _compile(compiler, request).serialize_json()}


def _compile(compiler: Any, request: dict[str, Any]) -> Any:
    kind = request.pop("kind")
    if kind == "schema":
        return compiler.compile_json_schema(request.pop("schema"), strict_mode=False, **request)
    if kind == "regex":
        return compiler.compile_regex(request["pattern"])
    if kind == "ebnf":
        return compiler.compile_grammar(request["grammar"])
    return compiler.compile_structural_tag(request["tag"])


if __name__ == "__main__":
    serve(make)
