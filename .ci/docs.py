"""Builds the documentation: README, rooms, tutorials and the API reference, as HTML that needs no network.

Run by `make docs`. Owns how a tutorial script becomes a page (`page_of`: docstring and comments are Markdown, the rest
is code) and which modules the reference has. pdoc writes the reference from docstrings; markdown2 renders pages.
"""

from __future__ import annotations

import ast
import html
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import markdown2

ROOT = Path(__file__).resolve().parents[1]
MODULES = [
    "sgl",
    "sgl.errors",
    "sgl.testing",
    "sgl.limits",
    "sgl.lang.graph",
    "sgl.lang.events",
    "sgl.grammars.spec",
    "sgl.grammars.types",
    "sgl.server.config",
]
"""What has a reference page: the public names, and the values that users meet beside them."""

ROOMS = ("lang", "runtime", "grammars", "kernels", "sgl/server", "sgl/bench", "deploy", "tests/programs")
PAGES = ["README.md", "SECURITY.md", "CHANGELOG.md", *(f"{room}/README.md" for room in ROOMS)]
EXTRAS = ["fenced-code-blocks", "tables", "header-ids", "code-friendly", "cuddled-lists"]

STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #1c1e21; }
nav { font-size: 14px; margin-bottom: 2rem; } nav a { margin-right: 1rem; }
pre { background: #f5f6f8; padding: .8rem 1rem; overflow-x: auto; border-radius: 6px; }
code { font: 14px/1.45 ui-monospace, monospace; } table { border-collapse: collapse; font-size: 14px; }
td, th { border: 1px solid #d7dae0; padding: .3rem .6rem; text-align: left; vertical-align: top; }
img { max-width: 100%; }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #dfe2e7; } pre { background: #202329; } td, th { border-color: #3a3f48; }
  a { color: #8ab4f8; }
}
"""


def page_of(script: str, name: str) -> str:
    """A tutorial script as Markdown.

    Comments at the margin are prose, without their `# `; code between them is a fenced block. Other comments belong to
    the code.
    """
    tree = ast.parse(script)
    lines = script.splitlines()
    doc = ast.get_docstring(tree) or ""
    first = tree.body[0].end_lineno or 0 if doc else 0
    title, _, rest = doc.partition("\n")
    parts = [f"# {title.rstrip('.')}", rest.strip(), f"`sgl run tutorials/{name}`"]
    for kind, block in _blocks(lines[first:]):
        text = "\n".join(block).strip("\n")
        if text.strip():
            parts.append(text if kind == "prose" else f"```python\n{text}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


def _blocks(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Runs of prose and of code. A comment inside an indented block is code, as it does not begin at the margin."""
    kind, block = "code", list[str]()
    for line in lines:
        now = "prose" if line.startswith("#") else "code" if line.strip() else kind
        if now != kind:
            yield kind, block
            kind, block = now, []
        block.append(re.sub(r"^# ?", "", line) if now == "prose" else line)
    yield kind, block


def linked(text: str, at: Path) -> str:
    """Links to files of the repository, as links to their pages; `at` is the folder of the page."""

    def to_page(match: re.Match[str]) -> str:
        target, anchor = match.group(1), match.group(2) or ""
        file = (at / target).resolve()
        if "://" in target or not file.is_relative_to(ROOT):
            return match.group(0)
        is_page = file.suffix == ".md" or file.parent == ROOT / "tutorials"
        return f"]({Path(target).with_suffix('.html')}{anchor})" if is_page else match.group(0)

    return re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", to_page, text)


def write_page(target: Path, text: str, source: Path, out: Path) -> None:
    """One page with the navigation."""
    up = "../" * len(target.relative_to(out).parent.parts)
    links = (("README", "README.html"), ("Tutorials", "tutorials/README.html"), ("API", "api/sgl.html"))
    navigation = "".join(f'<a href="{up}{page}">{name}</a>' for name, page in links)
    heading = re.search(r"^# (.+)", text, re.MULTILINE)
    title = html.escape(heading.group(1) if heading else source.name)
    body = markdown2.markdown(linked(text, source.parent), extras=EXTRAS)
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f"{head}<nav>{navigation}</nav>{body}</html>\n", encoding="utf-8")


def build_pages(out: Path) -> list[Path]:
    """Every page but the reference; the files that were written."""
    written = []
    scripts = sorted((ROOT / "tutorials").glob("[0-9]*.py"))
    for source in [*(ROOT / page for page in PAGES), *sorted((ROOT / "tutorials").glob("*.md")), *scripts]:
        text = source.read_text(encoding="utf-8")
        target = out / source.relative_to(ROOT).with_suffix(".html")
        write_page(target, page_of(text, source.name) if source.suffix == ".py" else text, source, out)
        written.append(target)
    for picture in ROOT.glob("tutorials/pictures/*"):
        (out / "tutorials/pictures").mkdir(parents=True, exist_ok=True)
        (out / "tutorials/pictures" / picture.name).write_bytes(picture.read_bytes())
    (out / "index.html").write_text('<!doctype html><meta http-equiv="refresh" content="0; url=README.html">\n')
    return written


def build_reference(out: Path) -> None:
    """The API reference, from docstrings."""
    import pdoc

    pdoc.render.configure(docformat="google", show_source=False, search=True)
    package, *modules = MODULES
    # What lies below the package is no reference of its own unless it is named.
    pdoc.pdoc(package, rf"!{package}\.", *modules, output_directory=out / "api")


def main(out: Path) -> None:
    """Build everything into `out`."""
    build_pages(out)
    build_reference(out)
    sys.stdout.write(f"documentation: {out / 'index.html'}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "docs"))
