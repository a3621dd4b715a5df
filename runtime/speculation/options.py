"""What the options of speculation say together: one pure function from what the user gave to what runs.

Owns `Speculation`, the part of the resolved configuration that the engine builds its drafter from, and the refusal of
wishes that contradict each other. Called by `resolution.resolve`; no torch. Names are SGLang's.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sgl.errors import ConfigError
from sgl.runtime.speculation.control import AdaptiveParams, adaptive_params

if TYPE_CHECKING:
    from sgl.runtime.config import EngineConfig

Accept = Literal["drawn", "token", "block"]
Algorithm = Literal["NONE", "NGRAM", "STANDALONE"]
MatchType = Literal["BFS", "PROB"]
"""Of places that match equally well: the latest, or what most of them go on with."""
DraftTokens = Annotated[int, Meta(ge=2, le=128)]
DraftSteps = Annotated[int, Meta(ge=1, le=127)]
Breadth = Annotated[int, Meta(ge=1, le=64)]
TrieDepth = Annotated[int, Meta(ge=2, le=1024)]

_DRAFT_TOKENS: dict[Algorithm, int] = {"NGRAM": 12, "STANDALONE": 4}
"""As SGLang's: eleven guesses of text behind a known token, three of a model."""
_OF_DRAFT_MODEL = ("speculative_draft_", "speculative_use_")
"""How options of a draft model begin."""
_LEAST_SLOTS, _MOST_SLOTS = 16 * 1024, 64 * 1024


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """How guesses are made.

    Args:
        algorithm: who guesses. Program text and the constraint's forced tokens take part in every one.
        num_draft_tokens: tokens that a row computes at most, the known one before the guesses included.
        adaptive: whether costs and past success decide how many; else it is always the most.
        adaptive_params: the ladder of lengths.
        ngram_max_trie_depth, ngram_match_type, ngram_capacity, ngram_external_corpus_path, ngram_max_bfs_breadth: of
            `NgramProposer`.
        draft_model_path, draft_model_revision: of `DraftModel`.
        accept: how drafts of a draft model are accepted: if they are what is `drawn`, or by rejection sampling.
    """

    algorithm: Algorithm
    num_draft_tokens: int
    adaptive: bool
    adaptive_params: AdaptiveParams
    ngram_max_trie_depth: int = 18
    ngram_match_type: MatchType = "BFS"
    ngram_capacity: int = 1_000_000
    ngram_max_bfs_breadth: int = 10
    ngram_external_corpus_path: str | None = None
    draft_model_path: str | None = None
    draft_model_revision: str | None = None
    accept: Accept = "drawn"

    @property
    def most_drafts(self) -> int:
        """Guesses of a row."""
        return self.num_draft_tokens - 1

    def most_of_step(self, max_running_requests: int) -> int:
        """Guesses of all rows of a step together."""
        return max(self.most_drafts, max_running_requests)


def resolve_speculation(config: EngineConfig) -> Speculation | None:
    """What speculates, if anything does.

    Raises:
        ConfigError: options of an algorithm that is not chosen, or that contradict each other, with the one to change.
    """
    algorithm = config.speculative_algorithm
    if algorithm in (None, "NONE"):
        given = [name for name in _fields(config) if name != "speculative_algorithm"]
        if given:
            raise ConfigError(
                f"{given[0]} is given, but speculative_algorithm is {algorithm}",
                hint=f"set speculative_algorithm to {_owner(given[0])}, or leave {given[0]} out",
                param=given[0],
            )
        return None
    _check_algorithm(config, algorithm)
    num_draft_tokens = _num_draft_tokens(config, algorithm)
    ladder = config.speculative_adaptive_config
    if ladder is not None and not config.speculative_adaptive:
        raise ConfigError(
            "speculative_adaptive_config is given, but speculative_adaptive is off",
            hint="leave speculative_adaptive on, or speculative_adaptive_config out",
            param="speculative_adaptive_config",
        )
    return Speculation(
        algorithm=algorithm,
        num_draft_tokens=num_draft_tokens,
        adaptive=config.speculative_adaptive,
        adaptive_params=adaptive_params(_object(ladder), num_draft_tokens - 1),
        ngram_max_trie_depth=config.speculative_ngram_max_trie_depth,
        ngram_match_type=config.speculative_ngram_match_type,
        ngram_capacity=config.speculative_ngram_capacity,
        ngram_max_bfs_breadth=config.speculative_ngram_max_bfs_breadth,
        ngram_external_corpus_path=config.speculative_ngram_external_corpus_path,
        draft_model_path=config.speculative_draft_model_path,
        draft_model_revision=config.speculative_draft_model_revision,
        accept=_accept(config),
    )


