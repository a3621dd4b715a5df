"""Workloads of long texts, grammars and conversations: JSON in three forms, chats, documents, far reuse."""

from __future__ import annotations

import json
from typing import Any

import sgl
from sgl.bench.workloads.base import Call, forced, workload
from sgl.bench.workloads.draw import WORDS, Draw

CHARACTER_PATTERN = (
    r"\{\n"
    r'    "name": "[a-z]{1,16}",\n'
    r'    "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)",\n'
    r'    "blood status": "(Pure-blood|Half-blood|Muggle-born)",\n'
    r'    "occupation": "(student|teacher|auror|ministry of magic|death eater|order of the phoenix)",\n'
    r'    "alive": "(Alive|Deceased)",\n'
    r'    "wand": \{\n'
    r'        "wood": "[a-z]{1,16}",\n'
    r'        "core": "[a-z]{1,16}",\n'
    r'        "length": [0-9]{1,2}\.[0-9]\n'
    r"    \}\n"
    r"\}"
)

_CITY = (
    r"\{\n"
    r'    "name": "[a-z ]{1,16}",\n'
    r'    "country": "[a-z ]{1,16}",\n'
    r'    "latitude": [-+]?[0-9]{1,2}\.[0-9]{0,2},\n'
    r'    "population": [1-9][0-9]{1,8},\n'
    r'    "top 3 landmarks": \["[a-z ]{1,16}", "[a-z ]{1,16}", "[a-z ]{1,16}"\]\n'
    r"\}"
)


@sgl.function
def fill_form(s: Any, text: str, pattern: str) -> None:
    """A value of a fixed form about a text."""
    s += text
    s += sgl.gen("form", max_tokens=256, temperature=0, regex=pattern)


@workload("json_jump_forward", "a regex that forces half of the output")
def json_jump_forward(draw: Draw) -> list[Call]:
    """Real regex, real question; pages are random text. 1 regex gen, half of it forced.

    Scale 1.0: 50 calls, half about a character (prompt 25), half about a city (U = page 1,000 to 3,000); out at most
    256. Source: `benchmark/json_jump_forward`.
    """
    calls = []
    for _ in range(draw.num(25)):
        question = f"{draw.exactly(12)} is a character in a book. Fill in the form.\nForm:\n"
        calls.append(Call(fill_form, {"text": question, "pattern": CHARACTER_PATTERN}))
    for _ in range(draw.num(25)):
        page = f"{draw.text(1000, 3000)}\nFill in the form about the city of this page.\nForm:\n"
        calls.append(Call(fill_form, {"text": page, "pattern": _CITY}))
    return calls


@sgl.function
def follow_schema(s: Any, text: str, schema: str) -> None:
    """A JSON value under a schema that the prompt shows."""
    s += text
    s += sgl.gen("value", max_tokens=256, temperature=0, json_schema=schema)


@workload("json_schema", "a schema of its own in each call: compile cost")
def json_schema(draw: Draw) -> list[Call]:
    """Real schemas with drawn names; the request around them is random text. 1 gen under a JSON schema.

    Scale 1.0: 100 calls, each with another schema; U 150 to 400 besides the schema's own text, out at most 256.
    Source: `benchmark/json_schema` (the data set is not used).
    """
    calls = []
    for _ in range(draw.num(100, least=3)):
        schema = json.dumps(_schema(draw))
        text = f"{draw.text(150, 400)}\nAnswer with JSON under this schema:\n{schema}\n"
        calls.append(Call(follow_schema, {"text": text, "schema": schema}))
    return calls


def _schema(draw: Draw) -> dict[str, Any]:
    """An object of 2 to 4 drawn properties."""
    names = draw.random.sample(WORDS, draw.random.randint(2, 4))
    kinds: list[dict[str, Any]] = [
        {"type": "integer", "minimum": 0, "maximum": 9999},
        {"type": "boolean"},
        {"enum": draw.random.sample(WORDS, 4)},
        {"type": "string", "maxLength": 8},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    ]
    return {
        "type": "object",
        "properties": {name: draw.random.choice(kinds) for name in names},
        "required": names,
        "additionalProperties": False,
    }


@sgl.function
def extract(s: Any, page: str) -> None:
    """Four facts from a page, between literal keys."""
    s += page + '\n{\n    "name": "'
    s += forced("name", 8) + '",\n    "country": "'
    s += forced("country", 8) + '",\n    "code": "'
    s += forced("code", 8) + '",\n    "landmarks": ["'
    s += forced("landmarks", 24) + '"]\n}\n'


