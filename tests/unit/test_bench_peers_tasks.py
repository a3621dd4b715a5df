"""Programs against other libraries: the tasks in both forms, the protocol of a peer's process, the report and its page.

Libraries are not installed here: a driver over our own engine stands for one. It asks for the same as the programs do,
so that both forms have to give the same answers.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import sgl
from sgl.bench import program_peers
from sgl.bench.harness import PairPlan
from sgl.bench.load import Snapshot
from sgl.bench.pairs import Interval, Ratio, Result
from sgl.bench.plain import PlainBackend
from sgl.bench.program_drivers import LIBRARIES, TransformersDriver, run_task, serve
from sgl.bench.program_page import peer_page
from sgl.bench.program_peers import PeerReport, TaskComparison, compare_peer
from sgl.bench.program_process import LibraryPeer, Peer
from sgl.bench.program_requests import ABILITIES, Driver, Request, cut, grouped
from sgl.bench.program_servers import llamacpp_body
from sgl.bench.program_tasks import TASKS
from sgl.bench.program_wall import timed_waves
from sgl.bench.program_workloads import NEEDS, PeerBackend
from sgl.bench.workloads import WORKLOADS
from sgl.errors import BenchError, ConfigError
from sgl.runtime.engine import Engine
from sgl.runtime.text.tokenizer import Tokenizer


class EngineDriver(Driver):
    """Our engine, called as a library is: no state between calls."""

    can: ClassVar[frozenset[str]] = frozenset(ABILITIES)
    settings: ClassVar[dict[str, str]] = {"engine": "ours"}

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def answer(self, requests: Sequence[Request]) -> list[str]:
        @sgl.function
        def one(s: Any, row: Request) -> None:
            if row.options:
                s += row.prompt + sgl.select("x", row.options)
            else:
                limits = {"max_tokens": row.max_tokens, "stop": list(row.stop), "temperature": 0}
                s += row.prompt + sgl.gen("x", json_schema=row.schema or None, **limits)

        return [str(state["x"]) for state in one.run_batch([[row] for row in requests], backend=self._engine)]


@pytest.mark.parametrize("name", TASKS)
def test_both_forms_of_a_task_ask_for_the_same(name: str, smollm2: Engine) -> None:
    task = TASKS[name]
    answers = task.by_programs(smollm2)
    assert answers == task.by_calls(EngineDriver(smollm2))
    assert answers == task.by_programs(PlainBackend(smollm2))


class Quiet:
    """Counters of cores on which nobody else does anything."""

    cores = 1

    def __init__(self) -> None:
        self.now = 0.0

    def read(self, sides: Collection[int] = ()) -> Snapshot:
        self.now += 1.0
        return Snapshot(at_s=self.now, busy_s=self.now, own_s=self.now, sides_s=tuple(0.0 for _ in sides))


def test_the_report(smollm2: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared(Engine):
        """The engine of the suite, which a comparison must not end."""

        def __new__(cls, **_: Any) -> Any:
            return _Held(smollm2)

    class _Held:
        def __init__(self, engine: Engine) -> None:
            self.engine = engine

        def __enter__(self) -> Engine:
            return self.engine

        def __exit__(self, *_: object) -> None:
            return

    monkeypatch.setattr(program_peers, "Engine", Shared)
    plan = PairPlan(pairs=2, attempts=2, quiet_s=0.0, turn_s=1e-6)
    report = compare_peer("plain", ["classify"], plan=plan, fields={}, sampler=Quiet())
    [task] = report.tasks
    assert (task.equal, task.num_answers) == (8, 8)
    assert task.cost is not None
    assert task.cost.forwards > 0
    assert task.result is not None
    assert task.result.clean == 2
    assert report.measured == 1
    assert report.geometric_mean == pytest.approx(task.result.ratio.median)
    page = peer_page(report)
    assert page.count("<circle") == 2
    assert "<script" not in page
    assert "&quot;peer&quot;: &quot;plain&quot;" in page


def test_unknown_names_are_told() -> None:
    with pytest.raises(ConfigError, match=r"no peer 'vlm'"):
        compare_peer("vlm", plan=PairPlan(), fields={})
    with pytest.raises(ConfigError, match=r"no task 'sums'.*classify"):
        compare_peer("plain", ["sums"], plan=PairPlan(), fields={})


def test_what_libraries_can_is_known() -> None:
    assert set(program_peers.PEERS) == {"plain", "transformers", "outlines", "guidance", "llamacpp", "vllm"}
    for library in LIBRARIES.values():
        assert library.packages
        assert isinstance(library.driver, type)
        assert issubclass(library.driver, Driver)
        assert library.driver.can <= set(ABILITIES)
    assert all(set(task.needs) <= set(ABILITIES) for task in TASKS.values())


def test_a_peer_that_fails_quotes_itself(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"peer outlines ended.*outlines"):
        LibraryPeer("outlines", [0], str(tmp_path), "float32", sys.executable)


def test_an_error_of_a_library_is_an_answer() -> None:
    class Broken(EngineDriver):
        def answer(self, requests: Sequence[Request]) -> list[str]:
            raise RuntimeError("no memory left")

    assert run_task(Broken(None), "classify") == {"error": "RuntimeError: no memory left"}
    assert _served(Broken(None), [{"id": 7, "request": {"prompt": "x"}}]) == [
        {"id": 7, "error": "RuntimeError: no memory left"}
    ]


class Echo(Driver):
    """Answers each request with its prompt's end, in batches that it keeps."""

    can: ClassVar[frozenset[str]] = frozenset(ABILITIES)
    settings: ClassVar[dict[str, str]] = {}
    variants: ClassVar[tuple[str, ...]] = ("slow", "fast")

    def __init__(self) -> None:
        self.batches: list[list[Request]] = []
        self.variant = "slow"

    def use(self, variant: str) -> None:
        self.variant = variant

    def answer(self, requests: Sequence[Request]) -> list[str]:
        self.batches.append(list(requests))
        return [row.options[-1] if row.options else f" {row.prompt[-3:].strip()}." for row in requests]


