"""The engine core of an encoder: texts in, vectors or label scores out, no pages and no steps of a sequence.

Each step computes as many of the inputs that wait (`encoder_queue.py`) as fit into `max_batch_tokens`. The worker
drives it as it drives the core of a decoder: `handle` a message, `step`, send what both give. All calls come from one
thread; tokenizing runs on the executor.

A call is answered whole. What is wrong with one of its inputs is said before any of them is computed; a step that
raises fails the calls that were in it, and nobody else. A call that is cancelled is let go of between two inputs that
are tokenized, and between two steps.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING

import msgspec

from sgl.errors import Cancelled, InternalError, InvalidLogits, SglError, StateLost, Unsupported
from sgl.lang.graph import FailedEvent
from sgl.runtime.encoder_queue import EncoderQueue, QueuedCall
from sgl.runtime.encoding import generates_nothing
from sgl.runtime.failures import internal_error
from sgl.runtime.messages import (
    Cancel,
    CancelEncode,
    Encode,
    EncodeReply,
    EncoderInput,
    Events,
    FlushCache,
    FlushReply,
    GetStats,
    Override,
    OverrideReply,
    Pin,
    Ping,
    PinReply,
    Pong,
    ProfileReply,
    ReadState,
    Refused,
    StartProfile,
    StateReply,
    StatsReply,
    StopProfile,
    Submit,
    ToClient,
    ToWorker,
    Unpin,
)
from sgl.runtime.models.encoder_config import EncoderConfig
from sgl.runtime.stats import Stats
from sgl.runtime.text.wordpiece import EncoderText, EncoderTokenizer

if TYPE_CHECKING:
    from sgl.runtime.models.bert import Bert

_MAX_FAILED_STEPS = 3


class EncoderStats(msgspec.Struct, kw_only=True):
    """What an encoder has done: `num_padded` of its `num_tokens` only filled texts up to the longest of their step."""

    num_calls: int = 0
    num_inputs: int = 0
    num_tokens: int = 0
    num_padded: int = 0
    num_steps: int = 0
    num_waiting: int = 0


class EncoderCore:
    """Computes `Encode` messages.

    Args:
        config, tokenizer, model: the encoder.
        max_batch_tokens: computed at once, those that only fill up included.
        executor: runs tokenizing; `None` runs it at once.
        wake: called from an executor's thread when texts are tokenized.
    """

    def __init__(
        self,
        config: EncoderConfig,
        tokenizer: EncoderTokenizer,
        model: Bert,
        *,
        max_batch_tokens: int,
        device: str = "cpu",
        executor: Executor | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.epoch = uuid.uuid4().hex
        self.stats = EncoderStats()
        self._config = config
        self._tokenizer = tokenizer
        self._model = model
        self._max_batch_tokens = max_batch_tokens
        self._device = device
        self._executor = executor
        self._wake = wake
        self._waiting = EncoderQueue()
        self._calls: dict[int, QueuedCall | None] = {}
        """Those that are not answered, by their request; `None` until their texts are tokenized."""
        self._tokenized: deque[tuple[Encode, Future[list[EncoderText]]]] = deque()
        self._replies: list[ToClient] = []
        self._failed_steps = 0
        self._moved_at = time.monotonic()

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute something."""
        return len(self._waiting) > 0

    def handle(self, message: ToWorker | Refused) -> None:
        """Begin what a message asks for, or say why not; answers come from `take_replies`."""
        match message:
            case Encode():
                self._begin(message)
            case GetStats():
                self.stats.num_waiting = len(self._waiting)
                # The counters of decoders are there, too, and stay 0: whoever watches engines asks all of them alike.
                stats = {**Stats().as_dict(), **msgspec.to_builtins(self.stats), "overrides": []}
                self._replies.append(StatsReply(request=message.request, stats=stats))
            case Ping():
                stalled_s = time.monotonic() - self._moved_at if self.has_work else 0.0
                self._replies.append(Pong(request=message.request, stalled_s=stalled_s))
            case FlushCache():
                self._replies.append(FlushReply(request=message.request, pages=0))
            case Pin():
                error = self._generates_nothing().to_info()
                self._replies.append(PinReply(request=message.request, num_tokens=0, error=error))
            case StartProfile() | StopProfile():
                error = Unsupported("an encoder's steps are not profiled").to_info()
                self._replies.append(ProfileReply(request=message.request, error=error))
            case Override():
                error = Unsupported("an encoder's options cannot be changed while it runs").to_info()
                self._replies.append(OverrideReply(request=message.request, error=error))
            case ReadState():
                info = StateLost("an encoder has no states").to_info()
                self._replies.append(
                    StateReply(program=message.program, request=message.request, state=None, error=info)
                )
            case Submit() | Refused():
                failed = FailedEvent(error=self._generates_nothing().to_info())
                self._replies.append(Events(((message.program, failed),)))
            case CancelEncode():
                self._cancel(message.request)
            case Cancel() | Unpin():
                pass  # programs were told that they ended, and nothing is pinned
            case _:
                raise InternalError(f"an encoder was sent {type(message).__name__}")

    def take_replies(self) -> list[ToClient]:
        """What is to be sent, in order."""
        while self._tokenized:
            self._admit(*self._tokenized.popleft())
        replies, self._replies = self._replies, []
        return replies

    def step(self) -> bool:
        """Compute some of the inputs that wait; False when there are none."""
        if not self.has_work:
            return False
        batch = self._waiting.take(self._max_batch_tokens)
        try:
            rows = self._compute([call.texts[index] for call, index in batch])
        except Exception as error:  # noqa: BLE001 - whatever a model or kernel raises must not end the other calls
            self._fail_step(batch, error)
            return True
        self._failed_steps, self._moved_at = 0, time.monotonic()
        failed: set[QueuedCall] = set()
        for (call, index), row in zip(batch, rows, strict=True):
            if call in failed:
                continue
            if row is None:
                failed.add(call)
                self._fail(call, InvalidLogits(f"input {index} gave numbers that are not finite"))
                continue
            call.rows[index] = row
            if len(call.rows) == len(call.texts):
                ordered = tuple(call.rows[index] for index in range(len(call.texts)))
                counts = tuple(len(text.ids) for text in call.texts)
                self._answer(EncodeReply(request=call.request, rows=ordered, num_tokens=counts))
        return True

    # --- calls --------------------------------------------------------------------------------------------------------

    def _begin(self, message: Encode) -> None:
        if (error := self._wrong_task(message)) is not None:
            self._replies.append(EncodeReply(request=message.request, error=error.to_info()))
            return
        self._calls[message.request] = None
        if self._executor is None:
            future: Future[list[EncoderText]] = Future()
            try:
                future.set_result(self._tokenize(message))
            except Exception as error:  # noqa: BLE001 - as on an executor
                future.set_exception(error)
            self._admit(message, future)
            return

        def finished(future: Future[list[EncoderText]]) -> None:
            self._tokenized.append((message, future))
            self._wake()

        self._executor.submit(self._tokenize, message).add_done_callback(finished)

    def _tokenize(self, message: Encode) -> list[EncoderText]:
        """All of a call's inputs, as long as it is not cancelled. Raises what is wrong with the first that is wrong,
        with its number."""
        texts = []
        for index, given in enumerate(message.inputs):
            if message.request not in self._calls:
                break
            try:
                texts.append(self._tokens_of(given, truncate=message.truncate))
            except SglError as error:
                where = f"input {index}: " if len(message.inputs) > 1 else ""
                raise type(error)(f"{where}{error.message}", hint=error.hint, **error.details) from None
        return texts

    def _tokens_of(self, given: EncoderInput, *, truncate: bool) -> EncoderText:
        if given.token_ids is not None:
            return self._tokenizer.of_ids(given.token_ids, self._config.max_len, truncate=truncate)
        text, pair = self._config.prompt + given.text, given.pair
        if self._config.lower_case:
            text, pair = text.lower(), pair if pair is None else pair.lower()
        return self._tokenizer.encode(text, pair, self._config.max_len, truncate=truncate)

    def _admit(self, message: Encode, future: Future[list[EncoderText]]) -> None:
        if message.request not in self._calls:
            return
        try:
            texts = future.result()
        except SglError as error:
            self._answer(EncodeReply(request=message.request, error=error.to_info()))
            return
        except Exception as error:  # noqa: BLE001 - a bug in one call's job must not end the others
            failure = internal_error("tokenizing failed", error)
            self._answer(EncodeReply(request=message.request, error=failure.to_info()))
            return
        if not self.has_work:
            self._moved_at = time.monotonic()
        self.stats.num_calls += 1
        call = self._calls[message.request] = QueuedCall(message.request, texts)
        self._waiting.add(call)

    def _cancel(self, request: int) -> None:
        """Let go of a call, unless it is answered."""
        if request not in self._calls:
            return
        if (call := self._calls[request]) is not None:
            self._waiting.drop(call)
        self._answer(EncodeReply(request=request, error=Cancelled("the call was cancelled").to_info()))

    def _answer(self, reply: EncodeReply) -> None:
        """The end of a call."""
        del self._calls[reply.request]
        self._replies.append(reply)

    def _wrong_task(self, message: Encode) -> Unsupported | None:
        labels, name = self._config.num_labels, self._config.architecture
        if message.task == "embed" and labels:
            return Unsupported(f"{name} tells {labels} labels apart: it gives no embeddings", hint="call classify")
        if message.task == "classify" and not labels:
            return Unsupported(f"{name} gives embeddings: it has no labels", hint="call encode")
        if message.task == "score" and labels != 1:
            has = f"{labels} labels" if labels else "no head"
            return Unsupported(
                f"{name} has {has}: pairs are scored by a model with one label", hint="use a cross-encoder"
            )
        return None

    def _generates_nothing(self) -> Unsupported:
        return generates_nothing(self._config.architecture)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _compute(self, texts: Sequence[EncoderText]) -> list[bytes | None]:
        """A row of float32 for each text; `None` where it is not finite."""
        import torch

        longest = max(len(text.ids) for text in texts)
        self.stats.num_steps += 1
        self.stats.num_inputs += len(texts)
        self.stats.num_tokens += len(texts) * longest
        self.stats.num_padded += sum(longest - len(text.ids) for text in texts)

        def filled(rows: Sequence[Sequence[int]]) -> torch.Tensor:
            return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self._device)

        with torch.inference_mode():
            result = self._model(
                filled([text.ids for text in texts]),
                filled([text.type_ids for text in texts]),
                torch.tensor([len(text.ids) for text in texts], device=self._device),
            )
            if self._config.activation == "sigmoid":
                result = result.sigmoid()
            elif self._config.activation == "softmax":
                result = result.softmax(dim=-1)
        finite = result.isfinite().all(dim=-1).tolist()
        rows = result.cpu().numpy()
        return [row.tobytes() if is_finite else None for row, is_finite in zip(rows, finite, strict=True)]

    def _fail_step(self, batch: Sequence[tuple[QueuedCall, int]], error: Exception) -> None:
        failure = internal_error("a step of the encoder failed", error)
        for call in dict.fromkeys(call for call, _ in batch):
            self._fail(call, failure)
        self._failed_steps += 1
        if self._failed_steps >= _MAX_FAILED_STEPS:
            raise failure

    def _fail(self, call: QueuedCall, error: SglError) -> None:
        """Answer a call with an error, and forget what of it still waits."""
        self._waiting.drop(call)
        self._answer(EncodeReply(request=call.request, error=error.to_info()))
