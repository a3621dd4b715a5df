"""Drafts and their verification, on the scripted model: outputs are those without drafts, whoever guesses whatever."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from support.programs import start, text
from support.scripted import Rig, expected_greedy

from sgl.errors import ConfigError
from sgl.grammars.spec import Regex
from sgl.lang.graph import DeltaEvent, FailedEvent, Fork, Gen, Join, Node, Sampling, Select, ValueEvent
from sgl.runtime.config import config_from_mapping
from sgl.runtime.generation import Generation
from sgl.runtime.plan import Chunk, StepPlan
from sgl.runtime.sequence import Request, Sampled
from sgl.runtime.speculation.control import Trust
from sgl.runtime.speculation.drafter import Drafter
from sgl.runtime.speculation.options import resolve_speculation
from sgl.runtime.speculation.proposer import Proposal
from sgl.runtime.speculation.tree import Sent, Tree


class Oracle:
    """Proposes what greedy decoding gives, wrong with a chance: each draft depends on the place alone.

    Args:
        wrong: share of the drafts that are wrong.
        most: drafts of one proposal.
    """

    def __init__(self, wrong: float = 0.3, most: int = 6) -> None:
        self.wrong = wrong
        self.most = most
        self.asked = 0

    def propose(self, request: Request, drafts: Sequence[int], room: int) -> Proposal:
        self.asked += 1
        context = [*request.sequence.token_ids, *drafts]
        right = expected_greedy(context, min(room, self.most))
        rng = random.Random(f"{len(context)}:{request.sequence.id}")
        return Proposal([97 if rng.random() < self.wrong else token_id for token_id in right], "oracle", 3)

    def branches(self, request: Request, room: int) -> Sequence[Proposal]:
        return ()

    def prepare(self, rows: Sequence[tuple[Request, Sampled]], num_drafts: int) -> None:
        return

    def ended(self, request: Request) -> None:
        return


class Forked(Oracle):
    """Proposes a chain that is wrong somewhere, and beside it what is right from there on, among other wrong ways."""

    def branches(self, request: Request, room: int) -> Sequence[Proposal]:
        right = expected_greedy(request.sequence.token_ids, min(room, self.most))
        rng = random.Random(f"{len(request.sequence)}:branches")
        wrong = [[*right[:at], rng.choice(b"qzx"), *right[at + 1 :]] for at in rng.sample(range(4), 2)]
        ways = [*wrong, right] if rng.random() < 0.8 else wrong
        return [Proposal(token_ids[:room], "oracle", 3) for token_ids in ways]


def drafter(*proposers: object, most: int = 5, most_of_step: int = 16) -> Drafter:
    """One that always drafts as much as it can."""
    return Drafter(proposers or [Oracle()], most=most, most_of_step=most_of_step)  # type: ignore[arg-type]


def gen(id: int, branch: int = 0, n: int = 12, name: str = "x", **sampling: object) -> Gen:
    fields = {"max_new_tokens": n, "temperature": 0.0, **sampling}
    return Gen(id=id, branch=branch, name=name, sampling=Sampling(**fields))


def outcomes(rig: Rig, programs: int) -> list[object]:
    """Everything that clients see but counters."""
    return [
        sorted(
            (
                msgspec.structs.replace(event, usage=None, latency_s=0, first_s=0)
                for event in rig.of(program, ValueEvent)
            ),
            key=lambda event: event.node,
        )
        for program in range(programs)
    ]


def both(*nodes: Node, programs: int = 3, make: Callable[[], Drafter] = drafter, **changes: object) -> tuple[Rig, Rig]:
    """The same programs with drafts and without."""
    rigs = Rig(drafter=make(), **changes), Rig(**changes)
    for rig in rigs:
        for program in range(programs):
            start(rig, program, text(0, "row " * (program + 1)), *nodes)
        rig.run()
    assert outcomes(rigs[0], programs) == outcomes(rigs[1], programs)
    assert rigs[1].core.stats.drafted_tokens == 0
    return rigs


@pytest.fixture(params=[False, True], ids=["", "overlapped"], autouse=True)
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "overlaps", request.param)


EVERYTHING = (
    Fork(id=1, children=(1, 2)),
    gen(2, branch=1, n=9, name="a", temperature=1.0, seed=5, return_logprob=True, top_logprobs_num=2),
    gen(3, branch=2, n=19, name="b", frequency_penalty=1.5, min_new_tokens=4),
    Join(id=4, children=(1, 2)),
    Gen(
        id=5,
        name="c",
        constraint=Regex(pattern='\\{"name": "[a-z]{1,9}", "age": [0-9]+\\}'),
        sampling=Sampling(max_new_tokens=30, temperature=1.0, return_logprob=True),
    ),
    Select(id=6, name="d", choices=("yes", "yet", "no")),
    gen(7, n=15, name="e", stop=("a", "bc", "z9")),
    gen(8, n=15, name="f", stop_regex=("[0-9]{2}",), top_p=0.9, temperature=0.8, seed=3),
)


def trees_of(rig: Rig) -> list[Chunk]:
    return [chunk for plan in rig.runner.plans for chunk in plan.chunks if chunk.parents]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("oracle", "wrong"), [(Oracle, 0.0), (Oracle, 0.2), (Oracle, 1.0), (Forked, 0.3)])
def test_any_guess_leaves_every_output_as_it_is(page_size: int, oracle: type[Oracle], wrong: float) -> None:
    on, off = both(
        *EVERYTHING,
        make=lambda: drafter(oracle(wrong), most=5 if oracle is Oracle else 9),
        page_size=page_size,
        num_pages=900 // page_size,
    )
    stats = on.core.stats
    assert stats.drafted_tokens > 50
    assert stats.accepted_tokens > 20 if wrong < 1 else stats.accepted_tokens < 5
    assert (stats.decode_tokens, stats.forced_tokens) == (off.core.stats.decode_tokens, off.core.stats.forced_tokens)
    assert bool(trees_of(on)) == (oracle is Forked)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_tree_is_right_where_a_chain_is_wrong(page_size: int) -> None:
    """The likeliest way is always wrong: it is a branch whose keys and values stay, wherever they lay."""
    on, _ = both(
        gen(1, n=20),
        programs=1,
        make=lambda: drafter(Forked(1.0), most=12),
        page_size=page_size,
        num_pages=100,
    )
    stats = on.core.stats
    assert stats.forwards < 12 + 8 * Rig.overlaps
    assert stats.accepted_tokens > 6
    trees = trees_of(on)
    assert max(chunk.num_drafts for chunk in trees) <= 12
    assert all(chunk.parents.count(-1) > 1 for chunk in trees)


def test_trees_under_pressure_and_in_the_middle_of_an_end() -> None:
    """Rows with trees are put back, cancelled between forward and verification, and stopped by a stop string."""
    cancelled: list[int] = []

    def hook(plan: StepPlan) -> None:
        if not cancelled and any(chunk.parents and chunk.sequence == 1 for chunk in plan.chunks):
            cancelled.append(1)
            rigs[0].core.cancel(0)

    fields = {"num_pages": 70, "schedule_conservativeness": 0.001}
    rigs = [Rig(hook=hook, drafter=drafter(Forked(0.5), most=9), **fields), Rig(**fields)]
    for rig in rigs:
        for program in range(6):
            stop = ("a", "j") if program % 2 else ()
            start(rig, program, text(0, "row " * (program + 1)), gen(1, n=30, stop=stop))
        rig.run()
    assert cancelled
    assert not rigs[0].of(0, ValueEvent)
    assert outcomes(rigs[0], 6)[1:] == outcomes(rigs[1], 6)[1:]
    assert rigs[0].core.stats.retractions
    assert rigs[0].core.stats.num_running == 0


def test_the_likeliest_guesses_are_sent() -> None:
    """Of three ways, the nodes with the best chances, branch by branch; what the constraint refuses is left out."""
    if Rig.overlaps:
        pytest.skip("trees do not depend on it")
    trust = Trust()
    for _ in range(100):
        trust.add("ngram", 3, right=False)
        trust.add("branch", 3, right=True)
    chain = [Sent("ngram", 3 + i, trust.of("ngram", 3 + i)) for i in range(4)]
    generation = Generation(Sampling(), Rig.tokenizer, frozenset(), seed=1, max_new_tokens=20)
    tree = Tree([65, 66, 67, 68], chain, longest=4, bar=0.0, trust=trust, better=0.0)
    for way in ([65, 66, 70, 71], [80, 81, 82, 83], [80, 90]):
        tree.add(Proposal(way, "ngram", 3), generation)
    layout = tree.lay_out(5, None)
    assert layout is not None
    assert (layout.token_ids, layout.parents) == ((80, 81, 82, 83, 90), (-1, 0, 1, 2, 0))
    matcher = Rig().core.compiler.compile(Regex(pattern="A.*|P[RZ]")).matcher()
    constrained = tree.lay_out(7, matcher)
    assert constrained is not None
    assert (constrained.token_ids[:1], constrained.token_ids[-1:]) == ((65,), (90,))
    assert 81 not in constrained.token_ids
    assert matcher.accept(80), "it stands where it stood"


def test_forwards_are_saved() -> None:
    """Twenty tokens of a row whose drafts are all right come in two steps behind that of the prompt."""
    on, off = both(gen(1, n=20), programs=1, make=lambda: drafter(Oracle(0.0, most=9), most=9), num_pages=100)
    assert off.core.stats.forwards == 20
    (chunk_sizes,) = [[len(plan.chunks[0].token_ids) for plan in on.runner.plans]]
    stats = on.core.stats
    if Rig.overlaps:
        assert stats.forwards <= 6
        return
    assert chunk_sizes == [4, 10, 9]
    assert (stats.drafted_tokens, stats.accepted_tokens, stats.verifications) == (17, 17, 2)
    assert stats.accept_len == 9.5


def test_pages_of_wrong_guesses_are_free_again() -> None:
    """A pool that holds the texts and hardly more: drafts take what is left, and never put a request back."""
    on, _ = both(gen(1, n=20), programs=3, make=lambda: drafter(Oracle(0.5)), num_pages=80, max_running_requests=3)
    stats = on.core.stats
    assert stats.drafted_tokens > stats.accepted_tokens > 0
    assert stats.retractions == 0


def test_retraction_under_pressure() -> None:
    """Rows with drafts are put back and go on: no output changes, no page is lost."""
    on, _ = both(
        gen(1, n=30),
        programs=6,
        make=lambda: drafter(Oracle(0.2)),
        num_pages=110,
        schedule_conservativeness=0.001,
    )
    assert on.core.stats.retractions > 0
    assert on.core.stats.accepted_tokens > 0


def test_a_disconnect_while_drafts_are_verified() -> None:
    """Cancelled between the forward with its drafts and their verification: rows and pages are free, others go on."""
    rig = Rig(num_pages=300)
    cancelled: list[int] = []

    def hook(plan: object) -> None:
        if not cancelled and any(chunk.num_drafts and chunk.sequence == 1 for chunk in plan.chunks):  # type: ignore[attr-defined]
            cancelled.append(1)
            rig.core.cancel(0)

    rig = Rig(hook=hook, drafter=drafter(Oracle(0.1)), num_pages=300)
    for program in range(2):
        start(rig, program, text(0, "row " * (program + 1)), gen(1, n=20))
    rig.run()
    assert cancelled
    assert not rig.of(0, ValueEvent)
    (value,) = rig.of(1, ValueEvent)
    assert value.token_ids == tuple(expected_greedy(list(b"row row "), 20))
    assert rig.core.stats.num_running == 0


@pytest.mark.parametrize("trees", [False, True])
def test_drafts_beyond_the_end(trees: bool) -> None:
    """Guesses that go past an end of sequence, a stop, and the end of a constraint's text change nothing."""

    class Past(Oracle):
        """The right tokens, then an end of sequence and more of them."""

        def propose(self, request: Request, drafts: Sequence[int], room: int) -> Proposal:
            right = list(super().propose(request, drafts, room).token_ids)
            if request.generation is not None and request.generation.matcher is not None:
                right = [*b"abcdefxyz"[len(request.sequence) - request.prompt_len :]]
            return Proposal([*right[:2], min(Rig.tokenizer.eos_ids), *right][:room], "oracle", 3)

        def branches(self, request: Request, room: int) -> Sequence[Proposal]:
            way = self.propose(request, (), room).token_ids
            return [Proposal([*way[:1], ord("f"), *way[2:]], "oracle", 3)] if trees else []

    constrained = Gen(
        id=1,
        name="c",
        constraint=Regex(pattern="[a-f]{3,5}(xyz)?"),
        sampling=Sampling(max_new_tokens=30, temperature=0.0),
    )
    for node in (constrained, gen(1, n=20, stop=("q",)), gen(1, n=4)):
        on, _ = both(node, make=lambda: drafter(Past(0.0)), programs=4)
        assert on.core.stats.drafted_tokens
        assert bool(trees_of(on)) == trees


