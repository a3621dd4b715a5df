"""A first tour of sgl: programs that talk to a language model in more than one call.

Run it with `sgl run tutorials/00_tour.py` (or `make demo`). Nothing else is needed: with no backend set, the
first generation starts an engine on the embedded model (SmolLM2-135M-Instruct, fetched once), and it stops at exit.
The model is tiny, so do not expect wisdom. Watch instead what a program can ask for, and what the engine shares.

Everything here is greedy (`temperature=0`), so it prints the same on every run.
"""

import json

import sgl


def title(text):
    print(f"\n== {text}")


print("The embedded model has 135 million parameters, which is tiny: look at the form of its answers; many are untrue.")


# 1. Chat turns. A program is a function whose first parameter is the prompt it writes. `+=` appends; `gen` asks the
#    model to continue, and `s["name"]` reads what came back. The model's own chat template renders the roles.


@sgl.function
def small_talk(s, city):
    s += sgl.system("You are a helpful guide. Answer in one short sentence.")
    s += sgl.user(f"What is {city} famous for?")
    s += sgl.assistant(sgl.gen("fame", max_tokens=24, stop="\n", temperature=0))
    s += sgl.user("Name one thing to eat there.")
    s += sgl.assistant(sgl.gen("food", max_tokens=24, stop="\n", temperature=0))


title("Chat: two turns")
state = small_talk.run(city="Paris")
print("famous for:", state["fame"])
print("eat:       ", state["food"])


# 2. Constraints. A regular expression or a JSON schema limits what the model may say, token by token, so the answer
#    always has the form that the next line of Python needs.

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["music", "chess", "food"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,  # else the model may add what it likes, and the end may lie beyond max_tokens
}


@sgl.function
def facts(s):
    s += sgl.user("When did the Titanic sink?")
    s += sgl.assistant("It sank in " + sgl.gen("year", regex=r"19[0-9]{2}", temperature=0) + ".")
    s += sgl.user("Invent a person who was aboard.")
    s += sgl.assistant(
        "Here is one: " + sgl.gen("person", json_schema=json.dumps(PERSON), max_tokens=100, temperature=0)
    )


title("Constraints: a regex and a JSON schema")
state = facts.run()
person = json.loads(state["person"])
print("year:  ", int(state["year"]))
print("person:", person)


# 3. Choices. `select` does not generate: it scores every option in one forward and takes the best. The probabilities
#    of all options come with it. Roles are optional; here a few examples in plain text do better.

EXAMPLES = """Review: The cake was delicious.
Label: positive
Review: The bus came too late.
Label: negative
"""


@sgl.function
def sentiment(s, review):
    s += EXAMPLES + "Review: " + review + "\nLabel: "
    s += sgl.select("label", choices=["positive", "negative"])


title("Choices: select, with probabilities")
for review in ["The soup was cold and the waiter rude.", "The best evening of our whole trip!"]:
    state = sentiment.run(review)
    likely = ", ".join(f"{choice} {share:.0%}" for choice, share in state.probabilities("label").items())
    print(f"{review:40} {state['label']}  ({likely})")


# 4. Branches. `fork(3)` makes three prompts that continue this one. What stands before the fork is computed once; the
#    branches run side by side; `join` waits for them and hands their values back as a list.


@sgl.function
def panel(s, idea):
    s += sgl.system("You give short, honest feedback.")
    s += sgl.user(f"Here is my idea: {idea}")
    branches = s.fork(3)
    for branch, aspect in zip(branches, ["cost", "fun", "risk"], strict=True):
        branch += sgl.user(f"Say one sentence about the {aspect}.")
        branch += sgl.assistant(sgl.gen("note", max_tokens=24, stop="\n", temperature=0))
    branches.join()
    s += sgl.user("Is it a good idea?")
    s += sgl.assistant(sgl.select("verdict", choices=["yes", "no"]))


title("Branches: fork(3) and join")
state = panel.run(idea="a bakery on a boat that visits a new town every week")
for aspect, note in zip(["cost", "fun", "risk"], state["note"], strict=True):
    print(f"{aspect:5}", note)
print("good idea?", state["verdict"])


# 5. Batches. `run_batch` runs one program over many rows. Rows run together in the engine, and the instructions that
#    they have in common are computed once.


@sgl.function
def classify(s, item):
    s += sgl.system("You sort things into animals, plants and machines. Answer with one word.")
    s += sgl.user(f"What is a {item}?")
    s += sgl.assistant("A " + item + " is one of the " + sgl.select("kind", choices=["animals", "plants", "machines"]))


title("Batches: run_batch over 8 rows")
items = ["tiger", "rose", "tractor", "sparrow", "oak tree", "bicycle", "salmon", "cactus"]
for item, state in zip(items, classify.run_batch([{"item": item} for item in items]), strict=True):
    print(f"{item:9} -> {state['kind']}")


# 6. What the engine counted. Prompt tokens are those that had to be in its cache before a generation could begin; most
#    of them already were.

title("The engine's counters")
stats = sgl.default_backend().stats()
for name in ("requests", "prompt_tokens", "cached_tokens", "prefill_tokens", "decode_tokens", "forwards"):
    print(f"{name:15} {stats[name]:6}")
shared = stats["cached_tokens"] / stats["prompt_tokens"]
print(f"Sharing: {shared:.0%} of the prompt tokens were found in the cache; only the rest was computed.")
