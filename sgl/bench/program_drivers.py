"""transformers, outlines and guidance as drivers of the tasks, and the process that each runs in.

Run by `sgl.bench.program_peers`, in the peer's own interpreter (`sgl.bench.peers.launch`): a request is a line of JSON
on standard input, an answer one on standard output, and the end of the input ends the process. Each library is used as
its own documentation does for speed: weights loaded once, inference mode, batches where it has them, what it caches
between calls kept within a run, and emptied before the next.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from sgl.bench.peers import versions
from sgl.bench.program_tasks import TASKS, Driver

PACKAGES = {
    "transformers": ("transformers", "torch"),
    "outlines": ("outlines", "outlines-core", "transformers", "torch"),
    "guidance": ("guidance", "llguidance", "transformers", "torch"),
}
"""Peers that come as libraries, and what has a version in them."""


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


class TransformersDriver(Driver):
    """transformers without anything else: batches in `generate`; options scored behind a kept prompt.

    Keys and values of the last prompt are kept, cut to what the next one begins with, and repeated for its options.
    """

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

    def generate(self, prompts: Sequence[str], max_tokens: int, stop: str) -> list[str]:
        model, tokenizer = self._loaded.model, self._loaded.tokenizer
        batch = tokenizer(list(prompts), return_tensors="pt", padding=True)
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=max_tokens,
            do_sample=False,
            stop_strings=[stop],
            tokenizer=tokenizer,
        )
        texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return [str(text).split(stop)[0] for text in texts]

    def choose(self, prompts: Sequence[str], options: Sequence[str]) -> list[str]:
        return [options[self._best(prompt, options)] for prompt in prompts]

    def _best(self, prompt: str, options: Sequence[str]) -> int:
        """The option with the highest mean log-probability per token."""
        import copy

        import torch

        tokenizer = self._loaded.tokenizer
        ids = tokenizer(prompt)["input_ids"]
        last = self._advance(ids)
        rows = [tokenizer(option)["input_ids"] for option in options]
        width = max(map(len, rows))
        padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        cache = copy.deepcopy(self._kept)
        cache.batch_repeat_interleave(len(rows))
        logits = self._loaded.model(input_ids=padded, past_key_values=cache).logits.float()
        after = torch.cat([last.expand(len(rows), 1, -1), logits[:, :-1]], dim=1).log_softmax(-1)
        scores = after.gather(2, padded[:, :, None])[:, :, 0]
        return max(range(len(rows)), key=lambda row: float(scores[row, : len(rows[row])].mean()))

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

    settings: ClassVar[dict[str, str]] = {
        "backend": "transformers",
        "generators": "kept by constraint",
        "prompts": "one batch",
    }

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        import outlines

        self._loaded = _Loaded(folder, dtype, threads)
        self._model = outlines.from_transformers(self._loaded.model, self._loaded.tokenizer)
        self._generators: dict[Any, Any] = {}

    def _generator(self, key: Any, kind: Callable[[], Any]) -> Any:
        import outlines

        if key not in self._generators:
            self._generators[key] = outlines.Generator(self._model, kind())
        return self._generators[key]

    def generate(self, prompts: Sequence[str], max_tokens: int, stop: str) -> list[str]:
        texts = self._model.batch(
            list(prompts),
            max_new_tokens=max_tokens,
            do_sample=False,
            stop_strings=[stop],
            tokenizer=self._loaded.tokenizer,
        )
        return [str(text).split(stop)[0] for text in texts]

    def choose(self, prompts: Sequence[str], options: Sequence[str]) -> list[str]:
        from outlines.types import Choice

        generator = self._generator(tuple(options), lambda: Choice(list(options)))
        return [str(text) for text in generator.batch(list(prompts), max_new_tokens=64, do_sample=False)]

    def fill(self, prompts: Sequence[str], schema: str, max_tokens: int) -> list[str]:
        from outlines.types import JsonSchema

        generator = self._generator(schema, lambda: JsonSchema(schema))
        return [str(text) for text in generator.batch(list(prompts), max_new_tokens=max_tokens, do_sample=False)]


class GuidanceDriver(Driver):
    """guidance over transformers. It has no batches; keys and values of the last prompt are kept by its engine."""

    settings: ClassVar[dict[str, str]] = {
        "backend": "transformers",
        "prompts": "one after the other, the engine keeps the last one's state",
    }

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        from guidance import models

        self._loaded = _Loaded(folder, dtype, threads)
        self._start = models.Transformers(
            self._loaded.model, self._loaded.tokenizer, echo=False, enable_monitoring=False
        )

    def forget(self) -> None:
        """Its engine keeps the last prompt's state: another one takes its place."""
        self.generate(["Nothing that a task begins with"], 1, "\n")

    def generate(self, prompts: Sequence[str], max_tokens: int, stop: str) -> list[str]:
        import guidance

        return [
            str((self._start + prompt + guidance.gen("text", max_tokens=max_tokens, stop=stop, temperature=0))["text"])
            for prompt in prompts
        ]

    def choose(self, prompts: Sequence[str], options: Sequence[str]) -> list[str]:
        import guidance

        return [str((self._start + prompt + guidance.select(list(options), name="text"))["text"]) for prompt in prompts]

    def fill(self, prompts: Sequence[str], schema: str, max_tokens: int) -> list[str]:
        import guidance

        grammar = guidance.json(name="text", schema=json.loads(schema), temperature=0, max_tokens=max_tokens)
        return [str((self._start + prompt + grammar)["text"]) for prompt in prompts]


DRIVERS: dict[str, Callable[[str, str, int], Driver]] = {
    "transformers": TransformersDriver,
    "outlines": OutlinesDriver,
    "guidance": GuidanceDriver,
}


def answer(driver: Driver, request: dict[str, Any]) -> dict[str, Any]:
    """Run a task once: its seconds and answers, or the library's error."""
    try:
        driver.forget()
        start = time.perf_counter()
        answers = TASKS[request["task"]].by_calls(driver)
    except Exception as error:  # noqa: BLE001 - of whatever library this is: the report says it
        return {"error": f"{type(error).__name__}: {error}"}
    return {"seconds": time.perf_counter() - start, "answers": answers}


def main(name: str, cores: str, folder: str, dtype: str) -> None:
    """Serve tasks with the driver `name` on `cores` (`0,1`)."""
    numbers = {int(core) for core in cores.split(",")}
    os.sched_setaffinity(0, numbers)
    sink = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not protocol
    driver = DRIVERS[name](folder, dtype, len(numbers))

    def say(reply: dict[str, Any]) -> None:
        sink.write(json.dumps(reply) + "\n")
        sink.flush()

    say({"versions": versions(PACKAGES[name]), "settings": driver.settings, "can": sorted(_methods(driver))})
    for line in sys.stdin:
        say(answer(driver, json.loads(line)))


def _methods(driver: Driver) -> set[str]:
    """What the driver has of its own."""
    return {name for name in ("generate", "choose", "fill") if getattr(type(driver), name) is not getattr(Driver, name)}


if __name__ == "__main__":
    main(*sys.argv[1:])