def test_streams_send_several_tokens_at_once() -> None:
    rig = Rig(drafter=drafter(Oracle(0.0, most=4)), num_pages=100)
    start(rig, 0, text(0, "row "), gen(1, n=12), stream=True)
    rig.run()
    deltas = [event.token_ids for event in rig.of(0, DeltaEvent)]
    (value,) = rig.of(0, ValueEvent)
    assert sum(deltas, ()) == value.token_ids == tuple(expected_greedy(list(b"row "), 12))
    assert max(map(len, deltas)) == 6, "five guesses, and the draw behind them"


def test_what_a_constraint_refuses_is_not_sent() -> None:
    class Wrong(Oracle):
        def propose(self, request: Request, drafts: Sequence[int], room: int) -> Proposal:
            return Proposal([ord("!")] * room, "oracle", 9)

    node = Gen(id=1, name="c", constraint=Regex(pattern="[a-z]{5,9}"), sampling=Sampling(max_new_tokens=9))
    on, _ = both(node, make=lambda: drafter(Wrong()))
    assert on.core.stats.drafted_tokens == 0


def test_nan_behind_a_draft_fails_only_where_it_counts() -> None:
    """A row whose logits turn into NaN behind a wrong guess is sound; behind a right one it fails, alone."""
    for wrong, fails in ((1.0, False), (0.0, True)):
        rig = Rig(drafter=drafter(Oracle(wrong)), num_pages=100)
        forward = rig.runner.forward

        def broken(plan, drawn=None, forward=forward):  # type: ignore[no-untyped-def]
            logits = forward(plan, drawn)
            if plan.chunks[0].num_drafts:
                logits[1:] = float("nan")
            return logits

        rig.core._forward = broken
        start(rig, 0, text(0, "row "), gen(1, n=6))
        rig.run()
        assert bool(rig.of(0, FailedEvent)) == fails


