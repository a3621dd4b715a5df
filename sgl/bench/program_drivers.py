"""transformers, outlines and guidance as drivers, and the process that each peer runs in.

Run by `sgl.bench.program_process`, in the peer's own interpreter (`sgl.bench.peers.launch`): a message is a line of
JSON on standard input, an answer one on standard output, and the end of the input ends the process. Each library is
used as its own documentation does for speed: weights loaded once, inference mode, batches where it has them, what it
caches between calls kept within a run, and emptied before the next.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from sgl.bench.peers import PEERS, versions
from sgl.bench.program_requests import Driver, Request, cut, grouped
from sgl.bench.program_servers import LlamaCppDriver, VllmDriver
from sgl.bench.program_tasks import TASKS

GATHER_S = 0.003
"""How long a batch waits for another request: of a program's generations, each is a line of its own."""


class _Loaded:
    """A model of transformers and its tokenizer, from a folder."""

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        with open(f"{folder}/config.json", encoding="utf-8") as file:
            ends = json.load(file)["eos_token_id"]
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", padding_side="left")
        tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(ends[0])
        self.tokenizer = tokenizer
        self.model.generation_config.pad_token_id = tokenizer.pad_token_id


def _manner(request: Request) -> tuple[tuple[str, ...], bool, float]:
    """What rows of one batch of `generate` have in common."""
    return request.stop, request.exact, request.temperature


def _how(rows: Sequence[Request], tokenizer: Any) -> dict[str, Any]:
    """Arguments of `generate` for rows of one manner; the longest row decides how far it goes."""
    first, most = rows[0], max(row.max_tokens for row in rows)
    how: dict[str, Any] = {"max_new_tokens": most, "do_sample": first.temperature > 0}
    if first.stop:
        how |= {"stop_strings": list(first.stop), "tokenizer": tokenizer}
    if first.exact:
        how["min_new_tokens"] = most
    if first.temperature > 0:
        how |= {"temperature": first.temperature, "top_k": 0}
    return how


class TransformersDriver(Driver):
    """transformers without anything else: batches in `generate`; options scored behind a kept prompt.

    Keys and values of the last prompt are kept, cut to what the next one begins with, and repeated for its options.
    """

    can: ClassVar[frozenset[str]] = frozenset({"choose", "exact", "sample"})
    settings: ClassVar[dict[str, str]] = {
        "generate": "one batch, left padded",
        "choose": "prompt kept and cropped, options in one batch",
    }

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        self._loaded = _Loaded(folder, dtype, threads)
        self.forget()

    def forget(self) -> None:
        self._ids: list[int] = []
        self._kept: Any = None

    def answer(self, requests: Sequence[Request]) -> list[str]:
        texts = [""] * len(requests)
        for numbers in grouped(requests, lambda row: ("options",) if row.options else _manner(row)):
            rows = [requests[number] for number in numbers]
            found = [self._best(row) for row in rows] if rows[0].options else self._batch(rows)
            for number, text in zip(numbers, found, strict=True):
                texts[number] = text
        return texts

    def _batch(self, rows: Sequence[Request]) -> list[str]:
        tokenizer = self._loaded.tokenizer
        batch = tokenizer([row.prompt for row in rows], return_tensors="pt", padding=True)
        out = self._loaded.model.generate(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **_how(rows, tokenizer)
        )
        new = out[:, batch["input_ids"].shape[1] :].tolist()
        texts = tokenizer.batch_decode(
            [ids[: row.max_tokens] for ids, row in zip(new, rows, strict=True)], skip_special_tokens=True
        )
        return [cut(str(text), row.stop) for text, row in zip(texts, rows, strict=True)]

    def _best(self, request: Request) -> str:
        """The option with the highest mean log-probability per token."""
        import copy

        import torch

        tokenizer = self._loaded.tokenizer
        last = self._advance(tokenizer(request.prompt)["input_ids"])
        rows = [tokenizer(option)["input_ids"] for option in request.options]
        width = max(map(len, rows))
        padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        cache = copy.deepcopy(self._kept)
        cache.batch_repeat_interleave(len(rows))
        logits = self._loaded.model(input_ids=padded, past_key_values=cache).logits.float()
        after = torch.cat([last.expand(len(rows), 1, -1), logits[:, :-1]], dim=1).log_softmax(-1)
        scores = after.gather(2, padded[:, :, None])[:, :, 0]
        best = max(range(len(rows)), key=lambda row: float(scores[row, : len(rows[row])].mean()))
        return request.options[best]

    def _advance(self, ids: list[int]) -> Any:
        """Bring the kept state to a prompt; the logits after its last token, `[1, 1, vocabulary]`."""
        import torch
        from transformers import DynamicCache

        same = 0
        while same < min(len(ids) - 1, len(self._ids)) and ids[same] == self._ids[same]:
            same += 1
        if self._kept is None or not same:
            self._kept, same = DynamicCache(config=self._loaded.model.config), 0
        elif same < len(self._ids):
            self._kept.crop(same - len(self._ids))  # negative: how many tokens go
        out = self._loaded.model(
            input_ids=torch.tensor([ids[same:]]), past_key_values=self._kept, logits_to_keep=1, use_cache=True
        )
        self._ids = list(ids)
        return out.logits.float()


