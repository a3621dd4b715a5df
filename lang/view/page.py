"""What the pages share: escaping, elements, styles, and the frame of a page that stands alone.

Owns the one way in which text gets into a page. `element` escapes its attributes and every string that it is given, so
that what a model wrote is never markup; only what `element` made is. The page's policy forbids scripts and addresses.
"""

from __future__ import annotations

import html

_CONTROL = dict.fromkeys((*range(0, 9), 11, 12, *range(14, 32), 127), "�")


class Markup(str):
    """HTML that `element` made. Anything else is text."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """Text as HTML: markup characters as entities, control characters and lone surrogates as U+FFFD.

    Example:
        >>> escape("<b>&'")
        '&lt;b&gt;&amp;&#x27;'
    """
    clean = text.translate(_CONTROL).encode("utf-8", "replace").decode("utf-8")
    return Markup(html.escape(clean, quote=True))


def element(name: str, *children: str, **attributes: str | None) -> Markup:
    """An element; children that are not `Markup` are text, attributes that are `None` are left out (`class_`: class).

    Example:
        >>> element("p", "1 < 2", element("b", "!"), class_="note")
        '<p class="note">1 &lt; 2<b>!</b></p>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(child if isinstance(child, Markup) else escape(child) for child in children)
    return Markup(f"<{name}{given}>{inside}</{name}>")


def table(columns: list[str], rows: list[tuple[str, ...]], **attributes: str | None) -> Markup:
    """A table of texts; columns after the first are aligned as numbers."""
    head = element("tr", *(element("th", column) for column in columns))
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    return element("table", head, *body, **attributes)


STYLE = """
.sgl { color-scheme: light dark; --line: #8884; --prompt: #8882; --cached: #2e9e5b33; --generated: #2f6fdf33;
  --forced: #c9820033; --chosen: #8a4fd333; font: 14px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 1rem auto; }
.sgl h1 { font-size: 1.2rem; margin: 0 0 .3rem; } .sgl h2 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
.sgl table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.sgl td, .sgl th { padding: .1rem .8rem .1rem 0; text-align: right; border-bottom: 1px solid var(--line); }
.sgl td:first-child, .sgl th:first-child { text-align: left; white-space: pre; }
.sgl .note, .sgl .place { opacity: .7; font-size: .85em; }
.sgl .branch { border-left: 3px solid var(--line); padding: .2rem 0 .2rem .8rem; margin: .4rem 0 .4rem .2rem; }
.sgl .branch > summary { cursor: pointer; }
.sgl .text { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; }
.sgl .prompt { background: var(--prompt); } .sgl .cached { background: var(--cached); }
.sgl .generated { background: var(--generated); } .sgl .forced { background: var(--forced); }
.sgl .select { background: var(--chosen); }
.sgl .role { opacity: .55; font-size: .85em; border: 1px solid var(--line); border-radius: .3em; padding: 0 .3em; }
.sgl .token, .sgl .value { border-bottom: 1px dotted #888; } .sgl .key span { padding: 0 .5em; margin-right: .6em; }
.sgl .failed { border-left: 3px solid #d33; padding-left: .8rem; white-space: pre-wrap; }
.sgl .bar { position: relative; height: 1rem; background: var(--prompt); min-width: 20rem; }
.sgl .bar i { position: absolute; top: 0; bottom: 0; background: #2f6fdf99; min-width: 2px; }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def part(*children: str) -> Markup:
    """A piece of a page, with its styles: what a notebook shows."""
    return element("div", Markup(f"<style>{STYLE}</style>"), *children, class_="sgl")


def page(title: str, *children: str) -> str:
    """A whole page."""
    head = element(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", title),
    )
    return "<!doctype html>\n" + element("html", head, element("body", part(*children)), lang="en") + "\n"