def draft_slots(context_len: int) -> int:
    """Tokens whose keys and values a draft model keeps: what is dropped is computed again."""
    return min(_MOST_SLOTS, max(_LEAST_SLOTS, context_len))


def _check_algorithm(config: EngineConfig, algorithm: Algorithm) -> None:
    """Refuse options of another algorithm."""
    others = _OF_DRAFT_MODEL if algorithm == "NGRAM" else ("speculative_ngram_",)
    wrong = next((name for name in _fields(config) if name.startswith(others)), None)
    if wrong is not None:
        other = "STANDALONE" if algorithm == "NGRAM" else "NGRAM"
        raise ConfigError(
            f"{wrong} is given, but speculative_algorithm is {algorithm}",
            hint=f"leave {wrong} out, or set speculative_algorithm to {other}",
            param=wrong,
        )
    if algorithm == "STANDALONE" and config.speculative_draft_model_path is None:
        raise ConfigError(
            "speculative_algorithm is STANDALONE, but no draft model is given",
            hint="set speculative_draft_model_path to a smaller model with the same tokenizer",
            param="speculative_draft_model_path",
        )


def _owner(name: str) -> Algorithm:
    """The algorithm that an option belongs to; the simpler one for those of both."""
    return "STANDALONE" if name.startswith(_OF_DRAFT_MODEL) else "NGRAM"


def _accept(config: EngineConfig) -> Accept:
    """By which rule drafts of a draft model are accepted."""
    by_token, by_block = config.speculative_use_rejection_sampling, config.speculative_use_block_verification
    if by_token and by_block:
        raise ConfigError(
            "speculative_use_rejection_sampling and speculative_use_block_verification are both on",
            hint="leave speculative_use_rejection_sampling out: block verification is rejection sampling, too",
            param="speculative_use_rejection_sampling",
        )
    return "block" if by_block else "token" if by_token else "drawn"


def _num_draft_tokens(config: EngineConfig, algorithm: Algorithm) -> int:
    """Tokens of a row: one more than the steps of a chain, whichever of the two is given."""
    tokens, steps = config.speculative_num_draft_tokens, config.speculative_num_steps
    if steps is not None and tokens is not None and tokens != steps + 1:
        raise ConfigError(
            f"speculative_num_draft_tokens is {tokens} and speculative_num_steps {steps}: a chain has one token more "
            "than steps",
            hint=f"set speculative_num_draft_tokens to {steps + 1}, or leave one of the two out",
            param="speculative_num_draft_tokens",
        )
    return steps + 1 if steps is not None else tokens or _DRAFT_TOKENS[algorithm]


def _fields(config: EngineConfig) -> list[str]:
    """Options of speculation that differ from their default."""
    default = type(config)()
    names = [name for name in config.__struct_fields__ if name.startswith("speculative_")]
    return [name for name in names if getattr(config, name) != getattr(default, name)]


def _object(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(
            f"speculative_adaptive_config is {text[:80]!r}, which is no JSON object",
            hint='give it as {"1": {"candidate_steps": [1, 3, 7]}}',
            param="speculative_adaptive_config",
        )
    return value