def _served(driver: Driver, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    for message in (*messages, None):
        lines.put(message)
    said: list[dict[str, Any]] = []
    serve(driver, lines, said.append)
    return said


def test_requests_that_arrive_together_are_one_batch() -> None:
    driver = Echo()
    asked = [{"id": number, "request": {"prompt": f"a{number}"}} for number in range(3)]
    said = _served(driver, [*asked, {"use": "fast"}, {"id": 3, "request": {"prompt": "b", "options": ["x", "y"]}}])
    assert said == [
        *({"id": number, "text": f" a{number}."} for number in range(3)),
        {"use": "fast"},
        {"id": 3, "text": "y"},
    ]
    assert [len(batch) for batch in driver.batches] == [3, 1]
    assert driver.variant == "fast"


def test_what_a_workload_needs_is_what_its_requests_need(smollm2: Engine) -> None:
    assert set(NEEDS) == set(WORKLOADS)
    renderer = smollm2.renderer()
    for name, workload in WORKLOADS.items():
        driver = Echo()

        def ask(request: Request, done: Callable[[Any], None], driver: Echo = driver) -> None:
            backend.later.submit(lambda: driver.start([request], lambda _, text: done(text)))

        with PeerBackend(ask, renderer) as backend:
            timed_waves(workload.build(0, 1e-5, "words"), PlainBackend(backend, options_apart=False))
        found = {need for batch in driver.batches for request in batch for need in request.needs}
        assert found == set(NEEDS[name]), name


def test_roles_are_rendered_for_a_peer(smollm2: Engine) -> None:
    @sgl.function
    def talk(s: Any) -> None:
        s += sgl.system("Be brief.") + sgl.user("Hi")
        s += sgl.assistant(sgl.gen("x", max_tokens=3, stop="!", temperature=0))

    driver = Echo()

    def ask(request: Request, done: Callable[[Any], None]) -> None:
        backend.later.submit(lambda: driver.start([request], lambda _, text: done(text)))

    with PeerBackend(ask, smollm2.renderer()) as backend:
        assert talk.run(backend=PlainBackend(backend))["x"] == " nt."
    [[request]] = driver.batches
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert request == Request(prompt=turns, max_tokens=3, stop=("!",))


def test_the_fastest_way_of_a_peer_is_measured(smollm2: Engine) -> None:
    class Other(Peer):
        """Runs in two ways."""

        settings: ClassVar[dict[str, str]] = {}
        versions: ClassVar[dict[str, str | None]] = {}
        variants = ("slow", "fast")

        def __init__(self) -> None:
            self.used: list[str] = []

        def use(self, variant: str) -> None:
            self.used.append(variant)

        def run(self, task: Any) -> tuple[float, list[str]]:
            return {"slow": 0.3, "fast": 0.2}[self.used[-1]], [" waste"] * 8

    def compare(most_s: float) -> TaskComparison:
        plan = PairPlan(pairs=1, attempts=1, quiet_s=0.0, turn_s=1e-6)
        compare = program_peers._Compare(smollm2, Other(), Quiet(), plan, most_s, lambda what: None)
        return compare(program_peers.task_job(TASKS["classify"]))

    measured = compare(1.0)
    assert measured.variant == "fast"
    assert measured.tried == {"slow": 0.3, "fast": 0.2}
    assert measured.result is not None
    assert measured.result.ratio is not None
    assert measured.result.ratio.b_s == 0.2
    left_out = compare(0.1)
    assert left_out.result is None
    assert left_out.why == "a run takes the peer 0 s, more than 0.1"


def test_a_completion_for_llama_cpp() -> None:
    body = llamacpp_body(Request(prompt="x", max_tokens=4, stop=("\n",), options=(" a", ' "b"')))
    assert body["grammar"] == 'root ::= " a" | " \\"b\\""'
    assert (body["stop"], body["top_k"], body["cache_prompt"]) == (["\n"], 1, True)
    assert llamacpp_body(Request(prompt="x", regex="a/b"))["grammar"] == "%llguidance {}\nstart: /a\\/b/"
    assert llamacpp_body(Request(prompt="x", temperature=0.5, seed=3, exact=True))["seed"] == 3


def test_requests_are_grouped_and_texts_cut() -> None:
    rows = [Request(prompt="a"), Request(prompt="b", exact=True), Request(prompt="c")]
    assert grouped(rows, lambda row: row.exact) == [[0, 2], [1]]
    assert (cut("one. two\n", ("\n", ".")), cut("one", (".",))) == ("one", "one")


def test_a_page_without_a_figure() -> None:
    result = Result(metric="wall", clean=0, attempted=3, needed=5, ratio=None, dirty={"foreign load": 3})
    measured = Ratio(1.0, 2.0, 2.0, Interval(1.9, 2.1, 0.9))
    tasks = (
        TaskComparison(task="extract", about="JSON", why="the peer has no JSON schemas"),
        TaskComparison(task="judge", about="a <b>", result=result),
        TaskComparison(task="tree", about="", result=Result(**{**_fields(result), "ratio": measured})),
    )
    report = PeerReport(
        peer="transformers",
        peer_settings={},
        peer_versions={"transformers": "5"},
        model="m",
        dtype="float32",
        quantization="none",
        peer_dtype="float32",
        mixed=False,
        engine={},
        provenance=program_peers.provenance([0], {}, ()),
        tasks=tasks,
        geometric_mean=2.0,
        measured=1,
    )
    page = peer_page(report)
    assert "the peer has no JSON schemas" in page
    assert "not measured: 0 clean pairs of 3, 5 needed" in page
    assert "a &lt;b&gt;" in page
    assert "transformers 5" in page


def _fields(result: Result) -> dict[str, Any]:
    return {name: getattr(result, name) for name in result.__struct_fields__}


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Iterator[Path]:
    """A random model as transformers writes one, with bytes as its tokens."""
    transformers = pytest.importorskip("transformers")
    import torch

    threads = torch.get_num_threads()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=512, eos_token_id=[258], bos_token_id=256, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(Tokenizer.toy().save().backend)
    yield tmp_path
    torch.set_grad_enabled(True)
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_what_transformers_keeps_changes_no_answer(tiny_folder: Path) -> None:
    driver = TransformersDriver(str(tiny_folder), "float32", 1)
    asked = [
        Request(prompt="To be sure", max_tokens=6, exact=True),
        *(Request(prompt=prompt, options=("x", "yz", "a b c")) for prompt in ("One two", "One two three", "One")),
        Request(prompt="Or", max_tokens=3, exact=True),
    ]
    together = driver.answer(asked)
    for request, text in zip(asked, together, strict=True):
        driver.forget()
        assert driver.answer([request]) == [text]
        assert not request.options or text in request.options
