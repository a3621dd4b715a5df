"""Encoders against transformers on random weights: vectors by each pooling, labels, pairs; how inputs are put together;
and one whole engine."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.encoders import TEXTS, WORDS, ask, core_of, encoded, make, opened, sentence_files, texts, write

from sgl.errors import Cancelled, EmptyPrompt, InvalidLogits, InvalidParameter, PromptTooLong, SglError, Unsupported
from sgl.lang.graph import FailedEvent, Graph, ProgramOptions
from sgl.limits import DEFAULT_LIMITS
from sgl.runtime.config import EngineConfig
from sgl.runtime.encoder_queue import EncoderQueue, QueuedCall
from sgl.runtime.encoder_start import build_encoder
from sgl.runtime.encoding import texts_call
from sgl.runtime.engine import Engine
from sgl.runtime.messages import CancelEncode, Encode, EncodeReply, EncoderInput, Events, GetStats, StatsReply, Submit
from sgl.runtime.text.wordpiece import EncoderText, EncoderTokenizer

# --- against transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["pooling_mode_mean_tokens", "pooling_mode_cls_token", "pooling_mode_lasttoken"])
def test_vectors_are_those_of_transformers(tmp_path: Path, mode: str) -> None:
    model = make()
    write(tmp_path, model, sentence_files(mode, normalize=mode != "pooling_mode_cls_token"))
    given = encoded(tmp_path, TEXTS)
    with torch.inference_mode():
        states = model(**given).last_hidden_state
    mask = given["attention_mask"]
    expected = {
        "pooling_mode_mean_tokens": (states * mask[:, :, None]).sum(1) / mask.sum(1)[:, None],
        "pooling_mode_cls_token": states[:, 0],
        "pooling_mode_lasttoken": states[torch.arange(len(TEXTS)), mask.sum(1) - 1],
    }[mode]
    if mode != "pooling_mode_cls_token":
        expected = torch.nn.functional.normalize(expected, dim=-1)
    core = core_of(tmp_path)
    together = ask(core, "embed", texts(*TEXTS))
    assert np.abs(together - expected.numpy()).max() < 1e-5
    assert expected.std() > 0.05
    alone = np.concatenate([ask(core, "embed", texts(text)) for text in TEXTS])
    assert np.abs(alone - together).max() < 1e-5


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"num_labels": 3}, torch.nn.Softmax(dim=-1)),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.nn.Sigmoid()),
        ({"num_labels": 1}, torch.nn.Sigmoid()),
        ({"num_labels": 2, "problem_type": "regression"}, torch.nn.Identity()),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            torch.nn.Identity(),
        ),
    ],
)
def test_labels_and_pairs_are_those_of_transformers(tmp_path: Path, fields: dict[str, Any], activation: Any) -> None:
    model = make("ForSequenceClassification", **fields)
    write(tmp_path, model)
    core = core_of(tmp_path)
    pairs = list(zip(TEXTS, TEXTS[::-1], strict=True))
    with torch.inference_mode():
        single = activation(model(**encoded(tmp_path, TEXTS)).logits).numpy()
        double = activation(model(**encoded(tmp_path, TEXTS, TEXTS[::-1])).logits).numpy()
    assert np.abs(ask(core, "classify", texts(*TEXTS)) - single).max() < 1e-5
    both = [EncoderInput(text=a, pair=b) for a, b in pairs]
    assert np.abs(ask(core, "classify", both) - double).max() < 1e-5
    if fields["num_labels"] == 1:
        assert np.abs(ask(core, "score", both) - double).max() < 1e-5
    else:
        with pytest.raises(Unsupported, match="pairs are scored by a model with one label"):
            ask(core, "score", both)


def test_tokenizer_json_and_special_tokens_in_a_text(tmp_path: Path) -> None:
    """Both forms give the ids of transformers' own tokenizer, but that a user's `[SEP]` is no separator."""
    from transformers import BertTokenizer

    write(tmp_path, make())
    old = EncoderTokenizer.from_folder(tmp_path)
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    new = EncoderTokenizer.from_folder(tmp_path)
    for text in TEXTS:
        for pair in (None, "a red mat"):
            theirs = encoded(tmp_path, text) if pair is None else encoded(tmp_path, text, pair)
            for tokenizer in (old, new):
                ours = tokenizer.encode(text, pair, 32, truncate=False)
                assert list(ours.ids) == theirs["input_ids"][0].tolist()
                assert list(ours.type_ids) == theirs["token_type_ids"][0].tolist()
    for tokenizer in (old, new):
        assert WORDS.index("[SEP]") not in tokenizer.encode("a [SEP] cat", None, 32, truncate=False).ids[1:-1]


# --- one call beside another ----------------------------------------------------------------------------------------


def test_steps_are_bounded_and_put_like_lengths_together(tmp_path: Path) -> None:
    core = core_of(write(tmp_path, make()), chunked_prefill_size=40)
    long, short = "the cat sat on the mat , the dog ran .", "a dog"
    for request, task_inputs in enumerate(([long, short] * 4, [short] * 3)):
        core.handle(Encode(request=request, task="embed", inputs=tuple(texts(*task_inputs))))
    core.take_replies()
    steps = 0
    while core.has_work:
        before = core.stats.num_tokens
        core.step()
        assert core.stats.num_tokens - before <= 40
        steps += 1
    assert sorted(reply.request for reply in core.take_replies() if isinstance(reply, EncodeReply)) == [0, 1]
    core.handle(GetStats(request=9))
    (stats,) = core.take_replies()
    assert isinstance(stats, StatsReply)
    assert (stats.stats["num_inputs"], stats.stats["num_steps"], stats.stats["num_padded"]) == (11, steps, 0)


def test_calls_take_turns(tmp_path: Path) -> None:
    """A short call does not wait for all of a long one, whatever its lengths."""
    core = core_of(write(tmp_path, make()), chunked_prefill_size=16)
    core.handle(Encode(request=0, task="embed", inputs=tuple(texts(*["a dog"] * 40))))
    core.handle(Encode(request=1, task="embed", inputs=tuple(texts("the cat sat on the mat , the dog"))))
    core.take_replies()
    for _ in range(2):
        core.step()
    (reply,) = core.take_replies()
    assert isinstance(reply, EncodeReply)
    assert reply.request == 1
    core.handle(GetStats(request=9))
    (stats,) = core.take_replies()
    assert isinstance(stats, StatsReply)
    assert stats.stats["num_waiting"] == 36


def queue_of(lengths: Sequence[Sequence[int]]) -> EncoderQueue:
    """A queue of calls with inputs of these lengths."""
    queue = EncoderQueue()
    for request, own in enumerate(lengths):
        queue.add(QueuedCall(request, [EncoderText((0,) * length, (0,) * length) for length in own]))
    return queue


@pytest.mark.parametrize("seed", range(5))
def test_what_waits_is_taken_once_the_nearest_in_length_first(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [[draw.randint(1, 30) for _ in range(draw.randint(1, 40))] for _ in range(12)]
    queue = queue_of(lengths)
    waiting = [list(own) for own in lengths]
    turns = list(range(len(lengths)))
    while queue:
        step = queue.take(60)
        turn, first = step[0][0].request, lengths[step[0][0].request][step[0][1]]
        assert turn == turns[0]
        taken = [lengths[call.request][index] for call, index in step]
        assert len(taken) == 1 or max(taken) * len(taken) <= 60
        for call, index in step:
            waiting[call.request].remove(lengths[call.request][index])
        turns = [each for each in [*turns[1:], turn] if waiting[each]]
        left = [length for own in waiting for length in own]
        assert all(abs(length - first) >= abs(max(taken, key=lambda one: abs(one - first)) - first) for length in left)
        assert len(queue) == len(left)
    assert not any(waiting)


def test_a_step_costs_what_it_takes() -> None:
    """However many inputs wait: twice as many are twice the work. Counted in calls of functions."""

    def work(num_calls: int) -> int:
        queue = queue_of([[1 + (7 * index + 3 * call) % 50 for index in range(25)] for call in range(num_calls)])
        calls = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            while queue:
                queue.take(200)
        finally:
            sys.setprofile(None)
        return calls

    once, twice = work(40), work(80)
    assert once > 1000
    assert twice < 2.2 * once


def test_a_call_that_is_cancelled(tmp_path: Path) -> None:
    """Before it is tokenized, while it waits, and between two of its steps: it is told so, and nothing of it is
    computed any more; the others never notice."""
    folder = write(tmp_path, make())
    held = HeldExecutor()
    core = build_encoder(
        EngineConfig(model_path=str(folder), device="cpu", chunked_prefill_size=16), opened(folder), executor=held
    )[0]
    for request in range(4):
        core.handle(Encode(request=request, task="embed", inputs=tuple(texts(*["a dog"] * 8))))
    core.handle(CancelEncode(request=0))
    core.handle(CancelEncode(request=0))
    core.handle(CancelEncode(request=99))
    held.run()
    ended = {reply.request: reply for reply in core.take_replies() if isinstance(reply, EncodeReply)}
    core.handle(CancelEncode(request=1))
    core.step()
    core.handle(CancelEncode(request=2))  # after four of its texts
    core.handle(GetStats(request=9))
    while core.has_work:
        core.step()
    core.handle(CancelEncode(request=3))  # which is answered
    replies = core.take_replies()
    (stats,) = [reply for reply in replies if isinstance(reply, StatsReply)]
    assert (stats.stats["num_inputs"], stats.stats["num_waiting"]) == (4, 8)
    assert core.stats.num_inputs == 12
    for reply in (*ended.values(), *replies):
        if isinstance(reply, EncodeReply):
            assert (reply.error.code if reply.error else None) == (None if reply.request == 3 else Cancelled.code)
            ended[reply.request] = reply
    assert sorted(ended) == [0, 1, 2, 3]
    assert len(ended[3].rows) == 8


class HeldExecutor(ThreadPoolExecutor):
    """Runs what it was given when it is told to, in this thread."""

    def __init__(self) -> None:
        super().__init__(1)
        self._held: list[tuple[Future[Any], Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._held.append((future, partial(fn, *args, **kwargs)))
        return future

    def run(self) -> None:
        for future, job in self._held:
            future.set_result(job())


def test_a_text_of_too_many_bytes(tmp_path: Path) -> None:
    """Refused before it is tokenized; who is computed beside it does not notice."""
    core = core_of(write(tmp_path, make()))
    good = ask(core, "embed", texts("a cat"))
    most = DEFAULT_LIMITS.max_prompt_bytes
    wrong = {1: EncoderInput(text="a" * (most + 1)), 2: EncoderInput(text="a", pair="\u00e9" * (most // 2 + 1))}
    for request, given in wrong.items():
        core.handle(Encode(request=request, task="embed", inputs=(given,), truncate=True))
    core.handle(Encode(request=3, task="embed", inputs=tuple(texts("a cat"))))
    while core.has_work:
        core.step()
    replies = {reply.request: reply for reply in core.take_replies() if isinstance(reply, EncodeReply)}
    assert np.array_equal(np.frombuffer(replies[3].rows[0], dtype=np.float32), good[0])
    for request in wrong:
        error = SglError.from_info(replies[request].error)  # type: ignore[arg-type]
        assert isinstance(error, InvalidParameter)
        assert f"at most {most} are allowed" in error.message


def test_a_bad_call_harms_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(write(tmp_path, make()))
    good = ask(core, "embed", texts("a cat"))
    calls: dict[int, Sequence[EncoderInput]] = {
        1: texts("a dog", "the cat " * 40),
        2: texts("a cat"),
        3: texts(""),
        4: [EncoderInput(token_ids=(2, 99, 3))],
        5: texts("a \ud800"),
    }
    for request, inputs in calls.items():
        core.handle(Encode(request=request, task="embed", inputs=tuple(inputs)))
    while core.has_work:
        core.step()
    replies = {reply.request: reply for reply in core.take_replies() if isinstance(reply, EncodeReply)}
    assert np.array_equal(np.frombuffer(replies[2].rows[0], dtype=np.float32), good[0])
    for request, kind, said in (
        (1, PromptTooLong, "input 1: the input has 82 tokens; the model takes 32"),
        (3, EmptyPrompt, "empty"),
        (4, InvalidParameter, "token id 99 is not in the vocabulary of"),
        (5, InvalidParameter, "lone surrogate"),
    ):
        error = SglError.from_info(replies[request].error)  # type: ignore[arg-type]
        assert type(error) is kind
        assert said in error.message

    # Numbers that are not finite, and a step that raises: whoever is in it.
    def poisoned(ids: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        if 13 in ids:
            raise RuntimeError("a kernel broke")
        rows = model(ids, *rest)
        rows[(ids == WORDS.index("dog")).any(dim=1)] = torch.nan
        return rows

    model = core._model
    monkeypatch.setattr(core, "_model", poisoned)
    core.handle(Encode(request=1, task="embed", inputs=tuple(texts("a dog", "a cat"))))
    core.handle(Encode(request=2, task="embed", inputs=tuple(texts("the cat"))))
    core.step()
    first, second = core.take_replies()
    assert isinstance(first, EncodeReply)
    assert first.error is not None
    assert first.error.code == InvalidLogits.code
    assert isinstance(second, EncodeReply)
    assert (second.request, second.error) == (2, None)
    core.handle(Encode(request=3, task="embed", inputs=(EncoderInput(token_ids=(2, 13, 3)),)))
    core.step()
    (third,) = core.take_replies()
    assert isinstance(third, EncodeReply)
    assert third.error is not None
    assert third.error.code == "internal_error"
    assert ask(core, "embed", texts("a cat")).shape == (1, 48)


def test_what_is_too_long_is_cut_when_asked(tmp_path: Path) -> None:
    core = core_of(write(tmp_path, make("ForSequenceClassification", num_labels=1)), context_length=9)
    cut, whole = (
        ask(core, "score", [EncoderInput(text=a, pair=b)], truncate=True)
        for a, b in (("the cat sat on the mat", "a red dog ran"), ("the cat sat", "a red dog"))
    )
    assert np.array_equal(cut, whole)
    assert np.array_equal(
        ask(core, "score", [EncoderInput(text="a", pair="the cat sat on the mat")], truncate=True),
        ask(core, "score", [EncoderInput(text="a", pair="the cat sat on the")], truncate=False),
    )


# --- a whole engine -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Any, Path]]:
    folder = tmp_path_factory.mktemp("cross")
    model = make("ForSequenceClassification", num_labels=1, id2label={0: "fits"}, label2id={"fits": 0})
    write(folder, model)
    with Engine(model_path=str(folder), device="cpu") as engine:
        yield engine, model, folder


def test_an_engine_scores_ranks_and_classifies(cross_encoder: tuple[Engine, Any, Path]) -> None:
    engine, model, folder = cross_encoder
    documents = ["a dog", "the cat sat", "the red mat ."]
    with torch.inference_mode():
        expected = model(**encoded(folder, ["a cat"] * 3, documents)).logits[:, 0].sigmoid().tolist()
    scored = engine.score_pairs([("a cat", document) for document in documents])
    assert [out["score"] for out in scored] == pytest.approx(expected, abs=1e-5)
    assert scored[0]["meta_info"]["prompt_tokens"] == 7
    assert engine.score_pairs(("a cat", "a dog"))["score"] == scored[0]["score"]
    ranked = engine.rerank("a cat", documents, top_n=2)
    assert [out["index"] for out in ranked] == sorted(range(3), key=lambda index: -expected[index])[:2]
    assert ranked[0]["document"] == documents[ranked[0]["index"]]
    assert set(engine.classify("a cat")["probs"]) == {"fits"}
    assert engine.server_info()["kind"] == "encoder"
    assert engine.health().ready
    assert engine.stats()["num_calls"] >= 3


def test_a_task_that_is_cancelled_cancels_its_call(cross_encoder: tuple[Engine, Any, Path]) -> None:
    engine, _, _ = cross_encoder
    before = engine.stats()["num_inputs"]

    async def begin_and_go() -> None:
        tasks = [
            asyncio.create_task(engine.async_classify(["the cat sat on the mat"] * 20_000)),
            asyncio.create_task(engine.async_score_pairs([("a cat", "a dog")] * 20_000)),
            asyncio.create_task(engine.async_rerank("a cat", ["a dog"] * 20_000)),
        ]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True)
        )

    asyncio.run(begin_and_go())
    assert asyncio.run(engine.async_rerank("a cat", ["a dog", "the cat"], top_n=1))[0]["index"] in (0, 1)
    stats = engine.stats()
    assert stats["num_waiting"] == 0
    assert stats["num_inputs"] - before < 20_000


def test_an_encoder_generates_nothing(cross_encoder: tuple[Engine, Any, Path]) -> None:
    engine, _, _ = cross_encoder
    for ask_for in (
        lambda: engine.generate("a cat"),
        lambda: engine.pin("a cat"),
        lambda: engine.encode("a cat"),
        lambda: engine.override(max_queue=3, why="no"),
    ):
        with pytest.raises(Unsupported):
            ask_for()
    core = core_of(cross_encoder[2])
    core.handle(Submit(program=4, graph=Graph(nodes=()), open=ProgramOptions(name="p")))
    (events,) = core.take_replies()
    assert isinstance(events, Events)
    ((program, event),) = events.events
    assert program == 4
    assert isinstance(event, FailedEvent)
    assert event.error.code == Unsupported.code


def test_calls_of_a_wrong_form(cross_encoder: tuple[Engine, Any, Path]) -> None:
    engine, _, _ = cross_encoder
    for ask_for, said in (
        (lambda: engine.classify(), "exactly one of prompt and input_ids"),
        (lambda: engine.classify(["a", 3]), "prompt has 3"),  # type: ignore[list-item]
        (lambda: engine.classify(input_ids=["x"]), "input_ids"),  # type: ignore[list-item]
        (lambda: engine.score_pairs([("a", "b", "c")]), "expected two texts"),
        (lambda: engine.score_pairs("ab"), "expected a list"),
        (lambda: engine.rerank("a", ["b"], top_n=0), "top_n is 0"),
        (lambda: engine.classify(["a"] * 100_000), "in one call"),
    ):
        with pytest.raises(InvalidParameter, match=said):
            ask_for()
    with pytest.raises(EmptyPrompt):
        engine.classify([])
    assert engine.classify(input_ids=[2, 6, 7, 3])["label"] == "fits"


def test_one_text_and_many(tmp_path: Path) -> None:
    core = core_of(write(tmp_path, make(), sentence_files()))

    class Client:
        info: Mapping[str, Any] = {}

        def ask(self, make_message: Any) -> Future[Any]:
            answer: Future[Any] = Future()
            core.handle(make_message(1))
            while core.has_work:
                core.step()
            (reply,) = core.take_replies()
            answer.set_result(reply)
            return answer

    def embedded(given: Any, **options: Any) -> Any:
        return texts_call(Client(), "embed", given, options.get("input_ids"), truncate=False).result()

    one, many = embedded("a cat"), embedded(["a cat", "the dog ran"])
    assert one["embedding"] == pytest.approx(many[0]["embedding"], abs=1e-6)
    assert (len(one["embedding"]), one["meta_info"]["prompt_tokens"], len(many)) == (48, 4, 2)
    ids = [WORDS.index(word) for word in ("[CLS]", "a", "cat", "[SEP]")]
    assert embedded(None, input_ids=ids)["embedding"] == one["embedding"]
    assert len(embedded(None, input_ids=[ids])) == 1


def test_a_decoder_gives_no_embeddings(dummy_engine: Engine) -> None:
    with pytest.raises(Unsupported, match="generates text"):
        dummy_engine.encode("a cat")