@workload("long_json_decode", "a long page, short generations with literals between")
def long_json_decode(draw: Draw) -> list[Call]:
    """Random text with real keys. 4 gens in one prompt; every gap between them enters the cache again.

    Scale 1.0: 10 pages (U 5,000), out 8, 8, 8 and 24. Source: `benchmark/long_json_decode`.
    """
    return [Call(extract, {"page": draw.text(4500, 5500)}) for _ in range(draw.num(10))]


@sgl.function
def talk(s: Any, turns: list[str], output_lens: list[int]) -> None:
    """A conversation whose questions are known."""
    for turn, output_len in zip(turns, output_lens, strict=True):
        s += sgl.user(turn)
        s += sgl.assistant(forced("reply", output_len))


@workload("multi_turn_chat", "prompts that grow by what was generated")
def multi_turn_chat(draw: Draw) -> list[Call]:
    """Random text. A chain of 4 turns.

    Scale 1.0: 20 talks; a turn 256 to 512; half of the talks answer in 4 to 8 tokens, half in 256 to 512.
    Source: `benchmark/multi_turn_chat`.
    """
    num_talks = draw.num(20, least=4)
    return [
        Call(
            talk,
            {
                "turns": draw.texts(4, 256, 512),
                "output_lens": [draw.length(4, 8) if number % 2 else draw.length(256, 512) for _ in range(4)],
            },
        )
        for number in range(num_talks)
    ]


@sgl.function
def read_parts(s: Any, before: str, parts: list[str], question: str, output_len: int) -> None:
    """Each part on a fork of its own, the parts then one prompt, then a question about it."""
    s += before
    forks = s.fork(len(parts))
    for fork, part in zip(forks, parts, strict=True):
        fork += part
        fork += sgl.gen("seen", max_tokens=0)
    forks.join("concate_and_append")
    s += question
    s += forced("answer", output_len)


@workload("multi_document_qa", "contexts computed side by side, then joined into one prompt")
def multi_document_qa(draw: Draw) -> list[Call]:
    """Random text. `fork(4)` of one long list's parts (line retrieval), `fork(10)` of documents; joined as text, gen.

    The source concatenates the KV of the forks at shifted positions, which is not exact; here the joined prompt is
    prefilled, and what its beginning shares with the first fork is found. The calls of a list, or of a set of
    documents, ask different questions.
    Scale 1.0: 10 questions on one list (4 parts of 1,000) and 10 sets of 10 documents (400 each) with 10 questions
    each; out 16. Source: `benchmark/line_retrieval`, `benchmark/multi_document_qa`.
    """

    def ask(before: str, parts: list[str]) -> Call:
        question = draw.text(30)
        return Call(read_parts, {"before": before, "parts": parts, "question": question, "output_len": 16})

    before = draw.text(60)
    lines = draw.texts(4, 1000)
    calls = [ask(before, lines) for _ in range(draw.num(10))]
    for _ in range(draw.num(10)):
        documents = draw.texts(10, 400)
        calls += [ask(before, documents) for _ in range(draw.num(10))]
    return calls


@sgl.function
def turn_of_talk(s: Any, history: str, question: str, output_len: int) -> None:
    """One turn of a client that sends the whole talk each time."""
    s += history
    s += question + "\n"
    s += forced("reply", output_len)


@workload("hierarchical_cache", "talks in turn, so that reuse is as far away as it can be; then documents together")
def hierarchical_cache(draw: Draw) -> list[Call]:
    """Random text. Stateless turns in the order A1 B1 C1 A2 ..., answered as recorded; then questions on documents.

    Scale 1.0: 40 talks of 5 turns, a wave for each round: question 100 to 300, recorded answer 100, out 32 to 128;
    then 5 documents (G 2,000) with 8 questions (U 30) each, a wave for each document. Source: `benchmark/hicache`.
    """
    histories = ["" for _ in range(draw.num(40, least=3))]
    calls = []
    for wave in range(5):
        for number, history in enumerate(histories):
            question = draw.text(100, 300)
            row = {"history": history, "question": question, "output_len": draw.length(32, 128)}
            calls.append(Call(turn_of_talk, row, wave))
            histories[number] = history + question + "\n" + draw.text(100) + "\n"
    for wave in range(5, 5 + draw.num(5)):
        document = draw.text(2000)
        for _ in range(8):
            row = {"history": document, "question": draw.text(30), "output_len": draw.length(16, 64)}
            calls.append(Call(turn_of_talk, row, wave))
    return calls
