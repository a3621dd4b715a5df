"""The original `sglang` package's `RuntimeEndpoint` on this server: what it sends is answered with what it reads.

`sglang_requests.json` has the requests of its versions 0.4.6 and 0.5.23, as they sent them for a generation, one with
log-probabilities, a pattern, a stream, a fork, the three methods of choice, an image and the routes around them. With
each stands what the client takes from the answer: paths of fields, and their types.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.serving import serving

import sgl
from sgl.runtime.engine import Engine

REQUESTS = json.loads((Path(__file__).parent / "sglang_requests.json").read_text())
KINDS = {
    "text": str,
    "count": int,
    "number": float,
    "yes or no": bool,
    "list": list,
    "object": dict,
    "nothing": type(None),
}


@pytest.fixture(scope="module")
def url(dummy_engine: Engine) -> Iterator[str]:
    with serving(dummy_engine) as served:
        yield served.url


def field(value: Any, path: str) -> Any:
    """What is at `meta_info.input_token_logprobs.0.2`."""
    for step in path.split("."):
        value = value[int(step)] if isinstance(value, list) else value[step]
    return value


@pytest.mark.parametrize("asked", REQUESTS, ids=lambda asked: asked["what"])
def test_what_the_original_client_sends_is_answered_as_it_reads(url: str, asked: dict[str, Any]) -> None:
    body = asked.get("body")
    headers = {"Content-Type": "application/json; charset=utf-8"}
    answer = httpx2.request(
        asked["method"], url + asked["path"], content=None if body is None else json.dumps(body), headers=headers
    )
    assert answer.status_code == asked["status"], answer.text
    found = streamed(answer.text) if body is not None and body.get("stream") else answer.json()
    for path, kind in asked["reads"].items():
        assert type(field(found, path)) is KINDS[kind], path


def streamed(text: str) -> list[Any]:
    """The events of a stream as the client takes them: lines that begin with `data:`, until `[DONE]`."""
    lines = [line for line in text.splitlines() if line.startswith("data:")]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line[5:]) for line in lines[:-1]]
    texts = [event["text"] for event in events]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts)), "all so far"
    return events


def test_a_choice_is_what_our_own_select_takes(url: str, dummy_engine: Engine) -> None:
    """Its methods can be computed from what it reads: means of the options' tokens, with the prompt and without."""
    prompt, choices = "Q: hi\nA:", ["yes", "no", "maybe so"]

    def ask(**body: Any) -> Any:
        return httpx2.post(
            f"{url}/generate", json={"sampling_params": {"max_new_tokens": 0, "temperature": 0}, **body}
        ).json()

    prompt_len = ask(text=prompt)["meta_info"]["prompt_tokens"]
    scored = ask(text=[prompt + each for each in choices], return_logprob=True, return_text_in_logprobs=True,
                 logprob_start_len=prompt_len - 2)  # fmt: skip
    entries = [each["meta_info"]["input_token_logprobs"] for each in scored]
    assert ["".join(entry[2] for entry in each) for each in entries] == ["A:" + choice for choice in choices]
    paths = [each[2:] for each in entries]
    means = [sum(entry[0] for entry in path) / len(path) for path in paths]

    @sgl.function
    def program(s: sgl.ProgramState) -> None:
        s += prompt + sgl.select("choice", choices)

    state = program.run(backend=dummy_engine)
    assert state.get_meta_info("choice")["normalized_prompt_logprobs"] == pytest.approx(means, abs=1e-3)
    assert state["choice"] == choices[means.index(max(means))]
    alone = ask(input_ids=[[entry[1] for entry in path] for path in paths], return_logprob=True)
    without = [each["meta_info"]["input_token_logprobs"] for each in alone]
    assert [[entry[1] for entry in path] for path in without] == [[entry[1] for entry in path] for path in paths]
    assert all(path[0][0] is None for path in without), "which the client takes for 0"