class OutlinesDriver(Driver):
    """outlines over transformers; generators (compiled constraints) are made once and kept."""

    can: ClassVar[frozenset[str]] = frozenset({"choose", "fill", "match", "exact", "sample"})
    settings: ClassVar[dict[str, str]] = {
        "backend": "transformers",
        "generators": "kept by constraint",
        "prompts": "one batch for each constraint",
    }
    variants: ClassVar[tuple[str, ...]] = ("outlines_core", "llguidance")

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        import outlines

        self._loaded = _Loaded(folder, dtype, threads)
        self._model = outlines.from_transformers(self._loaded.model, self._loaded.tokenizer)
        self._generators: dict[Any, Any] = {}
        self._backend = self.variants[0]

    def use(self, variant: str) -> None:
        self._backend = variant

    def answer(self, requests: Sequence[Request]) -> list[str]:
        texts = [""] * len(requests)
        for numbers in grouped(requests, lambda row: (row.options, row.schema, row.regex, _manner(row))):
            rows = [requests[number] for number in numbers]
            prompts = [row.prompt for row in rows]
            how = _how(rows, self._loaded.tokenizer)
            if rows[0].needs & {"choose", "fill", "match"}:
                found = self._generator(rows[0]).batch(prompts, **how)
            else:
                found = self._model.batch(prompts, **how)
            for number, text in zip(numbers, found, strict=True):
                texts[number] = cut(str(text), requests[number].stop)
        return texts

    def _generator(self, row: Request) -> Any:
        import outlines
        from outlines.types import Choice, JsonSchema, Regex

        key = (self._backend, row.options, row.schema, row.regex)
        if key not in self._generators:
            if row.options:
                kind: Any = Choice(list(row.options))
            else:
                kind = JsonSchema(row.schema) if row.schema else Regex(row.regex)
            self._generators[key] = outlines.Generator(self._model, kind, backend=self._backend)
        return self._generators[key]


class GuidanceDriver(Driver):
    """guidance over transformers. It has no batches; keys and values of the last prompt are kept by its engine."""

    can: ClassVar[frozenset[str]] = frozenset({"choose", "fill", "match", "sample"})
    settings: ClassVar[dict[str, str]] = {
        "backend": "transformers",
        "prompts": "one after the other, the engine keeps the last one's state",
        "grammars": "kept by constraint",
    }

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        from guidance import models

        self._loaded = _Loaded(folder, dtype, threads)
        self._start = models.Transformers(
            self._loaded.model, self._loaded.tokenizer, echo=False, enable_monitoring=False
        )
        self._grammars: dict[Request, Any] = {}

    def forget(self) -> None:
        """Its engine keeps the last prompt's state: another one takes its place."""
        self.generate(["Nothing that a task begins with"], 1, "\n")

    def answer(self, requests: Sequence[Request]) -> list[str]:
        return [str((self._start + row.prompt + self._grammar(row))["text"]) for row in requests]

    def _grammar(self, row: Request) -> Any:
        import guidance

        key = msgspec.structs.replace(row, prompt="", seed=None)
        if key not in self._grammars:
            if row.options:
                grammar = guidance.select(list(row.options), name="text")
            elif row.schema:
                schema = json.loads(row.schema)
                grammar = guidance.json(
                    name="text", schema=schema, temperature=row.temperature, max_tokens=row.max_tokens
                )
            else:
                grammar = guidance.gen(
                    "text",
                    max_tokens=row.max_tokens,
                    stop=list(row.stop) or None,
                    regex=row.regex or None,
                    temperature=row.temperature,
                )
            self._grammars[key] = grammar
        return self._grammars[key]


