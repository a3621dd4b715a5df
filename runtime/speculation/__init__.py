"""Speculation: tokens that can be guessed are computed together with those that are known, and checked.

`drafter.py` makes the guesses of a step from what proposers say and what a guess costs (`control.py`), as chains or
trees (`tree.py`); `verify.py` takes what was drawn at the guessed places. The scheduler alone calls both. Proposers:
`ngram.py` (text that occurred before), `draft_model.py`, program text (`text.py`), the constraint's forced tokens.

What is drawn never depends on a guess: a draw is a function of (seed, position) and the logits of its place, with or
without drafts before it, so outputs are not only distributed alike, they are the same tokens (where logits are the
same bits: in deterministic mode). With rejection sampling (`accept.py`, `rejection.py`), which a draft model may have,
they are distributed alike.
"""
