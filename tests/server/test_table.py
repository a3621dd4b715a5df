"""The table of routes and the page about it say the same."""

from __future__ import annotations

import re
from pathlib import Path

from sgl.server.app import description, table

PAGE = (Path(__file__).parents[2] / "sgl/server/README.md").read_text()
WHO = {"open": "anybody", "user": "an API key, where there are keys", "admin": "the admin key"}


def test_the_page_has_every_route_under_its_tier() -> None:
    for tier, who in WHO.items():
        (row,) = re.findall(rf"^\| {re.escape(who)} \| (.*) \|$", PAGE, re.MULTILINE)
        shown = {
            (group.split(" ", 1)[0], path) for group in re.findall(r"`([^`]*)`", row) for path in group.split(" ")[1:]
        }
        routes = {(route.method, re.sub(r":\w+}", "}", route.path)) for route in table() if route.tier == tier}
        assert shown == routes


def test_the_description_refers_to_nothing_that_it_lacks() -> None:
    text = str(description())
    schemas = description()["components"]["schemas"]
    assert set(re.findall(r"#/components/schemas/(\w+)", text)) <= set(schemas)
    assert "messages" in schemas["ChatRequest"]["properties"]
