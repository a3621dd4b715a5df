"""Moving from SGLang, guidance and outlines: the same program, here.

Each section has a program of another library (as text, since those are not installed here) and the one that does the
same. The right half of every table is what the code below it runs.
"""

from typing import Literal

from pydantic import BaseModel

import sgl

# ## From SGLang's frontend
#
# Change the import line; names, arguments and defaults are the same. [from_sglang.md](from_sglang.md) lists what is
# different on purpose, with the reason.
#
# | SGLang | here |
# |---|---|
# | `import sglang as sgl` | `import sgl` |
# | `sgl.set_default_backend(sgl.RuntimeEndpoint(url))` | the same, or nothing: an engine starts by itself |
# | `sgl.Runtime(model_path=...)` | `sgl.Engine(model_path=...)` |
# | `state["x"]`, `state.text()`, `run_batch`, `fork`, `join` | the same |


@sgl.function
def multi_turn(s, first, second):
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user(first)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=12, temperature=0))
    s += sgl.user(second)
    s += sgl.assistant(sgl.gen("answer_2", max_tokens=12, temperature=0))


state = multi_turn.run(first="Name a city.", second="And a river.")
print([message["role"] for message in state.messages()])
assert state["answer_2"] == state.messages()[-1]["content"]

# ## From guidance
#
# ```
# @guidance
# def character(lm, name):
#     lm += f"{name} is " + select(["kind", "brave"], name="trait")
#     lm += " and " + gen("age", regex="[1-9][0-9]") + " years old."
#     return lm
#
# lm = models.Transformers("HuggingFaceTB/SmolLM2-135M-Instruct") + character("Ann")
# print(lm["trait"], lm["age"])
# ```
#
# | guidance | here |
# |---|---|
# | `lm += ...` makes a new object; the function returns it | `s += ...` appends; the function returns what it likes |
# | `with user(): lm += ...` | `with s.user(): s += ...`, or `s += sgl.user(...)` |
# | `select(options, name=...)` writes an option token by token | `gen(name, regex="kind\|brave")` |
# | | `sgl.select(name, choices=...)` scores all options in one step |
# | `gen(name, regex=..., stop=..., max_tokens=...)` | the same names |
# | `json(name, schema=...)` | `gen(name, json_schema=...)`, or `type=` a class |
# | keeping `lm` to go on twice from it | `s.fork(2)`, whose branches run together |


@sgl.function
def character(s, name):
    s += f"{name} is " + sgl.select("trait", choices=["kind", "brave"])
    s += " and " + sgl.gen("age", regex="[1-9][0-9]", temperature=0) + " years old."


state = character.run("Ann")
print(state["trait"], state["age"])
assert state.text() == f"Ann is {state['trait']} and {state['age']} years old."

# ## From outlines
#
# ```
# model = outlines.from_transformers(AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name))
# print(model("Is this review positive? ...", Literal["yes", "no"]))
# print(Person.model_validate_json(model("Describe a person.", Person, max_new_tokens=80)))
# ```
#
# | outlines | here |
# |---|---|
# | `model(prompt, output_type)` | `gen(type=output_type)` in a program; several in one prompt if you like |
# | an output is text, which you parse | reading the value gives the `int`, the class |
# | `Generator(model, output_type)`, to compile once | compiled constraints are kept by the engine |
# | `Regex(...)`, `CFG(...)`, `JsonSchema(...)` | `regex=`, `lark=` or `ebnf=`, `json_schema=` |
# | `Template.from_string(...)` | `sgl.template(...)` |
# | `generator.batch(prompts)` | `program.run_batch(rows)` |


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: int


@sgl.function
def two_types(s, review):
    s += sgl.user(f"Is this review positive? {review}")
    s += sgl.assistant(sgl.gen("positive", type=Literal["yes", "no"], temperature=0))
    s += sgl.user("Describe the person who wrote it, as JSON.")
    s += sgl.assistant(sgl.gen("person", type=Person, max_tokens=40, temperature=0))


state = two_types.run("The best evening of our trip!")
print(state["positive"], state["person"])
assert isinstance(state["person"], Person)

prompt = sgl.template("Translate to French: {{ word }} =")


@sgl.function
def translate(s, word):
    s += prompt(word=word) + sgl.gen("french", max_tokens=4, stop="\n", temperature=0)


print([state["french"] for state in translate.run_batch([{"word": "cat"}, {"word": "house"}])])

# Next: [adding a model](adding_a_model.md), [a kernel](14_adding_a_kernel.py), [a grammar
# backend](15_adding_a_grammar_backend.py).
