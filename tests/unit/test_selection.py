"""The trie of a select's options, and stopping as soon as the best one is certain: same winner, fewer tokens."""

from __future__ import annotations

import random

import pytest
from support.scripted import Rig

from sgl.errors import InvalidParameter
from sgl.lang.graph import ChoicesMethod, Graph, LiteralText, ProgramOptions, Select, Text, ValueEvent
from sgl.limits import DEFAULT_LIMITS
from sgl.runtime.selection import Path, Selection, decide

METHODS: tuple[ChoicesMethod, ...] = ("token_length_normalized", "greedy_token_selection")


class Model:
    """Log-probabilities of a made-up model: fixed per prefix, never above 0, sharper or flatter by `spread`."""

    def __init__(self, seed: int, spread: float) -> None:
        self.seed, self.spread = seed, spread
        self.computed: set[Path] = set()

    def logprobs(self, prefix: Path, ids: Path) -> list[float]:
        self.computed.add(prefix)
        return [-self.spread * random.Random(f"{self.seed}{prefix}{i}").expovariate(1.0) for i in ids]


def put_chain(selection: Selection, model: Model, tokens: Path, wanted: dict[int, Path]) -> None:
    for k, ids in wanted.items():
        selection.put(tokens[:k], model.logprobs(tokens[:k], ids))


def random_options(pick: random.Random) -> list[Path]:
    vocabulary = pick.choice([3, 10, 1000])
    options = {
        tuple(pick.randrange(vocabulary) for _ in range(pick.randrange(1, 6))) for _ in range(pick.choice([2, 9, 60]))
    }
    return sorted(options, key=lambda path: pick.random())


@pytest.mark.parametrize("method", METHODS)
def test_the_early_winner_is_the_winner_of_all(method: ChoicesMethod) -> None:
    saved = 0
    for seed in range(300):
        pick = random.Random(seed)
        paths = random_options(pick)
        names = [str(path) for path in paths]
        model, early = Model(seed, pick.choice([0.1, 3.0])), Model(seed, 0.0)
        early.spread = model.spread
        full = Selection([], paths)
        full.put((), model.logprobs((), full.first_ids))
        for chain in full.chains():
            put_chain(full, model, chain.tokens, chain.wanted)
        known = [full.logprobs(i) for i in range(len(paths))]
        best, scores = decide(names, full.paths, known, method)

        part = Selection([], paths)
        part.put((), early.logprobs((), part.first_ids))
        waves = 0
        while wave := part.next_wave(method):
            waves += 1
            assert waves <= len(paths)
            for chain in wave:
                put_chain(part, early, chain.tokens, chain.wanted)
        found, bounds = decide(names, part.paths, [part.logprobs(i) for i in range(len(paths))], method)
        assert found == best
        assert bounds[found].complete
        assert bounds[found].score == pytest.approx(scores[best].score) or method == "greedy_token_selection"
        assert early.computed <= model.computed
        saved += len(model.computed) - len(early.computed)
        if method == "token_length_normalized":
            for bound, score in zip(bounds, scores, strict=True):
                assert bound.complete or score.score <= bound.score <= bounds[found].score
    assert saved > 1000


def select(rig: Rig, program: int, choices: tuple[str, ...], **fields: object) -> ValueEvent:
    rig.core.open(program, ProgramOptions())
    nodes = (
        Text(id=0, segments=(LiteralText("which of these: "),)),
        Select(id=1, name="pick", choices=choices, **fields),  # type: ignore[arg-type]
    )
    rig.core.submit(program, Graph(nodes=nodes), finish=True)
    rig.run()
    (event,) = rig.of(program, ValueEvent)
    return event


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_earlier_selects_left_is_no_reason_to_compute_anything_twice(page_size: int) -> None:
    """Cached nodes are computed for their scores, as often as once; what hangs below them once, whoever needs it."""
    rig = Rig(num_pages=4096 // page_size, page_size=page_size, chunked_prefill_size=1024)
    for seed in range(20):
        choices = tuple("".join(chr(97 + token % 20) for token in path) for path in random_options(random.Random(seed)))
        choices = tuple(dict.fromkeys(choices))
        event = select(rig, seed, choices)
        nodes = {choice[:k] for choice in choices for k in range(1, len(choice))}
        scored = event.usage.scored_tokens
        assert scored == len(nodes) if page_size == 1 else scored >= len(nodes)
        fresh = select(Rig(num_pages=4096, chunked_prefill_size=1024), 1, choices)
        assert [score.logprobs for score in event.choices] == [score.logprobs for score in fresh.choices]


@pytest.mark.parametrize("method", METHODS)
def test_five_hundred_options_in_the_engine(method: ChoicesMethod) -> None:
    pick = random.Random(5)
    choices = tuple("".join(pick.choices("abcdefgh", k=6)) for _ in range(500))
    fields = {"num_pages": 8192, "chunked_prefill_size": 8192, "max_running_requests": 4}
    whole, early = Rig(**fields), Rig(**fields)
    everything = select(whole, 1, choices, method=method)
    best = select(early, 1, choices, method=method, all_scores=False)
    assert best.value == everything.value
    tokens = len({choice[:k] for choice in choices for k in range(1, len(choice))})
    assert everything.usage.scored_tokens == tokens
    # However many rows the batch has: a select's rows are gone with the step, which scores `max_choices` of them.
    assert whole.core.snapshot().forwards == -(-tokens // DEFAULT_LIMITS.max_choices)
    # The scripted model is nearly flat: bounds rule little out. `Model` above has sharp ones too.
    assert best.usage.scored_tokens < (tokens / 8 if method == "greedy_token_selection" else tokens)
    by_name = {score.choice: score for score in everything.choices}
    for score in best.choices:
        if score.complete:
            assert score.logprobs == pytest.approx(by_name[score.choice].logprobs)
        else:
            assert score.probability == 0
    assert sum(score.probability for score in best.choices) == pytest.approx(1)
    assert sum(score.complete for score in best.choices) < len(choices)


def test_drawing_needs_all_scores() -> None:
    with pytest.raises(InvalidParameter, match="all_scores"):
        Select(id=0, name="x", choices=("a", "b"), temperature=0.5, all_scores=False)
