"""Agents and tools: the model calls Python functions, and goes on with what they return.

How a model writes a call differs from family to family, and small models write it badly. Here the form of a call is a
constraint, made from your function's signature: names of functions and arguments, and the arguments' types, are always
right. What the model chooses to ask for is its own business.
"""

import sgl

# ## Functions
#
# A tool is a typed function with a docstring. Both are told to the model.


def weather(city: str) -> str:
    "Today's weather in a city."
    return {"Oslo": "snow", "Rome": "sun"}.get(city, "clouds")


def add(a: int, b: int) -> int:
    "Add two whole numbers."
    return a + b


# `sgl.tool_prompt` is the text that tells the model of them, in its own format. `s.tools` is the loop: the assistant's
# turn, the calls in it (run beside each other), their results told back, and again, until there is an answer or
# `max_rounds` is reached.


@sgl.function
def ask(s, question):
    s += sgl.system("You answer with the help of functions.\n" + sgl.tool_prompt([weather, add]))
    s += sgl.user(question)
    s.tools([weather, add], tool_choice="required", max_rounds=1, max_tokens=48, temperature=0)


state = ask.run("How is the weather in Oslo?")
for result in state["answer_calls"]:
    print("called", result.call.name, dict(result.call.arguments), "->", result.content)

# The model's closing words are in `state["answer"]`; those of so small a model are not worth printing.
# `tool_choice="required"` makes the first turn a call, `auto` leaves it to the model, a function's name asks for that
# one.

assert state["answer_calls"]
assert {result.call.name for result in state["answer_calls"]} <= {"weather", "add"}

# ## One call, without the loop
#
# `gen(tools=[...])` is a single turn. `s.calls(name)` are the calls in it, with arguments as Python values.


@sgl.function
def one_call(s, question):
    s += sgl.system(sgl.tool_prompt([add])) + sgl.user(question)
    s += sgl.assistant(sgl.gen("turn", tools=[add], tool_choice="add", max_tokens=48, temperature=0))


state = one_call.run("What is 2 plus 3?")
[call, *_] = state.calls("turn")
print(call.name, dict(call.arguments), call.problem)
assert call.name == "add"
assert call.problem is not None or all(type(value) is int for value in call.arguments.values())

# ## When a function fails
#
# What a function raises is told to the model as the result, so that it can try something else. `on_error="raise"` ends
# the program with `ToolError` instead, whose cause is your exception.


def broken(city: str) -> str:
    "The population of a city."
    raise LookupError(f"no data for {city}")


@sgl.function
def count(s, on_error):
    s += sgl.system(sgl.tool_prompt([broken])) + sgl.user("How many people live in Oslo?")
    s.tools([broken], tool_choice="required", on_error=on_error, max_rounds=1, max_tokens=48, temperature=0)


state = count.run("return")
print("told to the model:", state["answer_calls"][0].content)
try:
    count.run("raise")
except sgl.errors.ToolError as error:
    print("raised:", type(error.__cause__).__name__)

# ## An agent by hand
#
# The loop is nothing special: it is Python around `select` and `gen`. Here is one in the style of ReAct. `select`
# decides what to do, a constraint bounds the argument, Python does it, and the result is appended. Nothing that was in
# the prompt is computed again between the steps.

FACTS = {"Oslo": "Oslo is the capital of Norway.", "Rome": "Rome is the capital of Italy."}


@sgl.function
def react(s, question, most=3):
    s += "Question: Where is Paris?\nAct: look up[Paris]\nSeen: Paris is the capital of France.\n"
    s += "Act: finish[France]\n\n"
    s += f"Question: {question}\n"
    for step in range(most):
        s += "Act: "
        options = ["look up[", "finish["] if step < most - 1 else ["finish["]
        s += sgl.select("act", choices=options)
        s += sgl.gen("argument", regex="[A-Z][a-z]+", stop="]", max_tokens=6, temperature=0) + "]\n"
        if s["act"] == "finish[":
            return s["argument"]
        s += "Seen: " + FACTS.get(s["argument"], "nothing") + "\n"
    return None


sgl.flush_cache()
state = react.run("Where is Oslo?")
print(state.text().split("\n\n")[1])
print("answer:", state.ret_value)
usage = state.usage
print(f"computed {usage.prefill_tokens} of {usage.prompt_tokens} prompt tokens")
assert state.ret_value is not None
assert usage.cached_tokens > 0

# Next: [streaming and async](07_streaming_and_async.py).
