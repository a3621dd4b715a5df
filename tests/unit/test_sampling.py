"""What a generation can be asked, through the engine core: stop patterns, log-probabilities of prompts, samples, logit
bias, processors, special tokens, and where defaults come from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.scripted import Rig, expected_greedy, scripted_logits

import sgl
from sgl.errors import (
    ConfigError,
    ConstraintTooComplex,
    GenerationError,
    InvalidLogits,
    InvalidParameter,
    InvalidProgram,
    SglError,
)
from sgl.lang.graph import (
    DoneEvent,
    FailedEvent,
    Fork,
    Gen,
    Graph,
    Join,
    LiteralText,
    ProgramOptions,
    Release,
    Sampling,
    Text,
    TextEvent,
    TokenLogprob,
    ValueEvent,
    lower_samples,
    sampling_from_mapping,
    validate,
)
from sgl.limits import Limits
from sgl.runtime.processors import BUILT_IN, load_processors
from sgl.runtime.sampling_defaults import model_defaults

PROMPT = "hello world"
IDS = list(PROMPT.encode())
EOS = sorted(Rig.tokenizer.eos_ids)[0]


def text(id: int, value: str = PROMPT, branch: int = 0) -> Text:
    return Text(id=id, branch=branch, segments=(LiteralText(value),))


def gen(id: int, name: str = "x", branch: int = 0, **sampling: Any) -> Gen:
    fields = {"max_new_tokens": 8, "temperature": 0.0, **sampling}
    return Gen(id=id, branch=branch, name=name, sampling=sampling_from_mapping(fields))


def start(rig: Rig, program: int, *nodes: object, **options: object) -> None:
    rig.core.open(program, ProgramOptions(**options))
    rig.core.submit(program, Graph(nodes=nodes), finish=True)


def run(*nodes: object, rig: Rig | None = None, **options: object) -> tuple[Rig, list[ValueEvent]]:
    rig = rig or Rig()
    start(rig, 1, *nodes, **options)
    rig.run()
    if rig.of(1, FailedEvent):
        raise SglError.from_info(rig.of(1, FailedEvent)[0].error)
    return rig, rig.of(1, ValueEvent)


def greedy(prompt: str, num: int) -> str:
    return bytes(expected_greedy(list(prompt.encode()), num)).decode()


def logprobs(context: list[int]) -> np.ndarray:
    logits = scripted_logits(context).astype(np.float64)
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


# --- stop patterns ---


def test_a_stop_pattern_ends_the_text_and_the_state_goes_on_from_there() -> None:
    whole = greedy(PROMPT, 8)
    first = next(i for i, char in enumerate(whole) if char.isalnum())
    rig, (x, y) = run(text(0), gen(1, stop_regex=r"\w"), text(2, "!"), gen(3, "y", max_new_tokens=4))
    assert (x.value, x.finish, x.matched) == (whole[:first], "stop", whole[first])
    kept = PROMPT + whole[:first] + "!"
    assert y.value == greedy(kept, 4), "the model goes on from the text that is left"
    assert rig.of(1, DoneEvent)[0].text == kept + y.value


def test_a_stop_pattern_is_kept_when_asked_and_waits_for_min_new_tokens() -> None:
    whole = greedy(PROMPT, 8)
    _, (x,) = run(text(0), gen(1, stop_regex=".", no_stop_trim=True))
    assert x.value == whole[0]
    _, (x,) = run(text(0), gen(1, stop_regex=".", min_new_tokens=4))
    assert x.value == whole[:3], "the fourth token's text is the first that can stop it"


def test_a_stop_pattern_never_leaks_into_a_stream() -> None:
    rig, (x,) = run(text(0), gen(1, stop_regex="(?s).{3}", max_new_tokens=6), stream=True)
    assert (x.value, x.matched) == ("", greedy(PROMPT, 3))
    assert "".join(event.text for event in rig.events[1] if hasattr(event, "text")) == PROMPT + PROMPT, (
        "deltas are empty"
    )


def test_a_pattern_that_takes_too_long_fails_alone() -> None:
    rig = Rig(limits=Limits(max_stop_regex_s=0.05))
    always_a = {"logit_bias": {97: 100}, "max_new_tokens": 80}
    start(rig, 1, text(0), gen(1, stop_regex="(a|aa)+c", **always_a))
    start(rig, 2, text(0), gen(1, max_new_tokens=80))
    rig.run()
    assert SglError.from_info(rig.of(1, FailedEvent)[0].error).code == ConstraintTooComplex.code
    assert rig.of(2, ValueEvent)[0].value == greedy(PROMPT, 80)


# --- log-probabilities ---


def check_prompt(
    entries: tuple[TokenLogprob, ...], ids: list[int], start: int, top: int, given: tuple[int, ...]
) -> None:
    assert [entry.token_id for entry in entries] == ids[start:]
    for position, entry in enumerate(entries, start):
        if position == 0:
            assert entry == TokenLogprob(ids[0], None)
            continue
        want = logprobs(ids[:position])
        assert entry.logprob == pytest.approx(want[ids[position]], abs=1e-4)
        assert [token for token, _ in entry.top] == np.argsort(-want, kind="stable")[:top].tolist()
        assert dict(entry.given) == pytest.approx({token: want[token] for token in given}, abs=1e-4)


@pytest.mark.parametrize("start_len", [0, 1, 4, len(IDS) - 1, len(IDS)])
@pytest.mark.parametrize("cached", [False, True])
def test_prompt_logprobs_whatever_is_cached(start_len: int, cached: bool) -> None:
    rig = Rig()
    if cached:
        start(rig, 9, text(0), gen(1, max_new_tokens=1))
        rig.run()
    asked = {
        "return_logprob": True,
        "logprob_start_len": start_len,
        "top_logprobs_num": 2,
        "token_ids_logprob": [5, 70],
    }
    _, (x,) = run(text(0), gen(1, max_new_tokens=2, **asked), rig=rig)
    check_prompt(x.prompt_logprobs, IDS, start_len, 2, (5, 70))
    assert x.value == greedy(PROMPT, 2)
    assert [token for token, _ in x.logprobs[0].given] == [5, 70]
    reused = max(0, min(start_len - 1, len(IDS) - 1)) if cached else 0
    assert (x.usage.cached_tokens, x.usage.prefill_tokens) == (reused, len(IDS) - reused)
    assert rig.core.snapshot().pages_held == 0


def test_prompt_logprobs_are_computed_a_bounded_number_of_rows_at_a_time() -> None:
    rows: list[int] = []

    def hook(plan: Any) -> None:
        rows.append(sum(len(chunk.scores) for chunk in plan.chunks))

    rig = Rig(hook, limits=Limits(max_logit_rows=5))
    prompts = {program: f"{program} is a prompt of some length" for program in range(4)}
    for program, prompt in prompts.items():
        start(rig, program, text(0, prompt), gen(1, max_new_tokens=2, logprob_start_len=0, top_logprobs_num=1))
    rig.run()
    assert max(rows) == 5
    assert sum(rows) == sum(len(prompt) - 1 for prompt in prompts.values()), "no position is scored twice"
    for program, prompt in prompts.items():
        (x,) = rig.of(program, ValueEvent)
        check_prompt(x.prompt_logprobs, list(prompt.encode()), 0, 1, ())


def test_prompt_logprobs_survive_retraction() -> None:
    rig = Rig(num_pages=96, limits=Limits(max_logit_rows=16))
    prompts = {program: chr(65 + program) * 24 for program in range(4)}
    for program, prompt in prompts.items():
        start(rig, program, text(0, prompt), gen(1, max_new_tokens=40, logprob_start_len=0))
    rig.run()
    assert rig.core.snapshot().retractions > 0
    for program, prompt in prompts.items():
        (x,) = rig.of(program, ValueEvent)
        check_prompt(x.prompt_logprobs, list(prompt.encode()), 0, 0, ())
        assert x.value == greedy(prompt, 40)


def test_a_prompt_is_scored_without_generating() -> None:
    _, (x, y) = run(text(0), gen(1, max_new_tokens=0, logprob_start_len=2), text(2, "!"), gen(3, "y", max_new_tokens=2))
    check_prompt(x.prompt_logprobs, IDS, 2, 0, ())
    assert y.value == greedy(PROMPT + "!", 2)


def test_a_position_behind_the_prompt_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="the prompt has 11 tokens") as caught:
        run(text(0), gen(1, logprob_start_len=12))
    assert caught.value.param == "logprob_start_len"


def test_asking_for_some_logprobs_asks_for_logprobs() -> None:
    assert sampling_from_mapping({"top_logprobs_num": 1}).return_logprob
    assert not sampling_from_mapping({"top_logprobs_num": 1, "return_logprob": False}).return_logprob


# --- several samples ---


def test_lowering_of_samples() -> None:
    node = Gen(id=4, branch=2, name="x", sampling=Sampling(n=3, seed=7))
    nodes = lower_samples(node, [5, 6, 8])
    assert [each.id for each in nodes] == list(range(4, 12))
    assert [type(each) for each in nodes] == [Fork, Gen, Gen, Gen, Join, Release, Release, Release]
    assert nodes[0].children == nodes[4].children == (5, 6, 8)
    gens = nodes[1:4]
    assert [each.branch for each in gens] == [5, 6, 8]
    assert all(each.sampling.n == 1 and each.name == "x" for each in gens)
    assert gens[0].sampling.seed == 7
    assert len({each.sampling.seed for each in gens}) == 3
    assert validate(Graph(nodes=(text(0, "a", branch=2), *nodes)), live=[2]) == {2}
    unseeded = lower_samples(Gen(id=0, name="x", sampling=Sampling(n=2)), [1, 2])
    assert [each.sampling.seed for each in unseeded[1:3]] == [None, None]


def test_a_node_of_many_samples_is_refused_by_every_backend() -> None:
    with pytest.raises(InvalidProgram, match="lower_samples"):
        validate(Graph(nodes=(text(0), gen(1, n=2))))


def test_samples_leave_the_state_as_it_was() -> None:
    many = lower_samples(gen(1, n=4, temperature=1.0, seed=3), [1, 2, 3, 4])
    rig, values = run(text(0), *many, text(20, "!"), gen(21, "y", max_new_tokens=3))
    xs = [event for event in values if event.name == "x"]
    assert len({x.value for x in xs}) > 1
    assert values[-1].value == greedy(PROMPT + "!", 3)
    assert sum(x.usage.prefill_tokens for x in xs) == len(IDS) - 1 + 4, "the prompt is computed once"
    _, (alone,) = run(text(0), gen(1, temperature=1.0, seed=3))
    assert alone.value == xs[0].value, "the first sample is what n=1 gives"
    assert rig.core.snapshot().pages_held == 0


def test_samples_in_a_program() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Ideas: " + sgl.gen("idea", n=3, max_tokens=2, stop_regex="!")
        s += "Best: " + sgl.gen("best", dtype=int, n=2) + sgl.gen("end")

    mock = sgl.MockBackend({"idea": ["a b c", "d!", "e"], "best": ["1", "2"], "end": "."})
    state = program.run(backend=mock)
    assert state["idea"] == ["a b", "d", "e"]
    assert state.value("best") == [1, 2]
    assert [meta["finish_reason"]["type"] for meta in state.get_meta_info("idea")] == ["length", "stop", "stop"]
    assert state.text() == "Ideas: a bBest: 1.", "the first sample goes on"
    assert len(mock.graphs) == 1, "samples need no round trip"
    streamed = program.run(backend=sgl.MockBackend({"idea": ["a", "b", "c"], "best": ["1", "2"]}), stream=True)
    assert list(streamed.text_iter("idea")) == [["a", "b", "c"]], "one piece: the list"


def test_the_number_of_samples_of_a_run_holds_for_its_generations() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.gen("x") + sgl.gen("y", n=1)

    state = program.run(n=2, backend=sgl.MockBackend(["a", "b", "c"]))
    assert (state["x"], state["y"]) == (["a", "b"], "c")


# --- bias and processors ---


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": 1}, r"has the key 'a'; expected a token id, an integer >= 0 \("),
        ({5: "x"}, r"of token id 5 is 'x'; expected a finite number >= -100 and <= 100 \("),
        ({5: 101}, r"of token id 5 is 101; expected"),
        ([1, 2], r'is \[1, 2\]; expected a mapping of token id to number \(for example \{"42": -100\} for logit_bias'),
    ],
)
def test_a_wrong_bias_is_told_with_its_token(given: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^logit_bias {message}") as caught:
        sampling_from_mapping({"logit_bias": given})
    assert caught.value.param == "logit_bias"


def test_logit_bias_moves_the_draw() -> None:
    best, second = np.argsort(-scripted_logits(IDS))[:2].tolist()
    _, (x,) = run(text(0), gen(1, max_new_tokens=1, logit_bias={str(best): -100}))
    assert x.token_ids == (second,)
    _, (x,) = run(text(0), gen(1, max_new_tokens=1, logit_bias={65: 100, best: 1}, return_logprob=True))
    assert x.token_ids == (65,)
    assert x.logprobs[0].logprob == pytest.approx(logprobs(IDS)[65], abs=1e-4), "log-probabilities are the model's"


def only(logits: torch.Tensor, output_ids: Any, params: Any) -> torch.Tensor:
    """Allow the ids in `params`, one after the other."""
    keep = params[len(output_ids) % len(params)]
    changed = torch.full_like(logits, -torch.inf)
    changed[keep] = 0.0
    return changed


def raises(logits: torch.Tensor, output_ids: Any, params: Any) -> torch.Tensor:
    logits.zero_()  # a copy: nobody else's
    raise ZeroDivisionError("no")


PROCESSORS = {
    **BUILT_IN,
    "only": only,
    "raises": raises,
    "short": lambda logits, output_ids, params: logits[:-1],
    "nothing": lambda logits, output_ids, params: None,
    "nan": lambda logits, output_ids, params: logits * torch.nan,
}


def test_a_processor_changes_its_row_alone() -> None:
    rig = Rig(processors=PROCESSORS)
    start(rig, 1, text(0), gen(1, custom_logit_processor="only", custom_params=[72, 105]))
    start(rig, 2, text(0), gen(1))
    best = int(scripted_logits(IDS).argmax())
    banned = {"custom_logit_processor": "disallowed_tokens", "custom_params": {"token_ids": [best]}}
    start(rig, 3, text(0), gen(1, max_new_tokens=1, **banned))
    rig.run()
    assert rig.of(1, ValueEvent)[0].value == "HiHiHiHi"
    assert rig.of(2, ValueEvent)[0].value == greedy(PROMPT, 8)
    assert rig.of(3, ValueEvent)[0].token_ids == (int(np.argsort(-scripted_logits(IDS))[1]),)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("raises", GenerationError, "'raises' raised: ZeroDivisionError: no"),
        ("short", GenerationError, r"returned \(\d+,\) torch.float32; expected"),
        ("nothing", GenerationError, "returned None"),
        ("nan", InvalidLogits, "returned NaN"),
    ],
)
def test_a_processor_that_fails_fails_its_row_alone(name: str, kind: type[SglError], message: str) -> None:
    rig = Rig(processors=PROCESSORS)
    start(rig, 1, text(0), gen(1, custom_logit_processor=name, custom_params={"token_ids": [10**6]}))
    start(rig, 2, text(0), gen(1))
    rig.run()
    error = SglError.from_info(rig.of(1, FailedEvent)[0].error)
    assert type(error) is kind
    with pytest.raises(kind, match=message):
        raise error
    assert rig.of(2, ValueEvent)[0].value == greedy(PROMPT, 8)


class Picky:
    """Wants a number."""

    def __call__(self, logits: torch.Tensor, output_ids: Sequence[int], params: Any) -> torch.Tensor:
        return logits + params

    def check(self, params: Any, vocab_size: int) -> None:
        float(params)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("disallowed_tokens", None, "custom_params is None; expected"),
        ("disallowed_tokens", {"token_ids": [10**6]}, "with ids below 512"),
        ("disallowed_tokens", {"token_ids": "a"}, "with ids below 512"),
        ("picky", [1], "'picky' refuses custom_params: TypeError"),
    ],
)
def test_parameters_that_a_processor_refuses_fail_at_admission(name: str, params: Any, message: str) -> None:
    rig = Rig(processors={**PROCESSORS, "picky": Picky()})
    given = {} if params is None else {"custom_params": params}
    start(rig, 1, text(0), gen(1, name="fine"), text(2, "!"), gen(3, custom_logit_processor=name, **given))
    error = SglError.from_info(rig.of(1, FailedEvent)[0].error)
    assert isinstance(error, InvalidParameter)
    assert error.param == "custom_params"
    with pytest.raises(InvalidParameter, match=message):
        raise error
    assert rig.run() == 0, "nothing of the program was started"
    start(rig, 2, text(0), gen(1, custom_logit_processor="picky", custom_params=1))
    rig.run()
    assert rig.of(2, ValueEvent)[0].value == greedy(PROMPT, 8)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        ("json:nothing", "cannot be imported: AttributeError"),
        ("json", "is not"),
        ("json:__doc__", "cannot be called"),
        ("sgl.runtime.processors:disallowed_tokens", "is taken"),
    ],
)
def test_processors_that_cannot_be_registered(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_processors([path])
    assert caught.value.param == "logit_processors"


# --- special and stop tokens ---


def test_special_tokens_are_text_only_when_asked() -> None:
    asked = {"logit_bias": {EOS: 100}, "ignore_eos": True, "max_new_tokens": 2}
    name = Rig.tokenizer.decode([EOS], skip_special_tokens=False)
    assert run(text(0), gen(1, **asked))[1][0].value == ""
    (x,) = run(text(0), gen(1, **asked, skip_special_tokens=False, spaces_between_special_tokens=False))[1]
    assert (x.value, x.token_ids) == (name * 2, (EOS, EOS))


def test_what_ended_the_text_is_kept_when_asked() -> None:
    whole = greedy(PROMPT, 8)
    ids = expected_greedy(IDS, 3)
    asked = {"stop_token_ids": ids[2], "no_stop_trim": True}
    rig, (x, y) = run(text(0), gen(1, **asked), gen(2, "y", max_new_tokens=2))
    assert (x.value, x.token_ids, x.matched) == (
        whole[: ids.index(ids[2]) + 1],
        tuple(ids[: ids.index(ids[2]) + 1]),
        ids[2],
    )
    assert y.value == greedy(PROMPT + x.value, 2), "it is part of the state"
    eos = {"logit_bias": {EOS: 100}, "no_stop_trim": True, "skip_special_tokens": False}
    rig, (x, y) = run(text(0), gen(1, **eos), text(2, "!"), gen(3, "y", max_new_tokens=2), stream=True)
    assert (x.value, x.token_ids) == (Rig.tokenizer.decode([EOS], skip_special_tokens=False), (EOS,))
    assert y.value == greedy(PROMPT + "!", 2), "the model's own end is not: a chat template writes it"
    assert rig.of(1, DoneEvent)[0].text == PROMPT + "!" + y.value
    assert "".join(event.text for event in rig.of(1, TextEvent)) == PROMPT + "!", (
        "and a stream goes on with what follows"
    )


# --- defaults ---


def write(folder: Path, content: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_what_a_model_recommends(tmp_path: Path) -> None:
    assert model_defaults(tmp_path) == {}
    found = model_defaults(
        write(tmp_path, {"temperature": 0.6, "top_p": 0.9, "top_k": 0, "min_p": None, "eos_token_id": 2})
    )
    assert found == {"temperature": 0.6, "top_p": 0.9, "top_k": -1}
    with pytest.raises(ConfigError, match="top_p is 3"):
        model_defaults(write(tmp_path, {"top_p": 3}))


class Recommending(sgl.MockBackend):
    def sampling_defaults(self) -> Mapping[str, Any]:
        return {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}


def test_recommendations_are_below_everything_that_is_said() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.gen("x") + sgl.gen("y", temperature=0.0)

    def sampling(**run: Any) -> list[tuple[float, int, float]]:
        mock = Recommending()
        program.run(backend=mock, **run)
        gens = [node.sampling for node in mock.graphs[0].nodes if isinstance(node, Gen)]
        return [(each.temperature, each.top_k, each.repetition_penalty) for each in gens]

    assert sampling() == [(0.6, 20, 1.1), (0.0, 20, 1.1)]
    assert sampling(temperature=0.9, top_k=-1) == [(0.9, -1, 1.1), (0.0, -1, 1.1)]


# --- the documentation ---


def test_the_table_of_parameters_is_that_of_the_fields(root: Path) -> None:
    page = (root / "runtime" / "README.md").read_text(encoding="utf-8")
    table = page.partition("## Sampling parameters")[2].partition("\nOrder for each row")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| `")]
    defaults = Sampling()
    assert [name.strip("`") for name, *_ in rows] == list(Sampling.__struct_fields__)
    for name, default, *_ in rows:
        value = getattr(defaults, name.strip("`"))
        written = "drawn" if name == "`seed`" else "none" if value in ((), None) else str(value)
        assert default.removeprefix("model's, else ") == written, name


def test_an_integer_too_large_is_told_its_bound() -> None:
    with pytest.raises(InvalidParameter, match=r"seed is 9223372036854775808; .* < 2\^63"):
        sgl.gen("x", seed=2**63)
    with pytest.raises(InvalidParameter, match=r"seed is -1; expected an integer >= 0$"):
        sgl.gen("x", seed=-1)