class Library(msgspec.Struct, frozen=True, kw_only=True):
    """A peer that runs in a process of its own.

    Attributes:
        driver: called with the path of the model, the dtype, and the number of threads.
        packages: what has a version in it.
        reads: the form of the model that it is given; a `folder` is made of a GGUF file.
        variables: of its environment, unless the user's says else.
    """

    driver: Callable[[str, str, int], Driver]
    packages: tuple[str, ...]
    reads: Literal["folder", "gguf"] = "folder"
    variables: dict[str, str] = {}


LIBRARIES: dict[str, Library] = {
    "outlines": Library(
        driver=OutlinesDriver, packages=("outlines", "outlines-core", "llguidance", "transformers", "torch")
    ),
    "guidance": Library(driver=GuidanceDriver, packages=("guidance", "llguidance", "transformers", "torch")),
    "transformers": Library(driver=TransformersDriver, packages=PEERS["transformers"].packages),
    "llamacpp": Library(
        driver=LlamaCppDriver,
        packages=PEERS["llamacpp"].packages,
        reads="gguf",
        variables=PEERS["llamacpp"].variables,
    ),
    "vllm": Library(
        driver=VllmDriver,
        packages=(*PEERS["vllm"].packages, "transformers", "xgrammar"),
        variables=PEERS["vllm"].variables,
    ),
}
"""By name, as on the command line."""


# --- the process ----------------------------------------------------------------------------------------------------


def run_task(driver: Driver, task: str) -> dict[str, Any]:
    """Run a task once on empty caches: its seconds and answers, or the library's error."""
    try:
        driver.forget()
        start = time.perf_counter()
        answers = TASKS[task].by_calls(driver)
    except Exception as error:  # noqa: BLE001 - of whatever library this is: the report says it
        return {"error": said(error)}
    return {"seconds": time.perf_counter() - start, "answers": answers}


def said(error: Exception) -> str:
    """An error of a library in one line."""
    return f"{type(error).__name__}: {error}"


def serve(
    driver: Driver, lines: queue.SimpleQueue[dict[str, Any] | None], say: Callable[[dict[str, Any]], None]
) -> None:
    """Answer messages until there is None.

    `{"task": name}` runs a task. `{"id": number, "request": ...}` is a generation; its answer has the number and its
    `text`, or an `error`. `{"use": variant}` and `{"forget": true}` are answered with themselves.
    """
    held: dict[str, Any] | None = {}
    while held is not None:
        message, held = held or lines.get(), {}
        if message is None:
            break
        if "task" in message:
            say(run_task(driver, message["task"]))
        elif "use" in message:
            driver.use(message["use"])
            say(message)
        elif "forget" in message:
            driver.forget()
            say(message)
        else:
            asked = [message]
            while driver.gathers:
                try:
                    held = lines.get(timeout=GATHER_S)
                except queue.Empty:
                    break
                if held is None or "request" not in held:
                    break
                asked.append(held)
                held = {}
            _start(driver, asked, say)


def _start(driver: Driver, asked: Sequence[dict[str, Any]], say: Callable[[dict[str, Any]], None]) -> None:
    def done(number: int, text: str | Exception) -> None:
        answer = {"error": said(text)} if isinstance(text, Exception) else {"text": text}
        say({"id": asked[number]["id"], **answer})

    driver.start([msgspec.convert(each["request"], Request) for each in asked], done)


def main(name: str, cores: str, path: str, dtype: str) -> None:
    """Serve the driver `name` on `cores` (`0,1`) until standard input ends."""
    numbers = {int(core) for core in cores.split(",")}
    os.sched_setaffinity(0, numbers)
    sink = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not protocol
    library = LIBRARIES[name]
    driver = library.driver(path, dtype, len(numbers))
    one_at_a_time = threading.Lock()
    lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def say(reply: dict[str, Any]) -> None:
        with one_at_a_time:
            sink.write(json.dumps(reply) + "\n")
            sink.flush()

    def read() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        lines.put(None)

    say(
        {
            "versions": versions(library.packages),
            "settings": driver.settings,
            "can": sorted(driver.can),
            "variants": driver.variants,
        }
    )
    threading.Thread(target=read, daemon=True).start()
    serve(driver, lines, say)
    driver.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
