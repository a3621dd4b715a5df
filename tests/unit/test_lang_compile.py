"""Tracing and compiling: what a body appends, as a portable artefact that does the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import sgl
from sgl.errors import DeadlineExceeded, GenerationError, InternalError, InvalidParameter, InvalidProgram
from sgl.lang.compile import CompiledProgram
from sgl.lang.dataflow import needs, parents
from sgl.lang.graph import Fork, Gen, Select


def line_of(function: sgl.SglFunction, text: str) -> int:
    """Number of the first line of a program's source that contains `text`."""
    code = function.func.__code__
    lines = Path(code.co_filename).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if n > code.co_firstlineno and text in line)


@sgl.function
def judge(s, essay, aspects=("clarity", "style")):
    s += sgl.system("You grade essays.")
    s += sgl.user("Essay:\n" + essay)
    forks = s.fork(len(aspects))
    for f, aspect in zip(forks, aspects, strict=True):
        f += sgl.user(f"Judge the {aspect}.")
        f += sgl.assistant(sgl.gen("note", max_tokens=8, temperature=0))
    forks.join()
    s += sgl.user("\n".join(s["note"]) + f"\nGrade of {essay}:")
    with s.var_scope("verdict"):
        s += sgl.assistant(sgl.select("grade", choices=["A", "B"]))


def mock() -> sgl.MockBackend:
    return sgl.MockBackend({"note": ["clear", "dull"]}, choices={"grade": "B"})


def test_compiled_is_interpreted():
    interpreted = judge.run("On tea", backend=mock())
    program = judge.compile()
    run = program.run("On tea", backend=mock())
    assert run.text() == interpreted.text()
    for name in ("note", "grade", "verdict"):
        assert run[name] == interpreted[name]
    assert [meta["finish_reason"] for meta in run.get_meta_info("note")] == [{"type": "stop"}] * 2
    assert run.get_meta_info("grade")["probabilities"] == interpreted.probabilities("grade")
    assert program.parameters == ("essay",)
    assert list(run.keys()) == ["note", "grade", "verdict"]


def test_a_child_reads_its_own_value_and_not_that_of_its_parent(dummy_engine: sgl.Engine):
    @sgl.function
    def program(s):
        s += "A" + sgl.gen("x", max_tokens=3)
        child = s.fork(1)[0]
        child += "B" + sgl.gen("x", max_tokens=4)
        s += " then " + child["x"] + "."

    answers = ["parent", "child"]
    compiled = program.compile(sampling={"temperature": 0})
    for backend in (None, dummy_engine):
        run = compiled.run(backend=backend or sgl.MockBackend(list(answers)))
        expected = program.run(backend=backend or sgl.MockBackend(list(answers)), temperature=0)
        assert run.text() == expected.text()
    assert program.run(backend=sgl.MockBackend(answers)).text() == "Aparent then child."


def test_one_submission_and_no_body():
    backend = mock()
    judge.compile(essay="On tea").run(backend=backend)
    assert len(backend.graphs) == 1
    assert sum(isinstance(node, Fork) for node in backend.graphs[0].nodes) == 1


