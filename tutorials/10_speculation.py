"""Speculation: several tokens per step, when somebody can guess them.

A step of the engine computes one new token per row, and on most machines reading the weights is what it costs. Tokens
that can be guessed are computed in the same step and checked: right guesses are kept, wrong ones are dropped. The
answer does not depend on the guesses, only the number of steps does.
"""

import sgl

# ## Where guesses come from
#
# `speculative_algorithm="NGRAM"` guesses from text that occurred before: when the last few tokens have stood somewhere,
# what followed there is the guess; where several things followed, they are checked together, as a tree. That costs no
# second model. It pays where answers repeat what is there: editing a text, extracting from it, code, and lists. An
# engine has it or not, so here a second one is started beside the default one.

LIST = "1. apples and pears\n2. bread and butter\n3. milk and honey\n4. salt and pepper\n"


@sgl.function
def copy(s):
    s += f"A list:\n{LIST}\nThe same list again:\n{LIST}\nThe same list once more:\n"
    s += sgl.gen("list", max_tokens=28, temperature=0)


def run(engine):
    """A run of `copy` behind an empty cache, and the steps that it took."""
    engine.flush_cache()
    before = engine.stats()["forwards"]
    state = copy.run(backend=engine)
    return state, engine.stats()["forwards"] - before


plain, plain_steps = run(sgl.default_backend())

with sgl.Engine(speculative_algorithm="NGRAM", max_total_tokens=2048) as engine:
    state, steps = run(engine)
    stats = engine.stats()

print(state["list"])
print(f"{state.usage.completion_tokens} tokens in {steps} steps, without speculation in {plain_steps}")
assert steps < plain_steps

# ## What guesses were worth
#
# `usage` and `stats()` count them. `drafted_tokens` were computed as guesses, `accepted_tokens` of these were right. A
# guess that is wrong has cost a part of a step, so the engine watches both, and guesses less where it does not pay
# (`speculative_adaptive`).

print("drafted:", stats["drafted_tokens"], "accepted:", stats["accepted_tokens"])
assert 0 < stats["accepted_tokens"] <= stats["drafted_tokens"]

# ## Why the answer is the same
#
# At each place a token is drawn from the model's own logits, with the seed and position that it would have had. A guess
# is kept when it is the very token that was drawn. So greedy and seeded texts are the same text, as far as the logits
# are the same numbers: on the native kernels and in deterministic mode (`enable_deterministic_inference`) they are the
# same bits, elsewhere two nearly equal logits may change places.

print("same text:", state["list"] == plain["list"])

# With a draft model (`speculative_algorithm="STANDALONE"`) sampled texts without a seed may be had faster, and only
# distributed alike: `speculative_use_rejection_sampling`.
#
# Forced tokens of a constraint (tutorial 3) are no guesses: they are certain, and are appended without being drawn.
# Names and defaults of the options are in `sgl run --help`. Next: [explain and trace](11_explain_and_trace.py).
