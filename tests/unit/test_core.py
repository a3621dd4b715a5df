"""The engine core by hand: real scheduler, tree, pool, program runs and sampler; scripted model, fake clock."""

from __future__ import annotations

import random

import pytest
from support.programs import start, text
from support.scripted import Rig, expected_greedy, scripted_logits

from sgl.errors import DeadlineExceeded, NeverFits, PromptTooLong, SglError, StateLost
from sgl.lang.graph import (
    DeltaEvent,
    DoneEvent,
    FailedEvent,
    Fork,
    Gen,
    Graph,
    HandlesEvent,
    Join,
    JoinedEvent,
    LiteralText,
    Mark,
    ProgramOptions,
    Release,
    Rewind,
    Role,
    Sampling,
    Select,
    StateHandle,
    StateText,
    Text,
    TextEvent,
    ValueEvent,
    Var,
)
from sgl.limits import Limits
from sgl.runtime.branch import Branch
from sgl.runtime.program_run import ProgramRun


@pytest.fixture(autouse=True, params=[False, True], ids=["plain", "overlap"])
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every test here holds for steps one after another and for steps that overlap."""
    monkeypatch.setattr(Rig, "overlaps", request.param)
    return bool(request.param)


def gen(id: int, branch: int = 0, n: int = 6, name: str = "x", **sampling: object) -> Gen:
    fields = {"max_new_tokens": n, "temperature": 0.0, **sampling}
    return Gen(id=id, branch=branch, name=name, sampling=Sampling(**fields))


def values(rig: Rig, program: int) -> list[str]:
    return [event.value for event in rig.of(program, ValueEvent)]


def greedy(prompt: str, n: int) -> str:
    ids = list(prompt.encode())
    return bytes(expected_greedy(ids, n)).decode()


def failure(rig: Rig, program: int) -> SglError:
    (event,) = rig.of(program, FailedEvent)
    return SglError.from_info(event.error)


def test_plain_generation_is_what_the_model_says() -> None:
    rig = Rig()
    start(rig, 1, text(0, "hello"), gen(1))
    rig.run()
    assert values(rig, 1) == [greedy("hello", 6)]
    (done,) = rig.of(1, DoneEvent)
    assert done.text == "hello" + values(rig, 1)[0]
    assert rig.core.snapshot().pages_held == 0


def test_text_between_generations_costs_only_itself() -> None:
    rig = Rig()
    start(rig, 1, text(0, "a" * 20), gen(1, n=4, name="x"), text(2, "bcd"), gen(3, n=4, name="y"))
    rig.run()
    x, y = values(rig, 1)
    assert y == greedy("a" * 20 + x + "bcd", 4)
    second = rig.of(1, ValueEvent)[1].usage
    # The last token of the first generation was drawn but never computed: it is prefilled with the text.
    assert (second.prompt_tokens, second.cached_tokens, second.prefill_tokens) == (27, 23, 4)


def test_variable_in_text_waits_for_its_value() -> None:
    rig = Rig()
    start(
        rig,
        1,
        text(0, "q"),
        Fork(id=1, children=(1,)),
        gen(2, branch=1, name="idea", n=5),
        Text(id=3, segments=(LiteralText("["), Var("idea", 1), LiteralText("]"))),
        gen(4, n=3, name="answer"),
    )
    rig.run()
    idea = greedy("q", 5)
    assert values(rig, 1) == [idea, greedy(f"q[{idea}]", 3)]


@pytest.mark.parametrize("page_size", [1, 4])
def test_fork_computes_the_prefix_once(page_size: int) -> None:
    rig = Rig(num_pages=400 // page_size, page_size=page_size)
    children = tuple(range(1, 9))
    nodes = [text(0, "p" * 100), Fork(id=1, children=children)]
    nodes += [text(10 + child, str(child), branch=child) for child in children]
    nodes += [gen(30 + child, branch=child, n=3, name=f"v{child}") for child in children]
    nodes += [Join(id=50, children=children)]
    start(rig, 1, *nodes)
    rig.run()
    got = {event.name: event.value for event in rig.of(1, ValueEvent)}
    assert got == {f"v{child}": greedy("p" * 100 + str(child), 3) for child in children}
    assert len(rig.of(1, JoinedEvent)) == 1
    assert rig.core.snapshot().prefill_tokens == 100 + 8


def test_equal_prefixes_in_one_burst_are_computed_once() -> None:
    rig = Rig(num_pages=1000, chunked_prefill_size=512)
    for row in range(12):
        start(rig, row, text(0, "s" * 150 + chr(97 + row)), gen(1, n=2))
    rig.run()
    stats = rig.core.snapshot()
    assert stats.prefill_tokens == 150 + 12
    assert stats.prompt_tokens == 151 * 12
    assert all(values(rig, row) == [greedy("s" * 150 + chr(97 + row), 2)] for row in range(12))


def test_identical_prompts_in_one_step() -> None:
    rig = Rig()
    for row in range(5):
        start(rig, row, text(0, "same prompt"), gen(1, n=4))
    rig.run()
    assert {tuple(values(rig, row)) for row in range(5)} == {(greedy("same prompt", 4),)}
    assert rig.core.snapshot().prefill_tokens == 11 + 4  # each needs logits after the last token


def test_chunked_prefill_gives_the_same() -> None:
    whole, chunked = Rig(chunked_prefill_size=512), Rig(chunked_prefill_size=7)
    for rig in (whole, chunked):
        start(rig, 1, text(0, "x" * 120), gen(1))
        rig.run()
    assert values(whole, 1) == values(chunked, 1) == [greedy("x" * 120, 6)]
    assert len(chunked.runner.plans) > len(whole.runner.plans)
    assert all(plan.num_tokens <= 7 for plan in chunked.runner.plans)


def test_pressure_retracts_and_changes_nothing() -> None:
    rig = Rig(num_pages=120, max_running_requests=8)
    prompts = [f"{row}" + "z" * 20 for row in range(6)]
    for row, prompt in enumerate(prompts):
        start(rig, row, text(0, prompt), gen(1, n=60))
    rig.run()
    assert [values(rig, row) for row in range(6)] == [[greedy(prompt, 60)] for prompt in prompts]
    stats = rig.core.snapshot()
    assert stats.retractions > 0
    assert stats.recomputed_tokens > 0
    assert stats.prefill_tokens + stats.cached_tokens == stats.prompt_tokens == 6 * 21


def test_idle_state_survives_eviction() -> None:
    rig = Rig(num_pages=120)
    start(rig, 1, text(0, "k" * 60), gen(1, n=4), finish=False)
    rig.run()
    for other in range(2, 5):  # what others need pushes the idle state's pages out
        start(rig, other, text(0, chr(60 + other) * 90), gen(1, n=20))
        rig.run()
    handles = rig.of(1, HandlesEvent)[-1].handles
    rig.core.submit(1, Graph(nodes=(text(2, "!"), gen(3, n=4, name="y")), handles=handles), finish=True)
    rig.run()
    x, y = values(rig, 1)
    assert y == greedy("k" * 60 + x + "!", 4)


def test_too_large_is_refused_with_both_numbers() -> None:
    rig = Rig(num_pages=100)
    start(rig, 1, text(0, "x" * 80), gen(1, n=40))
    error = failure(rig, 1)
    assert isinstance(error, NeverFits)
    assert (error.needed_tokens, error.pool_tokens) == (120, 100)
    start(rig, 2, text(0, "x" * 250), gen(1))
    error = failure(rig, 2)
    assert isinstance(error, PromptTooLong)
    assert (error.prompt_tokens, error.context_len) == (250, 200)
    start(rig, 3, text(0, "fine"), gen(1))
    rig.run()
    assert values(rig, 3) == [greedy("fine", 6)]


def test_generation_ends_with_the_context() -> None:
    rig = Rig()
    start(rig, 1, text(0, "x" * 195), gen(1, n=50))
    rig.run()
    (event,) = rig.of(1, ValueEvent)
    assert (len(event.token_ids), event.finish) == (5, "length")


def test_stop_string_inside_a_token_rewinds_the_state() -> None:
    prompt = "stop here"
    full = greedy(prompt, 12)
    stop = full[5:7]
    rig = Rig()
    start(rig, 1, text(0, prompt), gen(1, n=12, stop=(stop,)), text(2, "+"), gen(3, n=3, name="y"))
    rig.run()
    first, second = rig.of(1, ValueEvent)
    assert first.value == full[: full.index(stop)]
    assert (first.finish, first.matched) == ("stop", stop)
    assert second.value == greedy(prompt + first.value + "+", 3)


def test_select_scores_every_option_exactly() -> None:
    choices = ("alpha", "alpine", "beta", "b")
    rig = Rig()
    start(rig, 1, text(0, "pick: "), Select(id=1, name="c", choices=choices), text(2, "."), gen(3, n=3, name="y"))
    rig.run()
    event, after = rig.of(1, ValueEvent)
    base = list(b"pick: ")
    for score in event.choices:
        ids = list(score.choice.encode())
        want = []
        for i, token in enumerate(ids):
            row = scripted_logits(base + ids[:i]).astype(float)
            want.append(row[token] - row.max() - _log_sum_exp(row - row.max()))
        assert list(score.token_ids) == ids
        assert score.logprobs == pytest.approx(want, abs=1e-4)
        assert score.score == pytest.approx(sum(want) / len(want), abs=1e-4)
    best = max(event.choices, key=lambda score: score.score)
    assert event.value == best.choice
    assert sum(score.probability for score in event.choices) == pytest.approx(1)
    assert after.value == greedy("pick: " + event.value + ".", 3)
    # 6 for the prompt, and one per inner node of the token trie: a al alp, alph, alpi alpin, b be bet.
    assert event.usage.prefill_tokens == 6 + 9
    assert len(rig.runner.plans) == 1 + 3


def test_a_step_has_a_bounded_number_of_scored_rows() -> None:
    """Options of many selects come at once; those beyond the bounds come in later steps, with the same scores."""
    free, bounded = Rig(), Rig(limits=Limits(max_choices=4, max_logit_rows=2))
    for rig in (free, bounded):
        for program in range(5):
            options = tuple(f"{program}{end}" for end in ("aa", "ab", "ba", "c"))
            start(rig, program, text(0, "pick: "), Select(id=1, name="c", choices=options))
        rig.run()
    rows = [[sum(len(chunk.scores) for chunk in plan.chunks) for plan in rig.runner.plans] for rig in (free, bounded)]
    assert max(rows[0]) > 4 + 2 >= max(rows[1])
    for program in range(5):
        (one,), (other,) = free.of(program, ValueEvent), bounded.of(program, ValueEvent)
        assert one.value == other.value
        assert [score.logprobs for score in one.choices] == [score.logprobs for score in other.choices]


def _log_sum_exp(row: object) -> float:
    import numpy as np

    return float(np.log(np.exp(row).sum()))


def test_select_again_uses_the_cache_and_still_scores() -> None:
    rig = Rig()
    for program in (1, 2):
        start(rig, program, text(0, "pick: "), Select(id=1, name="c", choices=("yes", "yet", "no")))
        rig.run()
    first, second = rig.of(1, ValueEvent)[0], rig.of(2, ValueEvent)[0]
    assert first.choices == second.choices


def test_select_after_a_fork_scores_like_one_without() -> None:
    """The unit that a fork ended is opened again: options join its last characters as they would without the fork."""
    choices = ("yes", "no")
    plain, forked = Rig(), Rig()
    start(plain, 1, text(0, "pick: "), Select(id=1, name="c", choices=choices))
    start(
        forked,
        1,
        text(0, "pick: "),
        Fork(id=1, children=(1, 2)),
        *(Select(id=1 + b, branch=b, name="c", choices=choices) for b in (1, 2)),
    )
    plain.run()
    forked.run()
    assert [event.choices for event in forked.of(1, ValueEvent)] == [plain.of(1, ValueEvent)[0].choices] * 2


def test_roles_go_through_the_template() -> None:
    rig = Rig()
    start(
        rig,
        1,
        Role(id=0, role="user", begin=True),
        text(1, "hi"),
        Role(id=2, role="user", begin=False),
        Role(id=3, role="assistant", begin=True),
        gen(4, n=4),
        Role(id=5, role="assistant", begin=False),
    )
    rig.run()
    (done,) = rig.of(1, DoneEvent)
    (value,) = values(rig, 1)
    assert done.text == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{value}<|im_end|>\n"


def test_stream_says_what_the_state_says() -> None:
    rig = Rig()
    start(rig, 1, text(0, "abc"), gen(1, n=5), text(2, "def"), Select(id=3, name="c", choices=("u", "v")), stream=True)
    rig.run()
    shown = "".join(event.text for event in rig.events[1] if isinstance(event, (TextEvent, DeltaEvent)))
    assert shown == rig.of(1, DoneEvent)[0].text


def test_mark_and_rewind_keep_the_prefix() -> None:
    rig = Rig()
    start(
        rig,
        1,
        text(0, "m" * 30),
        Mark(id=1, label="here"),
        text(2, "first"),
        gen(3, n=4),
        Rewind(id=4, label="here"),
        text(5, "second"),
        gen(6, n=4, name="y"),
    )
    rig.run()
    assert values(rig, 1) == [greedy("m" * 30 + "first", 4), greedy("m" * 30 + "second", 4)]
    assert rig.of(1, ValueEvent)[1].usage.cached_tokens == 30


def test_join_append_continues_with_the_childrens_text() -> None:
    rig = Rig()
    nodes = [text(0, "r"), Fork(id=1, children=(1, 2)), text(2, "A", 1), gen(3, 1, n=2, name="a"), text(4, "B", 2)]
    nodes += [gen(5, 2, n=2, name="b"), Join(id=6, children=(1, 2), mode="append"), gen(7, n=2, name="y")]
    start(rig, 1, *nodes)
    rig.run()
    got = {event.name: event.value for event in rig.of(1, ValueEvent)}
    assert got["y"] == greedy("rA" + got["a"] + "B" + got["b"], 2)
    (done,) = rig.of(1, DoneEvent)
    assert done.usage.joined_tokens == 2 * 3
    # Of "rA" + a + "B" + b the parent finds "rA" and the first token of a; the last token of a was never computed.
    last = rig.of(1, ValueEvent)[-1].usage
    assert (last.cached_tokens, last.prefill_tokens) == (3, 4)


@pytest.mark.parametrize("mode", ["gather", "append"])
def test_children_released_after_a_join_are_read_by_it(mode: str) -> None:
    rig = Rig()
    nodes = [text(0, "r"), Fork(id=1, children=(1, 2)), text(2, "A", 1), gen(3, 1, n=2, name="a"), text(4, "B", 2)]
    nodes += [Join(id=6, children=(1, 2), mode=mode), Release(id=7, branch=1), Release(id=8, branch=2)]
    nodes += [text(9, "z"), gen(10, n=2, name="y")]
    start(rig, 1, *nodes)
    rig.run()
    got = {event.name: event.value for event in rig.of(1, ValueEvent)}
    assert got["y"] == greedy("r" + ("A" + got["a"] + "B" if mode == "append" else "") + "z", 2)


def test_join_of_text_alone() -> None:
    rig = Rig()
    nodes = [text(0, "r"), Fork(id=1, children=(1,)), text(2, "A", 1), Join(id=3, children=(1,), mode="append")]
    start(rig, 1, *nodes, Release(id=4, branch=1), gen(5, n=2))
    rig.run()
    assert values(rig, 1) == [greedy("rA", 2)]


def test_what_never_comes_is_an_error() -> None:
    rig = Rig()
    start(rig, 1, text(0, "x"), Text(id=1, segments=(Var("nope"),)), gen(2))
    rig.run()
    assert "'nope'" in str(failure(rig, 1))
    assert rig.core.snapshot().num_programs == 0


def test_read_of_a_branch_whose_fork_is_queued() -> None:
    rig = Rig()
    replies: list[tuple[StateText | None, SglError | None]] = []
    start(rig, 1, text(0, "r"), gen(1, n=2), Fork(id=2, children=(1,)), text(3, "A", 1), finish=False)
    rig.core.read_state(1, 1, lambda state, error: replies.append((state, error)))
    rig.run()
    ((state, _),) = replies
    assert state is not None
    assert state.text == "r" + greedy("r", 2) + "A"


def test_waiting_states_give_their_pages_up() -> None:
    """Two states that fill the pool both go on: neither may hold what the other needs for ever."""
    rig = Rig(num_pages=120)
    for program in (1, 2):
        start(rig, program, text(0, f"{program}" * 50), gen(1, n=5), finish=False)
        rig.run()
    for program in (1, 2):
        rig.core.submit(program, Graph(nodes=(gen(2, n=60, name="y"),)), finish=True)
    rig.run(most_steps=1000)
    for program in (1, 2):
        x, y = values(rig, program)
        assert y == greedy(f"{program}" * 50 + x, 60)


def test_more_decoders_than_the_budget_take_turns() -> None:
    rig = Rig(chunked_prefill_size=4)
    for program in range(6):
        start(rig, program, text(0, f"{program}"), gen(1, n=20))
    for _ in range(16):
        rig.core.step()
    lengths = [len(chunk.page_table) for plan in rig.runner.plans[-3:] for chunk in plan.chunks]
    assert max(lengths) - min(lengths) <= 3, "nobody is left behind"


def test_stop_strings_wait_for_min_new_tokens() -> None:
    full = greedy("minimum", 12)
    rig = Rig()
    start(rig, 1, text(0, "minimum"), gen(1, n=12, min_new_tokens=8, stop=(full[2],)))
    rig.run()
    (event,) = rig.of(1, ValueEvent)
    assert len(event.token_ids) >= 8
    assert event.value.startswith(full[:7])


def test_too_long_in_the_queue() -> None:
    rig = Rig(max_running_requests=1)
    start(rig, 1, text(0, "first"), gen(1, n=50))
    start(rig, 2, text(0, "second"), gen(1))
    rig.core.step()
    rig.time = 10_000.0
    rig.run()
    assert values(rig, 1) == [greedy("first", 50)]
    assert failure(rig, 2).code == "queue_timeout"


def test_rewind_brings_the_ids_of_the_mark_back() -> None:
    rig = Rig()
    select = Select(id=3, name="c", choices=("yes", "no"))
    start(rig, 1, text(0, "ask "), Mark(id=1, label="m"), select, Rewind(id=4, label="m"), text(5, "on"), gen(6, n=3))
    rig.run()
    assert values(rig, 1)[1] == greedy("ask on", 3)


def test_fragments_equal_one_graph() -> None:
    nodes = (
        text(0, "one "),
        gen(1, name="a"),
        text(2, " two "),
        gen(3, name="b"),
        text(4, " three "),
        gen(5, name="c"),
    )
    whole, parts = Rig(), Rig()
    start(whole, 1, *nodes)
    whole.run()
    parts.core.open(1, ProgramOptions())
    for i in range(0, 6, 2):
        handles = parts.of(1, HandlesEvent)[-1].handles if i else ()
        parts.core.submit(1, Graph(nodes=nodes[i : i + 2], handles=handles), finish=i == 4)
        parts.run()
    assert values(whole, 1) == values(parts, 1)
    assert whole.of(1, DoneEvent)[0].text == parts.of(1, DoneEvent)[0].text
    assert whole.core.snapshot().prefill_tokens == parts.core.snapshot().prefill_tokens


def test_foreign_or_stale_handle_is_lost() -> None:
    rig = Rig()
    start(rig, 1, text(0, "x"), gen(1), finish=False)
    rig.run()
    (handle,) = rig.of(1, HandlesEvent)[-1].handles
    for wrong in (StateHandle("elsewhere", 0, handle.length), StateHandle(handle.epoch, 0, handle.length + 1)):
        other = Rig()
        start(other, 1, text(0, "x"), gen(1), finish=False)
        other.run()
        other.core.submit(1, Graph(nodes=(gen(2),), handles=(wrong,)))
        assert isinstance(failure(other, 1), StateLost)
        assert other.core.snapshot().pages_held == 0


def test_read_state_and_its_end() -> None:
    rig = Rig()
    replies: list[tuple[StateText | None, SglError | None]] = []
    start(rig, 1, text(0, "abc"), gen(1, n=3), finish=False)
    rig.core.read_state(1, 0, lambda state, error: replies.append((state, error)))
    assert not replies, "it waits for the generation before it"
    rig.run()
    state, error = replies.pop()
    assert error is None
    assert state is not None
    assert state.text == "abc" + greedy("abc", 3)
    rig.core.cancel(1)
    rig.core.read_state(1, 0, lambda state, error: replies.append((state, error)))
    assert isinstance(replies[0][1], StateLost)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancel_in_every_phase_frees_everything(steps: int) -> None:
    rig = Rig(chunked_prefill_size=20)
    children = (1, 2, 3)
    nodes = [text(0, "c" * 50), Fork(id=1, children=children)]
    nodes += [gen(2 + child, branch=child, n=40, name=f"v{child}") for child in children]
    start(rig, 1, *nodes)
    start(rig, 2, text(0, "neighbour"), gen(1, n=10))
    for _ in range(steps):
        rig.core.step()
    rig.core.cancel(1)
    assert failure(rig, 1).code == "cancelled"
    rig.run()
    assert values(rig, 2) == [greedy("neighbour", 10)]
    stats = rig.core.snapshot()
    assert (stats.pages_held, stats.num_programs) == (0, 0)


def test_row_with_nan_fails_alone_and_is_not_cached() -> None:
    rig = Rig()
    start(rig, 1, text(0, "good one"), gen(1, n=8))
    start(rig, 2, text(0, "bad one!"), gen(1, n=8))
    rig.core.step()
    bad = [chunk.sequence for chunk in rig.runner.plans[0].chunks][1]
    rig.runner.nan_sequences.add(bad)
    rig.run()
    assert values(rig, 1) == [greedy("good one", 8)]
    assert failure(rig, 2).code == "invalid_logits"
    assert rig.of(2, FailedEvent)[0].node == 1


def test_step_that_raises_ends_its_programs_only() -> None:
    state = {"raise": True}

    def hook(plan: object) -> None:
        if state.pop("raise", False):
            raise RuntimeError("kernel said no")

    rig = Rig(hook)
    start(rig, 1, text(0, "first"), gen(1))
    rig.run()
    assert failure(rig, 1).code == "internal_error"
    assert failure(rig, 1).message.startswith("a model step failed: RuntimeError, error id ")
    start(rig, 2, text(0, "first"), gen(1))
    rig.run()
    assert values(rig, 2) == [greedy("first", 6)]


def test_model_that_always_raises_ends_the_engine() -> None:
    def hook(plan: object) -> None:
        raise RuntimeError("gone")

    rig = Rig(hook)
    for program in range(2):
        start(rig, program, text(0, "x"), gen(1))
        rig.core.step()
    start(rig, 9, text(0, "x"), gen(1))
    with pytest.raises(SglError, match="a model step failed: RuntimeError"):
        rig.core.step()


def test_deadline_ends_a_program() -> None:
    rig = Rig()
    start(rig, 1, text(0, "slow"), gen(1, n=50), deadline_s=5.0)
    start(rig, 2, text(0, "calm"), gen(1, n=10))
    rig.core.step()
    rig.time = 6.0
    rig.run()
    assert isinstance(failure(rig, 1), DeadlineExceeded)
    assert values(rig, 2) == [greedy("calm", 10)]


def test_released_branch_is_not_reused() -> None:
    rig = Rig()
    nodes = (text(0, "x"), Fork(id=1, children=(1,)), Release(id=2, branch=1), text(3, "y", branch=1))
    start(rig, 1, *nodes)
    assert failure(rig, 1).code == "invalid_program"


def test_without_the_cache_programs_share_nothing_and_leave_nothing() -> None:
    rig = Rig(disable_radix_cache=True)
    for program in range(3):
        start(rig, program, text(0, "p" * 40), Fork(id=1, children=(1, 2)), gen(2, 1, n=2), gen(3, 2, n=2))
        rig.run()
    stats = rig.core.snapshot()
    # In each program the prefix is computed once, and its last token once more for the sibling's logits.
    assert stats.prefill_tokens == 3 * 41
    assert stats.pages_free == stats.pages_total


def test_random_programs_under_pressure() -> None:
    """Many small programs with forks on a small pool: every value is what the model says of its full text."""
    for seed in range(12):
        rng = random.Random(seed)
        rig = Rig(num_pages=150, chunked_prefill_size=rng.choice([5, 16, 64]), page_size=rng.choice([1, 1, 2]))
        wanted: dict[int, dict[str, str]] = {}
        for program in range(8):
            prefix = rng.choice(["shared " * 4, "other " * 3, ""]) + f"{program % 3}"
            children = tuple(range(1, 1 + rng.randint(1, 4)))
            nodes: list[object] = [text(0, prefix), gen(1, n=rng.randint(1, 6), name="root")]
            root = greedy(prefix, nodes[1].sampling.max_new_tokens)
            wanted[program] = {"root": root}
            nodes.append(Fork(id=2, children=children))
            for child in children:
                tail, n = rng.choice(["", "a", "bb", "a c"]), rng.randint(1, 12)
                if tail:
                    nodes.append(text(10 * child, tail, branch=child))
                nodes.append(gen(10 * child + 1, branch=child, n=n, name=f"v{child}"))
                wanted[program][f"v{child}"] = greedy(prefix + root + tail, n)
            start(rig, program, *nodes)
            if rng.random() < 0.5:
                rig.core.step()
        rig.run()
        for program, names in wanted.items():
            got = {event.name: event.value for event in rig.of(program, ValueEvent)}
            assert got == names, f"seed {seed}, program {program}"


def test_a_state_is_released_when_its_lease_runs_out_and_every_fragment_renews_it() -> None:
    rig = Rig(state_lease=10.0)
    start(rig, 1, text(0, "a" * 30), gen(1, n=4), finish=False)
    start(rig, 2, text(0, "b" * 30), gen(1, n=4), finish=False)
    rig.run()
    rig.time = 9.0
    rig.core.submit(1, Graph(nodes=(text(2, "c"), gen(3, n=2, name="y"))))
    rig.run()
    assert rig.core.next_deadline() == 10.0
    rig.time = 11.0
    rig.core.step()
    assert isinstance(failure(rig, 2), StateLost)
    assert not rig.of(1, FailedEvent)
    rig.time = 19.0
    replies: list[tuple[StateText | None, SglError | None]] = []
    rig.core.read_state(1, 0, lambda state, error: replies.append((state, error)))  # renews it, too
    rig.time = 28.0
    rig.core.step()
    assert replies[0][0] is not None
    assert not rig.of(1, FailedEvent)
    rig.time = 29.0
    rig.core.step()
    assert "lease of 10 s" in failure(rig, 1).message
    assert rig.core.snapshot().pages_held == 0


@pytest.mark.parametrize(("own", "ends_at"), [(2.0, 2.0), (60.0, 10.0)])
def test_a_program_may_rest_for_less_than_the_engine_allows(own: float, ends_at: float) -> None:
    rig = Rig(state_lease=10.0)
    rig.core.open(1, ProgramOptions(lease_s=own))
    rig.core.submit(1, Graph(nodes=(text(0, "a" * 30), gen(1, n=4))))
    rig.run()
    assert rig.core.next_deadline() == ends_at


def test_a_value_tells_when_its_first_token_came() -> None:
    rig = Rig(hook=lambda plan: rig.advance(1.0))
    start(rig, 1, text(0, "a" * 30), gen(1, n=4))
    rig.run()
    (value,) = rig.of(1, ValueEvent)
    assert 0 < value.first_s <= value.latency_s - 2.0


def test_a_running_generation_needs_no_lease() -> None:
    rig = Rig(state_lease=1.0, hook=lambda plan: rig.advance(5.0))
    start(rig, 1, text(0, "a" * 30), gen(1, n=4), finish=False)
    rig.run()
    assert values(rig, 1) == [greedy("a" * 30, 4)]


@pytest.mark.parametrize("last_ends_first", [False, True])
def test_a_wide_fork_costs_what_its_nodes_cost(monkeypatch: pytest.MonkeyPatch, last_ends_first: bool) -> None:
    """An end wakes those that wait for it, not all that wait: 500 branches once took minutes."""
    num_runs = 0
    execute = ProgramRun._execute

    def counted(self: ProgramRun, branch: Branch, node: object) -> object:
        nonlocal num_runs
        num_runs += 1
        return execute(self, branch, node)

    monkeypatch.setattr(ProgramRun, "_execute", counted)
    rig = Rig()
    children = tuple(range(1, 41))
    lengths = sorted((1 + child % 5 for child in children), reverse=last_ends_first)
    nodes = [text(0, "a"), Fork(id=1, branch=0, children=children)]
    for child, length in zip(children, lengths, strict=True):
        nodes.append(gen(len(nodes), child, n=length))
    nodes.append(Join(id=len(nodes), branch=0, children=children))
    nodes += [Release(id=len(nodes) + i, branch=child) for i, child in enumerate(children)]
    start(rig, 1, *nodes, gen(len(nodes), name="end"))
    rig.run()
    assert len(values(rig, 1)) == len(children) + 1
    # Each node once; each release once more, before the join; the join once more for each child that it waits for.
    assert num_runs <= len(nodes) + 1 + 2 * len(children)
