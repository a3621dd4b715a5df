"""Batches of programs on the mock: order, rows that fail beside others, and many live states.

Numbers in names are those of the test programs in the language's reference.
"""

from __future__ import annotations

import threading

import pytest

import sgl
from sgl.errors import InvalidParameter, Unsupported
from sgl.lang.graph import Fork, Select, Text


def nodes_of(mock: sgl.MockBackend) -> list:
    return [node for graph in mock.graphs for node in graph.nodes]


@sgl.function
def row(s, i, label="x"):
    s += f"{label}{i}:" + sgl.gen("v")
    if s["v"] == "boom":
        raise ValueError(f"row {i}")


def boom_at(*rows: int) -> sgl.MockBackend:
    return sgl.MockBackend(lambda prompt, node: "boom" if int(prompt[1:-1]) in rows else prompt[1:-1])


def test_batch_order_forms_and_empty():
    mock = boom_at()
    states = row.run_batch([{"i": 0}, (1, "y"), [2]], backend=mock, num_threads=2)
    assert [state["v"] for state in states] == ["0", "1", "2"]
    assert row.run_batch([], backend=mock) == []
    assert list(row.run_batch([], backend=mock, generator_style=True)) == []
    seen = [state["v"] for state in row.run_batch([(i,) for i in range(450)], backend=mock, generator_style=True)]
    assert seen == [str(i) for i in range(450)]


def test_batch_wrong_rows_run_nothing():
    mock = boom_at()
    for wrong in ([(1, 2, 3)], [{"j": 1}], ["text"], [{"i": 1}, {}]):
        with pytest.raises(InvalidParameter, match="row"):
            row.run_batch(wrong, backend=mock)
    assert mock.graphs == []


def test_45_one_row_fails_others_finish():
    seen = []
    results = row.run_batch(
        [(i,) for i in range(100)],
        backend=boom_at(57),
        on_error="return",
        on_result=lambda index, result: seen.append(index),
    )
    assert sorted(seen) == list(range(100))
    assert isinstance(results[57], ValueError)
    assert [result["v"] for i, result in enumerate(results) if i != 57] == [str(i) for i in range(100) if i != 57]


@pytest.mark.parametrize("generator_style", [False, True])
def test_batch_raises_the_first_error(generator_style):
    with pytest.raises(ValueError, match="row 3"):
        list(
            row.run_batch([(i,) for i in range(9)], backend=boom_at(3), num_threads=1, generator_style=generator_style)
        )


def test_an_interrupt_in_a_row_ends_the_batch():
    @sgl.function
    def interrupted(s, i):
        s += sgl.gen("v")
        if i == 1:
            raise KeyboardInterrupt
        s["v"]

    with pytest.raises(KeyboardInterrupt):
        interrupted.run_batch([(i,) for i in range(4)], backend=sgl.MockBackend(delay_s=60), on_error="return")


def test_batch_lets_the_others_end_when_asked():
    mock = boom_at(0)
    with pytest.raises(ValueError, match="row 0"):
        row.run_batch([(i,) for i in range(5)], backend=mock, stop_on_error=False)
    assert len(mock.prompts) == 5


def test_iterator_lets_the_others_end_when_asked():
    mock = boom_at(1, 3)
    seen = {}
    results = row.run_batch(
        [(i,) for i in range(5)],
        backend=mock,
        generator_style=True,
        stop_on_error=False,
        on_result=seen.__setitem__,
    )
    assert next(results)["v"] == "0"
    with pytest.raises(ValueError, match="row 1"):
        next(results)
    assert list(seen) == [0, 1, 2, 3, 4]
    assert [isinstance(result, ValueError) for result in seen.values()] == [False, True, False, True, False]
    assert list(results) == []


def test_batch_arguments_are_checked_like_those_of_a_run():
    mock = boom_at()
    for call in (lambda **k: row.run(0, **k), lambda **k: row.run_batch([(0,)], **k)):
        with pytest.raises(Unsupported):
            call(backend=mock, return_text_in_logprobs=True)
    for kwargs in ({"temperature": -1}, {"stop": 5}, {"stop_token_ids": "x"}):
        for call in (lambda **k: row.run(0, **k), lambda **k: row.run_batch([(0,)], **k)):
            with pytest.raises(InvalidParameter):
                call(backend=mock, **kwargs)
    assert mock.graphs == []
    row.run_batch([(0,)], backend=mock, stop="s", stop_token_ids=7, top_k=3, presence_penalty=0.5, logprob_start_len=-1)
    sampling = nodes_of(mock)[1].sampling
    assert (sampling.stop, sampling.stop_token_ids, sampling.top_k, sampling.presence_penalty) == (("s",), (7,), 3, 0.5)


def test_46_many_live_states_without_a_thread_each():
    @sgl.function
    def program(s):
        s += "prefix"
        forks = s.fork(2000)
        forks += sgl.gen("x")
        before = threading.active_count()
        values = [fork["x"] for fork in forks]
        assert threading.active_count() <= before + 1
        return len(values)

    mock = sgl.MockBackend(lambda prompt, node: "v")
    state = program.run(backend=mock)
    assert state.ret_value == 2000
    assert len(mock.graphs) == 2
    assert sum(isinstance(node, Fork) for node in nodes_of(mock)) == 1
    assert len([node for node in nodes_of(mock) if isinstance(node, (Text, Select))]) == 1
