"""Fork, join, and how sharing works: branches of one prompt, and what they cost.

Most prompts of a program begin alike. The engine keeps what it computed for a prompt (keys and values, in pages) in a
tree by tokens, so that a beginning is computed once, whoever asks for it again. A fork makes use of it on purpose.
"""

from pathlib import Path

import sgl

# ## Branches
#
# `s.fork(3)` gives three prompts that go on from this one. They run side by side. `join` ends them and gives their
# values to the parent: each name becomes a list, in the order of the fork.

ASPECTS = ["price", "noise", "safety"]


@sgl.function
def panel(s, idea):
    s += sgl.system("You give short, honest feedback on ideas for a town. " * 4)
    s += sgl.user(f"The idea: {idea}")
    branches = s.fork(3)
    for branch, aspect in zip(branches, ASPECTS, strict=True):
        branch += sgl.user(f"One sentence about its {aspect}.")
        branch += sgl.assistant(sgl.gen("note", max_tokens=16, stop="\n", temperature=0))
    branches.join()
    s += sgl.user("Should we do it?")
    s += sgl.assistant(sgl.select("verdict", choices=["yes", "no"]))


sgl.flush_cache()  # so that the counters below do not depend on what ran before
state = panel.run(idea="a night market by the river")
for aspect, note in zip(ASPECTS, state["note"], strict=True):
    print(f"{aspect:7} {note}")
print("verdict:", state["verdict"])

assert len(state["note"]) == 3

# What the branches wrote is in their values, not in the parent's text. `join("concate_and_append")` would append it.

assert "about its price" not in state.text()

# ## Counters
#
# `prompt_tokens` are all tokens that had to be there before something could be generated, counted for each generation.
# They were either found (`cached_tokens`) or computed (`prefill_tokens`). The beginning is needed four times, by three
# branches and the verdict, and computed once.

first = state.usage
print(f"prompt {first.prompt_tokens} = cached {first.cached_tokens} + computed {first.prefill_tokens}")
assert first.prompt_tokens == first.cached_tokens + first.prefill_tokens
assert first.cached_tokens > first.prefill_tokens

# The same program again finds even its own beginning. Another idea finds everything up to the idea.

second = panel.run(idea="a night market by the river").usage
third = panel.run(idea="a library without walls").usage
for name, usage in (("first", first), ("same again", second), ("other idea", third)):
    print(f"{name:11} computed {usage.prefill_tokens:4} of {usage.prompt_tokens}")
assert second.prefill_tokens < third.prefill_tokens < first.prefill_tokens

# So the rule for a fast program: what is common stands first, what differs stands last. Nothing has to be declared;
# equal tokens from the beginning on are what counts.
#
# ## What it will cost, before it runs
#
# `explain` counts without computing anything. `prefilled as plain requests` is what four requests, each with its whole
# prompt and without a cache, would compute.

plan = panel.explain(rows=[{"idea": "a night market by the river"}])
print(plan)
assert plan.plan.plain_tokens > plan.predicted.prefill_tokens

# ## The tree, to look at
#
# `to_html()` is the run as one page that needs nothing else: the tree of forks with each branch's text, coloured as
# prompt, cached, generated or forced, and times. In a notebook the state shows itself like this.

Path("tree.html").write_text(state.to_html(), encoding="utf-8")
print("wrote tree.html")

# ## Trees of forks
#
# Branches fork again. Pages are shared by reference at every level, so a branch that is given up costs what it wrote
# and nothing else.


@sgl.function
def story(s):
    s += "Once upon a time there was a"
    heroes = s.fork(2)
    heroes += [" brave", " lazy"]
    for hero in heroes:
        ends = hero.fork(2)
        ends += sgl.gen("end", max_tokens=6, stop="\n", temperature=0.8)
        ends.join()
    heroes.join()


state = story.run(seed=3)
print(state["end"])
assert [len(ends) for ends in state["end"]] == [2, 2]

# Next: [agents and tools](06_agents_and_tools.py).
