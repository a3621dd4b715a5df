"""The page on adding a model, followed to the letter: its blocks are run in order, its own test among them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl.runtime.loading.shapes import parse_override
from sgl.runtime.models import decoder, registry

PAGE = Path(__file__).resolve().parents[2] / "tutorials" / "adding_a_model.md"
NAME = "GraniteForCausalLM"


@pytest.fixture
def blocks() -> Iterator[list[str]]:
    """The page's Python; what it registers is forgotten afterwards."""
    assert NAME not in registry.architectures()
    yield re.findall(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    registry._architectures.pop(NAME, None)
    registry._classes.pop(NAME, None)


def test_the_page_adds_a_model(blocks: list[str], tmp_path: Path) -> None:
    entry, layers, test = blocks
    space: dict[str, Any] = {"__name__": "page"}
    exec(entry, space)
    assert parse_override('{"residual_multiplier": 0.5}') == {"residual_multiplier": 0.5}
    exec(layers, space)
    exec(test, space)
    space["test_granite"](tmp_path)


def test_what_the_page_promises_is_there() -> None:
    """Values of `ModelConfig`, fields of `Architecture` and files that it names."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| in the model | value |") : text.index("## 1.")]
    named = {name for row in re.findall(r"\| ([^|]+) \|$", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert {"windows", "experts", "own"} <= named <= set(registry.ModelConfig.__struct_fields__)
    for field in ("gguf", "gguf_pairs", "pairs", "fused", "renamed", "norm_offset", "own", "read", "text_config"):
        assert f"`{field}`" in text
        assert field in registry.Architecture.__struct_fields__
    for place, method in re.findall(r"`(DecoderLayer|Attention)?\.?(attention|feed_forward|positioned)`", text):
        assert hasattr(getattr(decoder, place or "Attention"), method)
    for file in re.findall(r"`((?:runtime|tests|kernels)/[\w/]+\.py)`", text):
        assert (PAGE.parents[1] / file).exists() or "NAME" in file
