"""Random walks under a mask: what a grammar allows, drawn uniformly, which no model would do.

After a while a walk prefers to close what is open, so that it ends. Used by the tests that hold finished texts against
an independent validator.
"""

from __future__ import annotations

import random

import numpy as np
from support.matcher_conformance import world

from sgl.grammars.matcher import CompiledGrammar, allocate_bitmask, bitmask_to_bool

WORLD = world()
PATIENCE = 60
"""Tokens of free choice before a walk prefers to close."""
MAX_TOKENS = 1500
CLOSERS = [
    token_id for text in (b'"', b"}", b"]", b"0", b"1") for token_id, b in WORLD.token_bytes.items() if b == text
]


def walk(grammar: CompiledGrammar, rng: random.Random) -> list[int] | None:
    """Ids of one random walk up to the end of sequence; `None` when it did not end in `MAX_TOKENS`."""
    matcher = grammar.matcher()
    bitmask = allocate_bitmask(1, WORLD.vocab_size)
    path: list[int] = []
    while len(path) < MAX_TOKENS:
        matcher.fill(bitmask, 0)
        allowed = np.flatnonzero(bitmask_to_bool(bitmask, WORLD.vocab_size)[0]).tolist()
        assert allowed, f"dead end after {path}"
        ends = matcher.is_complete() and (len(allowed) <= len(WORLD.eos_ids) or rng.random() < 0.2)
        if ends or (matcher.is_complete() and len(path) > PATIENCE):
            return path
        closers = [token_id for token_id in CLOSERS if token_id in allowed] if len(path) > PATIENCE else []
        ordinary = [token_id for token_id in allowed if token_id not in WORLD.eos_ids]
        token_id = closers[0] if closers and rng.random() < 0.8 else rng.choice(ordinary)
        assert matcher.accept(token_id)
        path.append(token_id)
    return None
