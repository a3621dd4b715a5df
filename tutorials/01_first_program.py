"""First program: text, a generation, and what comes back.

Run it with `sgl run tutorials/01_first_program.py`. Nothing else is needed: with no backend set, the first generation
starts an engine on the embedded model (SmolLM2-135M-Instruct, fetched once), which stops at exit. The model is tiny. It
will say wrong things; look at what the program asks for, and at what comes back.
"""

import sgl

# ## A program is a function
#
# Its first parameter is the prompt that it writes, here `s`. `s += ...` appends to the prompt. `sgl.gen("city", ...)`
# asks the model to continue, and keeps what it wrote under the name `city`. Everything after the first parameter is the
# program's own.


@sgl.function
def capital(s, country):
    s += "The capital of France is Paris.\n"
    s += f"The capital of {country} is" + sgl.gen("city", max_tokens=8, stop=".", temperature=0)


# `stop="."` ends the generation before the first full stop, `max_tokens` after eight tokens at most, and
# `temperature=0` takes the most probable token each time, so the same program gives the same text again. Where
# nothing is said, a generation has at most 128 tokens, and they are drawn: with the temperature that the model
# recommends, else 1.0.
#
# ## Run it
#
# `run` gives back the state: the prompt with everything that was generated, and the values by name.

state = capital.run(country="Italy")
print("value:", repr(state["city"]))
print("whole text:")
print(state.text())

assert state.text().endswith("is" + state["city"])

# ## It is Python in between
#
# Reading `s["city"]` inside the program waits for the value, and gives a plain `str`. So `if`, `for` and functions of
# your own work as they always do. Nothing else waits: what is appended between two reads goes to the engine as one
# piece.


@sgl.function
def guess(s, secret):
    s += "A number game.\n"
    for attempt in range(3):
        s += f"Attempt {attempt + 1}: " + sgl.gen("number", regex="[0-9]", temperature=0) + "\n"
        if s["number"] == secret:
            s += "Right.\n"
            return attempt + 1
        s += "Wrong, another digit.\n"
    return None


state = guess.run(secret="2")
print(state.text())
print("attempts:", state.ret_value)

# `regex="[0-9]"` is a constraint: the model can write one digit and nothing else (tutorial 3). What the function
# returns is `state.ret_value`.

assert state["number"] in set("0123456789")

# ## How a value came about
#
# `get_meta_info` has the number of tokens and why the generation ended; `usage` counts the whole program.

state = capital.run(country="Japan")
meta = state.get_meta_info("city")
print("ended by:", meta["finish_reason"])
print("tokens of the prompt:", state.usage.prompt_tokens, "generated:", state.usage.completion_tokens)

# ## When something is wrong
#
# An error names what was given, what was expected, and the line of your program. Here the name is misspelt.

try:
    state["town"]
except sgl.errors.InvalidProgram as error:
    print("error:", error)

# Next: [chat and roles](02_chat.py).
