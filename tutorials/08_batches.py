"""Batches: one program over many rows.

Rows run together: each step of the engine computes the next tokens of all of them, which costs little more than one
row. What rows have in common at their beginning is found as equal tokens and computed once.
"""

import sgl

# ## Rows in, states out
#
# A row is a dict of arguments (or a list of them, by position). The states come back in the order of the rows.

EXAMPLES = """rose: plant
tiger: animal
hammer: tool
"""


@sgl.function
def sort(s, item):
    s += EXAMPLES + f"{item}:" + sgl.select("kind", choices=[" plant", " animal", " tool"])


items = ["oak", "saw", "cow", "fern", "goat", "pliers", "tulip", "horse"]
rows = [{"item": item} for item in items]

engine = sgl.default_backend()
sgl.flush_cache()
before = engine.stats()
states = sort.run_batch(rows)
after = engine.stats()
print({item: state["kind"].strip() for item, state in zip(items, states, strict=True)})

assert [state["kind"] in (" plant", " animal", " tool") for state in states] == [True] * len(items)

# ## What it cost
#
# Eight prompts, one beginning. The counters are those of the engine, before and after.

spent = {name: after[name] - before[name] for name in ("prompt_tokens", "cached_tokens", "prefill_tokens", "forwards")}
print(spent)
assert spent["cached_tokens"] > 0
assert spent["forwards"] < len(rows) * 2

# ## As they are ready
#
# `batch` gives results as rows end, with their index: nothing waits for the slowest. Iterating is what runs it, and
# leaving the loop cancels what is left. At most a window of rows is in memory, so rows may be many.

for result in sort.batch(rows[:4]):
    print(result.index, result.state["kind"].strip())

# ## When a row fails
#
# By default the first error ends the batch and is raised, with the row's number. `on_error="return"` puts it in the
# place of its row, and all others end well.


@sgl.function
def careful(s, item):
    if not item:
        raise ValueError("there is no item")
    s += EXAMPLES + f"{item}:" + sgl.select("kind", choices=[" plant", " animal", " tool"])


found = careful.run_batch([{"item": "ivy"}, {"item": ""}, {"item": "ox"}], on_error="return")
print([outcome["kind"] if isinstance(outcome, sgl.ProgramState) else repr(outcome) for outcome in found])
assert [isinstance(outcome, ValueError) for outcome in found] == [False, True, False]

# A row that does not fit the program's parameters is told before anything runs.

try:
    sort.run_batch([{"item": "ivy"}, {"itm": "ox"}])
except sgl.errors.InvalidParameter as error:
    print("refused:", error)

# ## Samples
#
# Several answers to one prompt are no batch: `gen(n=3)` draws three behind a prompt that is computed once. A seed makes
# the draws repeatable; each row of a batch and each sample has its own.


@sgl.function
def names(s):
    s += "Names for a cat: Tom, Felix," + sgl.gen("name", n=3, max_tokens=4, stop=",", temperature=1.0)


first, again = names.run(seed=7)["name"], names.run(seed=7)["name"]
print(first)
assert first == again
assert len(first) == 3

# Next: [serving and clients](09_serving.py).
