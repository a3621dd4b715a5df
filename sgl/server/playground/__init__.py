"""The playground: one page at `/` to try the server with, as plain files without a build step.

Owns the page (`page.html`, `page.css`, and scripts in the order of `SCRIPTS`), the programs that it offers
(`examples.py`, compiled into `examples.json`), and its route. The page uses the same routes as any client, with the key
that its reader types in; nothing of the server is in it, so anybody may have it. It is one answer, needs no other host,
and its policy allows exactly its own script and styles, by their hashes: no markup from text, no frames, no other
addresses.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

from starlette.responses import Response

from sgl.errors import NotFound
from sgl.server.call import Call
from sgl.server.routes import Routes

routes = Routes()

SCRIPTS = ("base.js", "chat.js", "program.js", "validate.js", "schema.js", "metrics.js", "app.js")
"""One after the other they are the page's script."""


@routes.get("/", "open")
async def playground(call: Call) -> Any:
    """The playground page."""
    if not call.server.config.playground:
        raise NotFound("the playground is off", hint="start the server with --playground")
    text, policy = page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")


@cache
def page() -> tuple[bytes, str]:
    """The page, and the policy that it is sent with."""
    style = _read("page.css")
    script = "\n".join(_read(name) for name in SCRIPTS)
    text = _read("page.html")
    for name, value in (("style", style), ("script", script), ("examples", _inert(_read("examples.json")))):
        text = text.replace("{{" + name + "}}", value)
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return text.encode(), "; ".join(f"{name} {value}" for name, value in policy.items())


def _read(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")


def _inert(json_text: str) -> str:
    """JSON that cannot end the element that it stands in."""
    return json_text.replace("<", "\\u003c")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
