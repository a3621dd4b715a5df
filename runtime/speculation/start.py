"""The drafter that a configuration asks for.

Owns nothing; reads the user's corpus. Called once, when the engine core is made.
"""

from __future__ import annotations

import json
from pathlib import Path

from sgl.errors import ConfigError
from sgl.runtime.config import ResolvedConfig
from sgl.runtime.decode_graphs import VERIFIED_TOKENS, VERIFIED_WIDTHS
from sgl.runtime.speculation.draft_model import DraftModel
from sgl.runtime.speculation.drafter import Drafter
from sgl.runtime.speculation.ngram import NgramProposer, TokenIndex
from sgl.runtime.speculation.options import Speculation
from sgl.runtime.speculation.proposer import Proposer
from sgl.runtime.text.tokenizer import Tokenizer

_SLOPES = {"cpu": 0.15, "cuda": 0.01}
"""What a row more adds to a step of one, before any was timed: on a GPU weights are read either way."""


def make_drafter(config: ResolvedConfig, tokenizer: Tokenizer, model: DraftModel | None = None) -> Drafter | None:
    """The drafter of an engine; `None` when it does not speculate.

    Args:
        model: the draft model, where the algorithm is `STANDALONE`; without one nobody guesses.

    Raises:
        ConfigError: a corpus that cannot be read.
    """
    options = config.speculation
    if options is None or (options.algorithm == "STANDALONE" and model is None):
        return None
    proposer: Proposer
    if model is not None:
        proposer = model
    else:
        proposer = NgramProposer(
            options.ngram_capacity,
            options.ngram_max_trie_depth,
            options.ngram_match_type,
            _corpus(options, tokenizer),
            # In deterministic mode a branch needs a context of its own, which pages of one token give it on a CPU.
            1
            if config.deterministic and (config.page_size > 1 or config.device != "cpu")
            else options.ngram_max_bfs_breadth,
        )
    # Larger steps are launched kernel by kernel; who fixes their number of drafts wants them all the same.
    records = config.cuda_graph_max_bs_decode > 0 and not config.deterministic and options.adaptive
    return Drafter(
        [proposer],
        most=min(options.most_drafts, VERIFIED_WIDTHS[-1] - 1) if records else options.most_drafts,
        most_of_row=VERIFIED_WIDTHS[-1] if records else None,
        most_tokens=VERIFIED_TOKENS[-1] if records else None,
        most_of_step=config.max_drafts,
        adaptive=options.adaptive_params if options.adaptive else None,
        slope=_SLOPES[config.device],
        by_block=options.accept == "block",
    )


def _corpus(options: Speculation, tokenizer: Tokenizer) -> TokenIndex | None:
    """The user's texts: a file is one, unless it is JSON lines, each a text or an object with one under `text`."""
    path = options.ngram_external_corpus_path
    if path is None:
        return None
    try:
        content = Path(path).read_text(encoding="utf-8")
        texts = [content]
        if path.endswith((".jsonl", ".ndjson")):
            lines = [json.loads(line) for line in content.splitlines() if line.strip()]
            texts = [line["text"] if isinstance(line, dict) else str(line) for line in lines]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"speculative_ngram_external_corpus_path {path!r} cannot be read: {error}",
            hint='give a UTF-8 text, or JSON lines of texts or of {"text": ...}',
            param="speculative_ngram_external_corpus_path",
        ) from None
    index = TokenIndex(options.ngram_max_trie_depth, options.ngram_match_type)
    for number, text in enumerate(texts):
        index.append(number, tokenizer.encode(text))
    return index
