"""Structured output with types: a generation whose value is an `int`, an `Enum`, a dataclass.

A constraint is followed token by token: a token after which the text could not become a value of the type is never
drawn. So the form is certain. Whether the value is true is another question, which no constraint answers.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

import sgl

# ## A type is a constraint
#
# With `type=T` reading the value gives a `T`. Numbers, booleans and words stand bare in the text, everything else is
# JSON.

SIZES = Literal["small", "large"]


@sgl.function
def animal(s, name):
    s += f"The {name} is an animal. Number of legs: " + sgl.gen("legs", type=int, max_tokens=4, temperature=0)
    s += ". Can it fly? " + sgl.gen("flies", type=bool, temperature=0)
    s += ". Size: " + sgl.gen("size", type=SIZES, temperature=0)


state = animal.run(name="sparrow")
print(state["legs"], state["flies"], state["size"])

assert type(state["legs"]) is int
assert type(state["flies"]) is bool
assert state["size"] in ("small", "large")

# ## A class
#
# Dataclasses, `TypedDict`, `NamedTuple`, `Enum`, Pydantic models and lists of these. The fields come in their order, so
# a field that explains another should stand before it.


class Mood(Enum):
    GOOD = "good"
    BAD = "bad"


@dataclass
class Review:
    dish: Literal["soup", "cake", "pasta"]
    stars: Literal[1, 2, 3, 4, 5]
    mood: Mood


@sgl.function
def extract(s, text):
    s += sgl.user(f"Read the review and write it down as JSON: {text}")
    s += sgl.assistant(sgl.gen("review", type=Review, max_tokens=60, temperature=0))


state = extract.run("The soup was cold and the waiter rude.")
review = state["review"]
print(review)

assert isinstance(review, Review)
assert isinstance(review.mood, Mood)

# Some of such an answer is certain before the model says anything, as the rest of a field's name once it has begun. The
# engine appends these tokens without asking the model. Braces and quotes are not among them where JSON allows a blank
# in their place, which the model may prefer.

print("tokens that were forced:", state.usage.forced_tokens, "of", state.usage.completion_tokens)
assert state.usage.forced_tokens > 0

# ## Schemas, patterns, grammars
#
# `json_schema=` takes a schema as text or dict, `regex=` a Python pattern, `ebnf=` a grammar as GBNF writes it. The
# value is then text; `s.value(name)` parses JSON.

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@sgl.function
def forms(s):
    s += "A trip as JSON: " + sgl.gen("trip", json_schema=SCHEMA, max_tokens=40, temperature=0)
    s += "\nA date: " + sgl.gen("date", regex=r"20[0-9]{2}-(0[1-9]|1[0-2])", temperature=0)
    s += "\nA sum: " + sgl.gen("sum", ebnf='root ::= digit "+" digit\ndigit ::= [0-9]', temperature=0)


state = forms.run()
print(state.value("trip"), state["date"], state["sum"])

assert set(state.value("trip")) == {"city", "days"}
assert state["sum"][1] == "+"

# ## What has no end
#
# `max_tokens` still holds. A value ends complete within it where that is possible; where it is not, reading raises
# `Truncated`, which has what there was. Three tokens are not enough for an object with a long name.


@sgl.function
def too_short(s):
    s += "As JSON: " + sgl.gen("review", type=Review, max_tokens=3, temperature=0)


state = too_short.run()
try:
    state["review"]
except sgl.errors.Truncated as error:
    print("truncated after", repr(error.partial))

# ## What a type cannot say
#
# `require` draws a value until a check of yours passes, and takes back what failed. The prompt then goes on as if the
# good value had been the first.


@sgl.function
def even(s):
    s += "An even number between 10 and 99: "
    return s.require(sgl.gen("n", regex="[1-9][0-9]", temperature=1.0), lambda n: int(n) % 2 == 0, attempts=20)


state = even.run(seed=1)
print("even:", state.ret_value)
assert int(state.ret_value) % 2 == 0

# Next: [choices and scoring](04_choices.py).
