"""`sgl bench quality`: what a path through our engine costs in quality, on a fixed text, against float32.

Owns the measurement: the log-probability that each path gives to each token of a text, and the token that it would have
said instead, both from the engine's own prompt log-probabilities. Nothing is timed. A text is cut into windows of equal
length, each read without what stands before it.

All positions of a window are computed in blocks, as a prompt is. Decoding one token at a time is another order of the
same sums, and on a path that rounds activations another rounding; its differences are of the same size.

A path that the model or the machine does not allow has the engine's reason in its row, and no figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

import sgl
from sgl.bench.paths import REFERENCE, EnginePath, chosen_paths
from sgl.bench.provenance import Model, Provenance, model_record, provenance
from sgl.errors import ConfigError, InvalidParameter
from sgl.runtime.config import config_from_mapping
from sgl.runtime.engine import Engine
from sgl.runtime.loading.sources import locate

TEXT = "quality.txt"
"""Comes with this package: prose, a recipe, a letter, a program, arithmetic. Written for it, so in no training set."""


class Scores(msgspec.Struct, frozen=True):
    """What a path says of each predicted token: its log-probability in nats, and the most likely token in its place."""

    logprobs: list[float]
    preferred: list[int]


class PathQuality(msgspec.Struct, frozen=True, kw_only=True):
    """One path beside the reference.

    Attributes:
        perplexity: exp of the mean negative log-probability.
        agreement: share of positions at which both prefer the same token.
        difference: mean absolute difference of the log-probabilities, in nats.
        unavailable: why there are no figures; else empty.
    """

    path: str
    fields: dict[str, Any]
    perplexity: float | None = None
    agreement: float | None = None
    difference: float | None = None
    unavailable: str = ""


class QualityReport(msgspec.Struct, frozen=True, kw_only=True):
    """All paths on one text. `tokens` are those predicted."""

    model: Model
    provenance: Provenance
    text: str
    tokens: int
    window: int
    reference: str
    paths: tuple[PathQuality, ...]


def run(
    fields: Mapping[str, Any],
    *,
    paths: Iterable[str] = (),
    text: Path | None = None,
    window: int = 1024,
    max_tokens: int | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> QualityReport:
    """Read the text through every path.

    Args:
        fields: those of `EngineConfig`; a path's own win.
        paths: names of `sgl.bench.paths.PATHS`, all by default. The reference is always read.
        text: a file of one's own in place of the one that is shipped.
        window: tokens read at once.
        max_tokens: only so many of the text.

    Raises:
        InvalidParameter: an unknown path, or no window of two tokens.
        ConfigError: the text cannot be read.
        SglError: the reference cannot be run.
    """
    chosen = [path for path in chosen_paths(paths) if path != REFERENCE]
    config = config_from_mapping(fields)
    source = locate(config.model_path, load_format=config.load_format, offline=config.offline)
    windows = _windows(_token_ids(fields, _text(text))[:max_tokens], window)
    reference = score(REFERENCE, fields, windows, progress)
    rows = [compare(REFERENCE, reference, reference)]
    for path in chosen:
        try:
            rows.append(compare(path, score(path, fields, windows, progress), reference))
        except ConfigError as error:
            rows.append(PathQuality(path=path.name, fields=path.fields, unavailable=error.message))
    return QualityReport(
        model=model_record(source),
        provenance=provenance((), {}, ()),
        text=TEXT if text is None else str(text),
        tokens=len(reference.logprobs),
        window=window,
        reference=REFERENCE.name,
        paths=tuple(rows),
    )


def score(
    path: EnginePath,
    fields: Mapping[str, Any],
    windows: Sequence[list[int]],
    progress: Callable[[str], None] = lambda what: None,
) -> Scores:
    """Read the windows through one path, in an engine of its own."""
    progress(path.name)
    scores = Scores([], [])
    with Engine(**path.applied(fields)) as engine:
        for window in windows:
            told = engine.generate(
                input_ids=window,
                sampling_params={"max_new_tokens": 1, "temperature": 0},
                return_logprob=True,
                logprob_start_len=0,
                top_logprobs_num=1,
            )["meta_info"]
            scores.logprobs.extend(logprob for logprob, *_ in told["input_token_logprobs"][1:])
            scores.preferred.extend(token for ((_, token, *_),) in told["input_top_logprobs"][1:])
    return scores


def compare(path: EnginePath, scores: Scores, reference: Scores) -> PathQuality:
    """One row.

    Example:
        >>> ours, exact = Scores([-1.0, -3.0], [7, 8]), Scores([-1.0, -2.0], [7, 9])
        >>> row = compare(REFERENCE, ours, exact)
        >>> round(row.perplexity, 2), row.agreement, row.difference
        (7.39, 0.5, 0.5)
    """
    pairs = list(zip(scores.logprobs, reference.logprobs, strict=True))
    agreeing = sum(one == other for one, other in zip(scores.preferred, reference.preferred, strict=True))
    return PathQuality(
        path=path.name,
        fields=path.fields,
        perplexity=math.exp(-statistics.fmean(scores.logprobs)),
        agreement=agreeing / len(pairs),
        difference=statistics.fmean(abs(one - other) for one, other in pairs),
    )


def _windows(token_ids: list[int], length: int) -> list[list[int]]:
    """Whole stretches of the text; a rest of one token predicts nothing."""
    if length < 2 or len(token_ids) < 2:
        raise InvalidParameter(
            f"window is {length} and the text has {len(token_ids)} tokens; expected at least 2 of each", param="window"
        )
    windows = [token_ids[start : start + length] for start in range(0, len(token_ids), length)]
    return [window for window in windows if len(window) > 1]


def _text(path: Path | None) -> str:
    if path is None:
        return (files(sgl) / "bench" / TEXT).read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the text {path} cannot be read: {error}", param="text") from None


def _token_ids(fields: Mapping[str, Any], text: str) -> list[int]:
    from sgl.runtime.loading.checkpoint import open_checkpoint
    from sgl.runtime.text.tokenizer import Tokenizer

    config = config_from_mapping(fields)
    if config.tokenizer_path is not None:
        return list(Tokenizer.from_folder(config.tokenizer_path).encode(text))
    source = locate(config.model_path, load_format=config.load_format, offline=True)
    return list(open_checkpoint(source, config.json_model_override_args).tokenizer().encode(text))