def chain_of_gens(*sampling: dict[str, object]) -> list[Node]:
    """Generations with literals between them, and one that begins right behind the last."""
    nodes: list[Node] = []
    for i, fields in enumerate(sampling):
        nodes += [gen(2 * i + 1, name=f"x{i}", **fields), text(2 * i + 2, f" and {i}:")]
    return [*nodes[:-1], gen(2 * len(sampling), n=4, name="last")]


def test_a_chain_of_generations_and_literals_is_one_decode() -> None:
    """Guesses go past the end of a generation, through the literal, into the next one, and on."""
    nodes = chain_of_gens({"n": 5}, {"n": 4}, {"n": 3})
    on, off = both(
        *nodes, programs=1, num_pages=400, make=lambda: drafter(Oracle(0.0, most=12), most=12, most_of_step=60)
    )
    stats = on.core.stats
    assert off.core.stats.forwards == 5 + 4 + 3 + 4
    assert stats.accepted_tokens <= stats.drafted_tokens
    assert stats.forwards == 6 if not Rig.overlaps else stats.forwards < 12
    assert stats.prompt_tokens == stats.cached_tokens + stats.prefill_tokens


@pytest.mark.parametrize("page_size", [1, 4])
def test_ends_of_every_kind_before_a_literal(page_size: int) -> None:
    """Stop strings trimmed and kept, stop ids, limits; with seeds, penalties, log-probabilities."""
    nodes = chain_of_gens(
        {"n": 19, "stop": ("a", "b", "c", " ")},
        {"n": 9, "stop": ("1", "2", "3", "4", "d"), "no_stop_trim": True},
        {"n": 12, "stop_token_ids": tuple(range(60, 70))},
        {"n": 7, "temperature": 1.0, "seed": 4, "return_logprob": True},
        {"n": 15, "frequency_penalty": 0.7, "stop": (":", ";", "k")},
        {"n": 5, "min_new_tokens": 3, "stop": tuple("efghijklmnop")},
    )
    make = lambda: drafter(Oracle(0.05, most=12), most=12, most_of_step=64)  # noqa: E731
    on, _ = both(*nodes, page_size=page_size, num_pages=1200 // page_size, chunked_prefill_size=100, make=make)
    assert 0 < on.core.stats.accepted_tokens <= on.core.stats.drafted_tokens


def test_constraints_behind_literals() -> None:
    node = Gen(
        id=3,
        name="c",
        constraint=Regex(pattern="[a-z]{2,4}[0-9]"),
        sampling=Sampling(max_new_tokens=9, temperature=0.0),
    )
    nodes = (gen(1, n=4), text(2, ' "name": "'), node, text(4, '", '), gen(5, n=3, name="z"))
    on, _ = both(*nodes, num_pages=500, make=lambda: drafter(Oracle(0.0), most=12, most_of_step=64))
    assert 0 < on.core.stats.accepted_tokens <= on.core.stats.drafted_tokens


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"speculative_algorithm": "STANDALONE"}, "speculative_draft_model_path"),
        ({"speculative_algorithm": "NGRAM", "speculative_draft_model_path": "x"}, "speculative_draft_model_path"),
        ({"speculative_num_steps": 3}, "speculative_num_steps"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_use_rejection_sampling": True},
            "speculative_use_rejection_sampling",
        ),
        (
            {
                "speculative_algorithm": "STANDALONE",
                "speculative_draft_model_path": "x",
                "speculative_use_rejection_sampling": True,
                "speculative_use_block_verification": True,
            },
            "speculative_use_rejection_sampling",
        ),
        (
            {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3, "speculative_num_draft_tokens": 3},
            "speculative_num_draft_tokens",
        ),
        (
            {"speculative_algorithm": "NGRAM", "speculative_adaptive": False, "speculative_adaptive_config": {}},
            "speculative_adaptive_config",
        ),
        (
            {"speculative_algorithm": "NGRAM", "speculative_adaptive_config": {"1": {"candidate_steps": []}}},
            "speculative_adaptive_config",
        ),
    ],
)
def test_contradictory_options_are_refused(options: dict[str, object], param: str) -> None:
    if Rig.overlaps:
        pytest.skip("options do not depend on it")
    with pytest.raises(ConfigError) as error:
        resolve_speculation(config_from_mapping(options))
    assert error.value.param == param


