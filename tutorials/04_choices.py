"""Choices and scoring: `select` compares options by their probability.

`select` does not generate. It computes how probable each option is after the prompt, takes the best, and tells you the
scores of all. That is the tool for classification, routing, multiple choice and yes or no.
"""

import sgl

# ## One of two
#
# A few examples in plain text do more for a small model than instructions.

EXAMPLES = """Review: The cake was delicious.
Label: positive
Review: The bus came too late.
Label: negative
"""


@sgl.function
def sentiment(s, review):
    s += EXAMPLES + f"Review: {review}\nLabel:"
    s += sgl.select("label", choices=[" positive", " negative"])


state = sentiment.run("The best evening of our whole trip!")
print(repr(state["label"]), state.probabilities("label"))

probabilities = state.probabilities("label")
assert state["label"] == max(probabilities, key=probabilities.get)
assert abs(sum(probabilities.values()) - 1) < 1e-6

# An option is the text that follows, so here it begins with a blank, as the word does in the examples. (`Label: ` with
# the blank in the prompt works too: the end of the prompt is then encoded anew with each option, and counted as
# `healed_tokens`.)
#
# ## How options are scored
#
# The log-probability of an option is the sum over its tokens, and long options have more of them. The default divides
# by the number of tokens. `unconditional_likelihood_normalized` also takes off how probable an option is without the
# prompt: good when one option is simply a more common word.

METHODS = [
    sgl.token_length_normalized,
    sgl.greedy_token_selection,
    sgl.unconditional_likelihood_normalized,
]


@sgl.function
def capital(s, method):
    s += "The capital of Norway is"
    s += sgl.select("city", choices=[" Oslo", " Stockholm", " New York"], choices_method=method)


for method in METHODS:
    state = capital.run(method)
    print(f"{method.name:36} {state['city']}")

# The scores behind a decision are in the meta information: here of the last run, one number per option as its method
# compares them, and the log-probability of each of an option's tokens. Taking off how probable an option is by itself
# does not help every prompt: a name that is rare without the prompt gains the most, be it right or wrong.

meta = state.get_meta_info("city")
print("scores:", {option: round(score, 2) for option, score in meta["scores"].items()})
assert max(meta["scores"], key=meta["scores"].get) == state["city"]
for option in meta["input_token_logprobs"]:
    print("tokens:", [round(logprob, 2) for logprob, *_ in option])

# ## One forward for all
#
# The prompt is computed once, and the options behind it together, in one step of the engine. Twenty-six options are as
# many steps as two.

engine = sgl.default_backend()


@sgl.function
def letter(s, choices):
    s += "A letter of the alphabet:" + sgl.select("letter", choices=choices)


def steps(choices):
    """Forwards of the model that a run of `letter` takes, behind an empty cache."""
    sgl.flush_cache()
    before = engine.stats()["forwards"]
    letter.run(choices)
    return engine.stats()["forwards"] - before


alphabet = [f" {character}" for character in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
few, many = steps(alphabet[:2]), steps(alphabet)
print("steps for 2 options:", few, " for 26:", many)
assert few == many

# ## A decision in the middle
#
# A value of `select` is a string like any other, so a program can branch on it.


@sgl.function
def route(s, question):
    s += "Question: How many legs has a spider?\nAnswer: a number, 8\n"
    s += "Question: Who wrote Hamlet?\nAnswer: a name, Shakespeare\n"
    s += f"Question: {question}\nAnswer:" + sgl.select("kind", choices=[" a number", " a name"])
    if s["kind"] == " a number":
        s += ", " + sgl.gen("answer", regex="[0-9]{1,3}", temperature=0)
    else:
        s += "," + sgl.gen("answer", max_tokens=8, stop="\n", temperature=0)


for question in ["How many days has a week?", "Who wrote Faust?"]:
    state = route.run(question)
    print(question, state["kind"], state["answer"])
    assert state["kind"] == " a name" or state["answer"].isdigit()

# ## Drawing instead of taking
#
# With a temperature above 0 an option is drawn by its probability; a seed makes that repeatable.


@sgl.function
def coin(s):
    s += "A coin shows" + sgl.select("side", choices=[" heads", " tails"], temperature=1.0)


sides = [coin.run(seed=seed)["side"] for seed in range(8)]
print(sides)
assert sides == [coin.run(seed=seed)["side"] for seed in range(8)]

# Next: [fork, join, and how sharing works](05_fork_and_join.py).
