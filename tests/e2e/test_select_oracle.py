"""`select` against transformers on the embedded model: every option scored as the full string that it makes.

The default run has a prefix of 200 tokens; `-m slow` has 2,000 tokens and 500 options.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.oracle import transformers_smollm2

import sgl
from sgl.runtime.engine import Engine
from sgl.runtime.text.tokenizer import Tokenizer

BATCH = 10  # with 2,000 tokens before them, a row takes 100 MB of keys and values


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from sgl.runtime.loading.checkpoint import open_checkpoint
    from sgl.runtime.loading.sources import locate

    metadata = open_checkpoint(locate("smollm2-135m")).gguf_metadata
    assert metadata is not None
    return Tokenizer.from_gguf(metadata)


def prefix_of(tokenizer: Tokenizer, num_tokens: int) -> str:
    words = ("river", "stone", "market", "letter", "garden", "winter", "paper", "silver", "window", "bridge")
    pick = random.Random(0)
    text = "Notes of a traveller. "
    while len(tokenizer.encode(text)) < num_tokens:
        text += " ".join(pick.choices(words, k=8)).capitalize() + ". "
    return text + "\nQuestion: what is the best word for it? Answer:"


def options(count: int) -> list[str]:
    pick = random.Random(count)
    syllables = ["ar", "bel", "cor", "den", "el", "fin", "gor", "hal", "in", "jor", "kel", "lun", "mor", "nat", "or"]
    found: dict[str, None] = {}
    while len(found) < count:
        found[" " + "".join(pick.choices(syllables, k=pick.randrange(1, 4)))] = None
    return list(found)


class Scorer:
    """Scores full strings with transformers: the common beginning once, the rest of each string in batches."""

    def __init__(self, tokenizer: Tokenizer, prefix: str) -> None:
        self.model: Any = transformers_smollm2()
        self.tokenizer = tokenizer
        self.prefix = prefix
        self.head = tokenizer.encode(prefix)[:-1]
        with torch.inference_mode():
            self.past = self.model(torch.tensor([self.head[:-1]]), use_cache=True).past_key_values

    def scores(self, choices: list[str], stable: int) -> list[float]:
        """Log-probability of each string's tokens behind the first `stable` ones."""
        tails = [self.tokenizer.encode(self.prefix + choice) for choice in choices]
        assert all(ids[: len(self.head)] == self.head for ids in tails)
        start = len(self.head) - 1
        found: list[float] = []
        for first in range(0, len(tails), BATCH):
            rows = [ids[start:] for ids in tails[first : first + BATCH]]
            padded = torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
            past = copy.deepcopy(self.past)
            past.batch_repeat_interleave(len(rows))
            with torch.inference_mode():
                logits = self.model(padded, past_key_values=past, use_cache=True).logits
            logprobs = torch.log_softmax(logits.double(), dim=-1)
            for i, row in enumerate(rows):
                positions = range(stable - start - 1, len(row) - 1)
                found.append(sum(float(logprobs[i, k, row[k + 1]]) for k in positions))
        return found


@sgl.function
def pick(s, prefix: str, choices: list[str], all_scores: bool) -> None:  # type: ignore[no-untyped-def]
    s += prefix
    s += sgl.select("word", choices, all_scores=all_scores)


@pytest.mark.parametrize(
    ("num_tokens", "counts"), [(200, (4, 26)), pytest.param(2000, (4, 26, 500), marks=pytest.mark.slow)]
)
def test_scores_are_those_of_the_full_strings(
    exact_smollm2: Engine,
    tokenizer: Tokenizer,
    num_tokens: int,
    counts: tuple[int, ...],
    record_property: Callable[[str, object], None],
) -> None:
    prefix = prefix_of(tokenizer, num_tokens)
    scorer = Scorer(tokenizer, prefix)
    for count in counts:
        choices = options(count)
        exact_smollm2.flush_cache(wait_s=10.0)  # each number of options is counted alone
        before = exact_smollm2.stats()
        state = pick.run(prefix=prefix, choices=choices, all_scores=True, backend=exact_smollm2)
        after = exact_smollm2.stats()
        found = state.get_meta_info("word")["input_token_logprobs"]
        encoded = [tokenizer.encode(prefix + choice) for choice in choices]
        stable = len(encoded[0]) - len(found[0])
        assert [ids[stable:] for ids in encoded] == [[token_id for _, token_id, _ in score] for score in found]
        expected = scorer.scores(choices, stable)
        ours = [sum(logprob for logprob, _, _ in score) for score in found]
        assert np.abs(np.array(ours) - np.array(expected)).max() < 1e-4
        means = [total / len(score) for total, score in zip(expected, found, strict=True)]
        assert state["word"] == choices[int(np.argmax(means))]
        # Each inner node of the options' trie is computed once, all of them in as few steps as the token bound allows.
        nodes = {tuple(ids[stable:k]) for ids in encoded for k in range(stable + 1, len(ids))}
        scored = after["scored_tokens"] - before["scored_tokens"]
        assert scored == len(nodes)
        forwards = after["forwards"] - before["forwards"]
        computed = after["prefill_tokens"] - before["prefill_tokens"]
        assert forwards == -(-computed // 512)

        early = pick.run(prefix=prefix, choices=choices, all_scores=False, backend=exact_smollm2)
        stopped = exact_smollm2.stats()
        assert early["word"] == state["word"]
        assert stopped["scored_tokens"] - after["scored_tokens"] <= scored
        record_property(f"{count} options: tokens, of options, forwards", (computed, scored, forwards))
        record_property(
            f"{count} options, early stop: candidates computed",
            count - len(early.get_meta_info("word").get("bounds", ())),
        )
