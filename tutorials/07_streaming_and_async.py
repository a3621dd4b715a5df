"""Streaming and async: text as it appears, and many programs on one thread.

`run` waits for the end. `stream` returns at once, and the state gives text while it is made. `async def` programs are
the same programs for asyncio.
"""

import asyncio

import sgl

# ## Text as it appears
#
# `text_iter()` gives the whole text in pieces, prompt included; `text_iter(name)` the pieces of one value.


@sgl.function
def story(s, hero):
    s += f"A story about a {hero}. Once upon a time"
    s += sgl.gen("begin", max_tokens=12, temperature=0)
    s += "\nThe end:" + sgl.gen("end", max_tokens=6, temperature=0)


state = story.stream(hero="fox")
pieces = []
for piece in state.text_iter("begin"):
    pieces.append(piece)
    print(piece, end="|", flush=True)
print()

assert "".join(pieces) == state["begin"]
assert len(pieces) > 1

# ## Everything that happens
#
# `events()` is the one stream below all others. Each event says what it is (text, a piece of a generation, a value, the
# end), which branch and variable it belongs to, which line of the program made it, and when it came.

state = story.stream(hero="bear")
kinds = []
for event in state.events():
    kinds.append(event.kind)
    if event.kind == "value":
        print(f"{event.name}: line {event.location.line}, {event.usage.completion_tokens} tokens, then {event.finish}")

assert kinds.count("value") == 2
assert kinds[-1] == "done"

# ## Branches at once
#
# Children of a fork generate side by side. A group streams them together: the index says whose piece it is.


@sgl.function
def two_ends(s):
    s += "The door opened and"
    branches = s.fork(2)
    branches += [" the cat", " the ghost"]
    branches += sgl.gen("end", max_tokens=8, temperature=0)
    return [index for index, _ in branches.text_iter("end")]


order = two_ends.run(stream=True).ret_value
print("pieces came from branches", order)
assert set(order) == {0, 1}

# ## async
#
# In an `async def` program reads are awaited, and nothing else changes. Forty of them need one thread. `run_async` is
# the call; a `def` program has it, too.


@sgl.function
async def label(s, word):
    s += f"An apple is a fruit. A carrot is a vegetable. A {word} is a"
    s += sgl.select("kind", choices=[" fruit", " vegetable"])
    return (await s["kind"]).strip()


async def many():
    words = ["pear", "leek", "plum", "bean"] * 10
    states = await asyncio.gather(*(label.run_async(word) for word in words))
    return [state.ret_value for state in states]


kinds = asyncio.run(many())
print(len(kinds), "labels:", kinds[:4])
assert set(kinds) <= {"fruit", "vegetable"}

# `start_async` streams on an event loop, with `async for`.


async def streamed():
    state = story.start_async(hero="owl")
    return [piece async for piece in state.text_iter("begin")]


print(len(asyncio.run(streamed())), "pieces")

# ## Stopping
#
# Who lets a stream go, cancels it: the engine stops computing and frees what the program held. `state.cancel()` says so
# by hand, and `deadline_s` bounds a run in time.

state = story.stream(hero="crab")
for _ in state.text_iter("begin"):
    break
state.cancel()
try:
    state.text()
except sgl.errors.Cancelled as error:
    print("cancelled:", error)

# Next: [batches](08_batches.py).
