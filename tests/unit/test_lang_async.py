"""`async def` programs: awaited reads, tasks on branches, streams, cancellation; on the mock, counted."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import pytest

import sgl
from sgl.errors import DeadlineExceeded, GenerationError, InvalidProgram
from sgl.lang.graph import ProgramOptions


@sgl.function
async def skeleton(s: sgl.AsyncProgramState, topic: str) -> list[str]:
    s += f"Points on {topic}: " + sgl.gen("points", stop=".")
    points = (await s["points"]).split(",")
    forks = s.fork(len(points))

    async def detail(fork: sgl.AsyncProgramState, point: str) -> str:
        fork += f" {point}: " + sgl.gen("detail")
        return str(await fork["detail"])

    details = await asyncio.gather(*(detail(fork, point) for fork, point in zip(forks, points, strict=True)))
    forks.join()
    s += "; in short: " + sgl.gen("short")
    return list(details)


def by_name(prompt, node):
    return {"points": "a,b,c.", "short": "abc"}.get(node.name, prompt[-3].upper())


def test_reads_are_awaited_and_tasks_share_a_submission():
    mock = sgl.MockBackend(by_name)
    state = skeleton.run("tea", backend=mock)
    assert state.ret_value == ["A", "B", "C"]
    assert (state["detail"], state["short"]) == (["A", "B", "C"], "abc")
    assert len(mock.graphs) == 3, "a read, the reads of three tasks together, and the end"


def test_inside_a_loop_run_is_refused_and_run_async_is_awaited():
    async def main():
        mock = sgl.MockBackend(by_name)
        with pytest.raises(InvalidProgram, match="run_async"):
            skeleton.run("tea", backend=mock)
        states = await asyncio.gather(*(skeleton.run_async(topic, backend=mock) for topic in ("tea", "rice")))
        return [state.text() for state in states]

    texts = asyncio.run(main())
    assert texts == [f"Points on {topic}: a,b,c; in short: abc" for topic in ("tea", "rice")]


def test_a_thousand_runs_need_no_threads():
    seen = []

    @sgl.function
    async def program(s, i):
        s += f"{i}:" + sgl.gen("x")
        await s["x"]
        seen.append(threading.active_count())

    async def main():
        mock = sgl.MockBackend(lambda prompt, node: "v")
        before = threading.active_count()
        await asyncio.gather(*(program.run_async(i, backend=mock) for i in range(1000)))
        return before

    before = asyncio.run(main())
    assert max(seen) <= before + 1, "the mock's own"


def test_def_bodies_run_beside_the_loop():
    @sgl.function
    def program(s):
        s += sgl.gen("x")
        return s["x"], threading.current_thread() is threading.main_thread()

    state = asyncio.run(program.run_async(backend=sgl.MockBackend(["v"])))
    assert state.ret_value == ("v", False)


def test_streams_of_a_task_and_of_a_thread():
    @sgl.function
    async def task(s):
        s += "A: " + sgl.gen("a")
        s += "!" if await s["a"] else ""

    @sgl.function
    def thread(s):
        s += "A: " + sgl.gen("a")
        s += "!" if s["a"] else ""

    async def main(program):
        state = program.start_async(backend=sgl.MockBackend({"a": "one two"}))
        whole = [piece async for piece in state.text_iter()]
        pairs = [pair async for pair in state.text_iter("a", return_meta_data=True)]
        kinds = [event.kind async for event in state.events()]
        return whole, pairs, kinds, await state.text(), await state["a"]

    for program in (task, thread):
        whole, pairs, kinds, text, value = asyncio.run(main(program))
        assert "".join(whole) == text == "A: one two!"
        assert (value, "".join(piece for piece, _ in pairs)) == ("one two", "one two")
        assert sum(len(meta["output_ids"]) for _, meta in pairs) == pairs[-1][1]["completion_tokens"] == 2
        assert kinds == ["text", "delta", "delta", "value", "text", "done"]
    state = task.run(backend=sgl.MockBackend(["one two"]), stream=True)  # from synchronous code: on a thread
    assert list(state.text_iter()) == ["A: ", "one", " two", "!"]


def test_errors_are_raised_where_they_are_awaited_with_their_line():
    @sgl.function
    async def program(s):
        s += sgl.gen("bad")
        for _ in range(2):
            with pytest.raises(GenerationError) as caught:
                await s["bad"]
            assert caught.value.location.function == "program"
        assert isinstance(await s.error(), GenerationError)

    with pytest.raises(GenerationError, match="no luck"):
        program.run(backend=sgl.MockBackend(errors={"bad": GenerationError("no luck")}))

    async def beside():
        state = program.start_async(backend=sgl.MockBackend(errors={"bad": GenerationError("no luck")}))
        with pytest.raises(GenerationError, match="no luck"):
            await state["bad"]
        with pytest.raises(GenerationError, match="no luck"):
            async for _ in state.text_iter():
                pass

    asyncio.run(beside())


def test_a_body_that_raises_as_a_task_raises_at_the_read():
    @sgl.function
    async def program(s):
        s += sgl.gen("a")
        await s["a"]
        raise ZeroDivisionError("mine")

    async def main():
        state = program.start_async(backend=sgl.MockBackend(["v"]))
        with pytest.raises(ZeroDivisionError, match="mine"):
            await state.text()

    asyncio.run(main())


def test_a_stream_that_is_let_go_is_cancelled():
    @sgl.function
    async def program(s):
        s += "A: " + sgl.gen("a")

    async def main():
        mock = sgl.MockBackend(delay_s=60)
        pieces = program.start_async(backend=mock).text_iter()
        assert await anext(pieces) == "A: ", "the iterator holds its program"
        await pieces.aclose()
        del pieces
        while mock.server_info()["num_open"]:
            gc.collect()
            await asyncio.sleep(0.001)

    asyncio.run(main())


def test_cancelling_the_task_cancels_the_program():
    mock = sgl.MockBackend(delay_s=60)

    @sgl.function
    async def program(s):
        s += sgl.gen("x")
        await s["x"]

    @sgl.function
    def blocking(s):
        s += sgl.gen("x")
        s["x"]

    async def main(program):
        task = asyncio.create_task(program.run_async(backend=mock))
        while not mock.prompts:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while mock.server_info()["num_open"]:
            await asyncio.sleep(0.001)

    for each in (program, blocking):
        mock.prompts.clear()
        asyncio.run(main(each))


def test_a_deadline_ends_a_wait_that_the_backend_would_not_end():
    class Forgetful(sgl.MockBackend):
        def open(self, sink, options):
            return super().open(sink, ProgramOptions(name=options.name))

    @sgl.function
    async def program(s):
        s += sgl.gen("x")
        await s["x"]

    @sgl.function
    def blocking(s):
        s += sgl.gen("x")
        s["x"]

    for each in (program, blocking):
        for kind in (sgl.MockBackend, Forgetful):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("sgl.lang.interpreter.DEADLINE_GRACE_S", 0.1 if kind is Forgetful else 60.0)
                with pytest.raises(DeadlineExceeded, match="longer"):
                    each.run(backend=kind(delay_s=60), deadline_s=0.05)


def test_subprograms_and_messages():
    @sgl.function
    async def ask(s, question):
        s += sgl.user(question) + sgl.assistant(sgl.gen("answer"))
        return await s["answer"]

    @sgl.function
    def plain(s): ...

    @sgl.function
    async def program(s):
        with pytest.raises(InvalidProgram, match="async"):
            plain.run(backend=mock).call(ask, "x")
        return await s.call(ask, "Why?"), await s.messages(), "answer" in s, "other" in s

    mock = sgl.MockBackend(["Because."])
    answer, messages, *known = program.run(backend=mock).ret_value
    assert (answer, known) == ("Because.", [True, False])
    assert messages == [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


def test_rows_are_tasks():
    @sgl.function
    async def row(s, i):
        s += f"{i}:" + sgl.gen("x")
        if await s["x"] == "boom":
            raise ValueError(f"row {i}")
        return threading.get_ident()

    def answer(prompt, node):
        return "boom" if prompt == "3:" else prompt

    mock = sgl.MockBackend(answer)
    states = row.run_batch([(i,) for i in range(3)], backend=mock)
    assert [state["x"] for state in states] == ["0:", "1:", "2:"]
    assert len({state.ret_value for state in states}) == 1, "one thread for all bodies"

    async def main():
        results = [result async for result in row.batch([(i,) for i in range(5)], backend=mock)]
        return results, threading.get_ident()

    results, here = asyncio.run(main())
    assert sorted(result.index for result in results) == list(range(5))
    assert {result.state.ret_value for result in results if result.index != 3} == {here}
    failed = next(result for result in results if result.index == 3)
    with pytest.raises(ValueError, match="row 3"):
        failed.state  # noqa: B018


def test_leaving_an_async_batch_cancels_its_rows():
    @sgl.function
    async def row(s, i):
        s += f"{i}:" + sgl.gen("slow" if i else "fast")
        await s["slow" if i else "fast"]

    mock = sgl.MockBackend(lambda prompt, node: "v" if node.name == "fast" else gate.wait() and "v")
    gate = threading.Event()

    async def main():
        rows = aiter(row.batch([(i,) for i in range(4)], backend=mock))
        result = await anext(rows)
        gate.set()
        await rows.aclose()
        return result.index

    assert asyncio.run(main()) == 0
    while mock.server_info()["num_open"]:  # closed by the mock's thread
        time.sleep(0.001)


@pytest.mark.parametrize(
    "slip",
    [
        lambda s: s["a"] == "yes",
        lambda s: bool(s["a"]),
        lambda s: f"{s['a']}",
        lambda s: "x" + s["a"],
        lambda s: s.system(s["a"]),
        lambda s: s.set_var("b", s["a"]),
        lambda s: s["a"][0],
        lambda s: s["a"],  # returned
    ],
)
def test_reads_that_nobody_awaits_are_errors_with_their_line(slip: Any):
    @sgl.function
    async def program(s):
        s += sgl.gen("a")
        return slip(s)

    with pytest.raises(InvalidProgram, match="await s\\['a'\\]"):
        program.run(backend=sgl.MockBackend(["yes"]))


def test_tasks_take_reads_and_a_started_run_gives_what_its_body_returned():
    @sgl.function
    async def program(s):
        s += sgl.gen("a") + sgl.gen("b")
        task = asyncio.create_task(s["a"])
        return [*await asyncio.gather(s["a"], s["b"]), await task]

    async def main() -> list[str]:
        state = program.start_async(backend=sgl.MockBackend(["1", "2"]))
        return await state.ret_value

    assert asyncio.run(main()) == ["1", "2", "1"]


@sgl.function
def noted(s):
    s += "note " + sgl.gen("note")
    return s["note"]


def test_what_does_not_wait_may_be_awaited_all_the_same():
    @sgl.function
    async def program(s):
        async with s.user():
            s += "hi"
        async with s.var_scope("said"):
            s += "so "
        async with s.copy() as other:
            other += sgl.gen("aside")
        forks = s.fork(2)
        forks += sgl.gen("part")
        await forks.join()
        return await s["said"], await s["aside"], await s["part"], await s.call(noted)

    state = program.run(backend=sgl.MockBackend({"aside": "a", "part": "p", "note": "n"}))
    assert state.ret_value == ("so ", ["a"], ["p", "p"], "n")

    @sgl.function
    def quiet(s):
        s += "q"

    @sgl.function
    async def forgets(s):
        return s.call(quiet)

    with pytest.raises(InvalidProgram, match=r"s.call\(...\) has to be awaited"):
        forgets.run(backend=sgl.MockBackend())


def test_a_body_that_is_not_streamed_reads_its_texts_in_one_piece():
    @sgl.function
    async def program(s):
        s += "x" + sgl.gen("a")
        return [[piece async for piece in s.text_iter(name)] for name in ("a", None)]

    for stream in (False, True):
        state = program.run(backend=sgl.MockBackend(["b c"]), stream=stream)
        assert ["".join(pieces) for pieces in state.ret_value] == ["b c", "xb c"]


def test_the_last_piece_has_a_list_of_log_probabilities_as_the_others_do():
    @sgl.function
    def program(s):
        s += sgl.gen("a", return_logprob=True)

    async def read() -> list[tuple[str, int]]:
        state = program.run(backend=sgl.MockBackend(["p q r"]), stream=True)
        pairs = state.text_async_iter("a", return_meta_data=True)
        return [(piece, len(meta["output_token_logprobs"])) async for piece, meta in pairs]

    assert asyncio.run(read()) == [("p", 1), (" q", 1), (" r", 1), ("", 0)]