def test_round_trips_and_a_hash_that_knows_what_matters(tmp_path: Path):
    program = judge.compile()
    assert CompiledProgram.from_json(program.to_json()) == program
    assert CompiledProgram.from_msgpack(program.to_msgpack()) == program
    program.save(tmp_path / "judge.json")
    loaded = CompiledProgram.load(tmp_path / "judge.json")
    assert loaded.digest == program.digest == judge.compile().digest
    assert loaded.run("On tea", backend=mock())["verdict"] == "B"
    assert judge.compile(aspects=("clarity",)).digest != program.digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((b'"essay"', b'"assay"'), "is no parameter|is missing"),
        ((b'"protocol":1', b'"protocol":9'), "graph protocol|not a"),
        ((b'"name":"note"', b'"name":"nota"'), "nothing captures"),
        ((b"{", b"["), "not a compiled program"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(change: tuple[bytes, bytes], message: str):
    data = judge.compile().to_json()
    with pytest.raises(InvalidProgram, match=message):
        CompiledProgram.from_json(data.replace(*change, 1))


def test_a_file_without_a_protocol_is_refused():
    bare = judge.compile().to_json().replace(b'"protocol":1', b'"other":1')
    with pytest.raises(InvalidProgram, match="protocol is missing"):
        CompiledProgram.from_json(bare)


def test_arguments_are_checked():
    program = judge.compile()
    wrong = [({}, "missing"), ({"essay": "x", "topic": "y"}, "no parameter"), ({"essay": []}, "text")]
    for arguments, message in wrong:
        with pytest.raises(InvalidParameter, match=message):
            program.bind(**arguments)
    with pytest.raises(InvalidParameter, match="twice"):
        program.bind("x", essay="y")


@sgl.function
def branching(s, topic):
    s += "About " + topic + ": " + sgl.gen("a", max_tokens=3)
    if s["a"] == "x":
        s += "never"


@sgl.function
def measuring(s, topic):
    s += "Of length "
    s += str(len(topic))


@sgl.function
def trimming(s, topic):
    s += f"{topic} is it".upper().strip() + sgl.gen("a")


@sgl.function
def looking(s, topic):
    s += {"tea": "hot"}[topic]


@sgl.function
def dividing(s, topic):
    s += "one"
    s += str(1 / 0)


@pytest.mark.parametrize(
    ("program", "message", "line"),
    [
        (branching, "value of 'a' is not known.*a comparison", "if s["),
        (measuring, "argument 'topic' is not known.*len()", "len(topic)"),
        (trimming, "does not append the same|changed by a string function", "upper"),
        (looking, "a lookup needs it", "hot"),
        (dividing, "raised ZeroDivisionError", "1 / 0"),
    ],
)
def test_what_cannot_be_compiled_names_its_line(program: sgl.SglFunction, message: str, line: str):
    with pytest.raises(InvalidProgram, match=message) as caught:
        program.compile()
    assert caught.value.location is not None
    assert caught.value.location.line == line_of(program, line)


def test_tools_are_traced_up_to_the_values_that_they_need():
    def add(a: int, b: int) -> int:
        "Add two numbers."
        return a + b

    @sgl.function
    def program(s):
        s += sgl.user("1 + 2?")
        s.tools([add])

    with pytest.raises(InvalidProgram, match="'answer' is not known") as caught:
        program.trace()
    assert caught.value.location.function == "program"
    assert "answer" in str(program.trace(assume={"answer": "3"}))


def test_formats_of_what_is_not_known():
    @sgl.function
    def program(s, x):
        s += "%s and " % x + f"{x} or {x}"  # noqa: UP031 - it is what is tested
        s += f"{x:>10}"

    with pytest.raises(InvalidProgram, match="format '>10'"):
        program.trace()
    assert program.trace("tea").graph.nodes[0].segments[0].text == "tea and tea or tea       tea"


def test_19_nested_programs_and_forks_have_the_right_edges():
    @sgl.function
    def ask(s, what):
        s += f"On {what}: " + sgl.gen("view", max_tokens=2)
        return s["view"]

    @sgl.function
    def program(s, topic):
        s += "Talk about " + topic + ". "
        forks = s.fork(3)
        for fork in forks:
            fork.call(ask, topic)
        forks.join()
        s += "; ".join(s["view"]) + " So: " + sgl.gen("end", max_tokens=2)

    trace = program.trace()
    assert {child: parent for child, (parent, _) in parents(trace.graph).items()} == {1: 0, 2: 0, 3: 0}
    views = [at for at, node in enumerate(trace.graph.nodes) if isinstance(node, Gen) and node.name == "view"]
    end = next(at for at, node in enumerate(trace.graph.nodes) if isinstance(node, Gen) and node.name == "end")
    assert set(views) <= needs(trace.graph)[end - 1]  # the text before the end reads them
    answers = {"view": ["good", "bad", "so so"], "end": "well"}
    interpreted = program.run("tea", backend=sgl.MockBackend(answers))
    compiled = program.compile().run("tea", backend=sgl.MockBackend(answers))
    assert (compiled.text(), compiled["view"]) == (interpreted.text(), interpreted["view"])


def test_assumed_values_lead_the_trace_through_control_flow():
    trace = branching.trace("tea", assume={"a": "x"})
    assert "never" in str(trace)
    with pytest.raises(InvalidProgram, match="which chooses between"):
        judge.trace("tea", assume={"grade": "C"})


def test_independent_generations_and_lazy_selects():
    @sgl.function
    def card(s, text):
        s += text + "\nName: " + sgl.gen("name", max_tokens=4)
        s += "\nJob: " + sgl.gen("job", max_tokens=4)
        s += "\nSex: " + sgl.select("sex", choices=["f", "m"])

    answers = {"name": "Ada", "job": "analyst"}
    plain = card.compile().run("Ada, analyst", backend=sgl.MockBackend(answers))
    program = card.compile(independent=["name", "job"], scores=False)
    backend = sgl.MockBackend(answers)
    run = program.run("Ada, analyst", backend=backend)
    assert (run.text(), run["name"], run["job"]) == (plain.text(), "Ada", "analyst")
    assert dict(backend.prompts)["job"] == "Ada, analyst\nName: \nJob: "
    nodes = backend.graphs[0].nodes
    assert {node.branch for node in nodes if isinstance(node, Gen)} == {1, 2}
    assert [node.all_scores for node in nodes if isinstance(node, Select)] == [False]


def test_errors_of_a_run_and_of_a_row():
    backend = sgl.MockBackend({"note": ["1", "2", "3"]})
    program = judge.compile()
    results = program.run_batch([["a"], {"essay": "b"}], backend=backend, on_error="return")
    assert results[0]["note"] == ["1", "2"]
    assert isinstance(results[1], GenerationError)
    assert results[1].location.line == line_of(judge, "sgl.gen(")
    with pytest.raises(GenerationError):
        program.run_batch([["a"], ["b"]], backend=sgl.MockBackend({"note": ["1", "2"]}))


def test_typed_values_and_reasoning_of_a_compiled_run():
    @dataclasses.dataclass
    class Person:
        name: str

    @sgl.function
    def program(s):
        s += "n: " + sgl.gen("n", type=int) + " p: " + sgl.gen("p", type=Person) + " d: " + sgl.gen("d", dtype=int)
        s += " <think>" + sgl.separate_reasoning(sgl.gen("x"), model_type="qwen3")
        s += sgl.gen("many", type=int, n=2) + sgl.select("c", ["a", "b"])

    answers = ["3", '{"name": "Ada"}', "7", "hidden</think>4", "1", "2"]
    expected = program.run(backend=sgl.MockBackend(answers))
    run = program.compile().run(backend=sgl.MockBackend(answers))
    assert run.text() == expected.text()
    for name in ("n", "d", "x", "x_reasoning_content", "many", "c"):
        assert run[name] == expected[name]
    assert (run["x_reasoning_content"], run["n"], run["many"]) == ("hidden", 3, [1, 2])
    assert run["p"] == {"name": "Ada"}, "what JSON holds: the class is the body's"
    assert (run["d"], run.value("d")) == ("7", 7)
    assert run.probabilities("c") == {"a": 1.0, "b": 0.0}
    assert CompiledProgram.from_json(program.compile().to_json()) == program.compile()


def test_seeds_of_a_compiled_run():
    @sgl.function
    def program(s, q):
        s += q + sgl.gen("x") + sgl.gen("y", seed=5)

    mock = sgl.MockBackend()
    for seed in (1, 1, 2):
        program.compile().run("a", backend=mock, seed=seed)
    program.compile().run_batch([["a"], ["b"]], backend=mock, seed=1)
    seeds = [[node.sampling.seed for node in graph.nodes if isinstance(node, Gen)] for graph in mock.graphs]
    assert seeds[0] == seeds[1] != seeds[2]
    assert all(own == 5 for _, own in seeds)
    assert len({first for first, _ in seeds}) == 4


class Silent:
    """A backend that takes programs and says nothing."""

    def open(self, sink, options):
        self.cancelled = 0
        return self

    def submit(self, graph, *, finish=False):
        """Never done."""

    def read_state(self, branch):
        raise NotImplementedError

    def cancel(self):
        self.cancelled += 1

    def flush_cache(self):
        return False

    def server_info(self):
        return {}

    def shutdown(self):
        """Nothing."""


def test_a_compiled_run_ends_without_its_backend(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sgl.lang.compiled_run.DEADLINE_GRACE_S", 0.05)
    program = judge.compile(essay="On tea")
    silent = Silent()
    with pytest.raises(DeadlineExceeded):
        program.run(backend=silent, deadline_s=0.01)
    assert silent.cancelled == 1
    with pytest.raises(DeadlineExceeded):
        program.run_batch([[], []], backend=silent, deadline_s=0.01)

    def refuse(graph, *, finish=False):
        raise OSError("no")

    silent.submit = refuse
    with pytest.raises(InternalError, match="OSError: no"):
        program.run(backend=silent)


def test_the_first_row_that_fails_ends_a_compiled_batch():
    @sgl.function
    def program(s, q):
        s += q + sgl.gen("x")

    def answer(prompt: str, node: Gen) -> str:
        if prompt == "bad":
            raise GenerationError("no")
        return "y"

    with pytest.raises(GenerationError, match="no"):
        program.compile().run_batch([["a"], ["bad"], ["c"]], backend=sgl.MockBackend(answer))


def test_names_for_the_compiler_are_checked_and_typed_values_are_not_known():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a", type=int)

    for wrong in ({"independent": "a"}, {"independent": ["a", "zz"]}, {"scores": "a"}):
        with pytest.raises(InvalidParameter):
            program.compile(**wrong)

    @sgl.function
    def reading(s):
        s += sgl.gen("n", type=int)
        return s["n"]

    with pytest.raises(InvalidProgram, match="not known while the program is traced"):
        reading.compile()
