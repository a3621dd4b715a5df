"""The documentation builds without network, has every public name, and its pages link to what is there."""

from __future__ import annotations

import importlib.util
import socket
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

import sgl

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    """The build script, which is no module of the package."""
    spec = importlib.util.spec_from_file_location("sgl_docs", ROOT / ".ci/docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Links(HTMLParser):
    """Targets of a page's links and pictures, and its ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.targets += [value for name in ("href", "src") if (value := given.get(name)) is not None]
        if given.get("id"):
            self.ids.add(str(given["id"]))


def test_the_build(builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object) -> None:
        raise AssertionError("the build opens a connection")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    before = set(sys.modules)
    builder.main(tmp_path)
    assert "torch" not in set(sys.modules) - before, "the reference loads no model code"
    reference = Links((tmp_path / "api/sgl.html").read_text(encoding="utf-8"))
    assert set(sgl.__all__) - {"__version__", "errors"} <= reference.ids
    for module in builder.MODULES:
        assert (tmp_path / "api" / f"{module.replace('.', '/')}.html").exists()
    assert not (tmp_path / "api/sgl/runtime").exists(), "rooms are no public interface"
    pages = [page for page in tmp_path.rglob("*.html") if "api" not in page.parts]
    assert len(pages) > 25
    for page in pages:
        for target in Links(page.read_text(encoding="utf-8")).targets:
            path = target.split("#")[0]
            if path.endswith(".html") and "://" not in path:
                assert (page.parent / path).exists(), f"{page.relative_to(tmp_path)} links to {target}"


def test_a_script_becomes_a_page(builder: ModuleType) -> None:
    script = '''"""Title: of it.

More.
"""

import sgl

# ## Head
#
# Prose.


def part():
    # a comment of the code
    return 1


# The end.
'''
    page = builder.page_of(script, "07_name.py")
    code = "```python\ndef part():\n    # a comment of the code\n    return 1\n```"
    assert page == (
        "# Title: of it\n\nMore.\n\n`sgl run tutorials/07_name.py`\n\n```python\nimport sgl\n```\n\n"
        f"## Head\n\nProse.\n\n{code}\n\nThe end.\n"
    )