def test_a_corpus_is_guessed_from(tmp_path: Path) -> None:
    """Text that only the user's file has."""
    prompt = list(b"row ")
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"text": bytes([*prompt, *expected_greedy(prompt, 20)]).decode()}) + "\n")
    options = {"speculative_algorithm": "NGRAM", "speculative_ngram_external_corpus_path": str(path)}
    given = resolve_speculation(config_from_mapping({**options, "speculative_adaptive": False}))
    rig = Rig(speculation=given, num_pages=100)
    start(rig, 0, text(0, "row "), gen(1, n=20))
    rig.run()
    assert rig.core.stats.accepted_tokens >= 15
    assert rig.core.stats.forwards < 8 + 12 * Rig.overlaps


def test_guesses_do_not_cross_salts() -> None:
    """What one tenant's programs wrote is no guess for another's."""
    given = resolve_speculation(config_from_mapping({"speculative_algorithm": "NGRAM", "speculative_adaptive": False}))
    rig = Rig(speculation=given, num_pages=400)
    accepted = []
    for program, salt in enumerate(("a", "a", "b")):
        before = rig.core.stats.accepted_tokens
        start(rig, program, text(0, "row "), gen(1, n=20), cache_salt=salt)
        rig.run()
        accepted.append(rig.core.stats.accepted_tokens - before)
    assert accepted[0] == accepted[2] < 5 < accepted[1]
