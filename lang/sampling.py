"""What one generation is asked to do besides its prompt: `Sampling`, and the one door through which it is made.

Owns the fields with their defaults and ranges, and `sampling_from_mapping`: `gen`, `run`, `run_batch`,
`Engine.generate` and every HTTP route go through it, so a wrong value is the same error everywhere. Part of the graph's
contract: other rooms import it from `sgl.lang.graph`.

A default is a constant here. What a model recommends (its `generation_config.json`) comes in as the `base` of
`sampling_from_mapping`, below every explicit value.
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from sgl.errors import InvalidParameter
from sgl.lang.patterns import check_stop_pattern
from sgl.limits import DEFAULT_LIMITS

# --- checks ---------------------------------------------------------------------------------------------------------


LONGEST_S = 1e9
"""Most seconds of a deadline or a lifetime, some thirty years: what clocks and locks take without overflowing."""


def check_number(name: str, value: Any, *, low: float, high: float | None = None, open_low: bool = False) -> None:
    """Raise `InvalidParameter` unless `value` is a finite number in the range; `open_low` leaves `low` itself out."""
    span = f"a finite number {'>' if open_low else '>='} {low:g}" + (f" and <= {high:g}" if high is not None else "")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        raise InvalidParameter(f"{name} is {_shown(value)}; expected {span}", param=name)
    if value < low or (open_low and value == low) or (high is not None and value > high):
        raise InvalidParameter(f"{name} is {_shown(value)}; expected {span}", param=name)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond what a float can hold
        return False


def check_integer(name: str, value: Any, *, low: int, high: int = 2**63 - 1) -> None:
    """Raise `InvalidParameter` unless `value` is an integer in the range. True and False are none."""
    most = f" and <= {high}" if high < 2**63 - 1 else " and < 2^63" if isinstance(value, int) and value > high else ""
    span = f"an integer >= {low}{most}"
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParameter(f"{name} is {_shown(value)}; expected {span}", param=name)


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidParameter(f"{name} is {_shown(value)}; expected true or false", param=name)


def _check_count(name: str, values: tuple[Any, ...], most: int, what: str) -> None:
    if not isinstance(values, tuple):
        raise InvalidParameter(f"{name} is {_shown(values)}; expected a tuple", param=name)
    if len(values) > most:
        raise InvalidParameter(f"{name} has {len(values)} {what}; at most {most} are allowed", param=name)


def _check_texts(name: str, texts: tuple[str, ...], most: int, most_bytes: int) -> None:
    _check_count(name, texts, most, "strings")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidParameter(f"{name} contains {_shown(text)}; expected non-empty strings", param=name)
        if (num_bytes := len(text.encode("utf-8", "surrogatepass"))) > most_bytes:
            raise InvalidParameter(
                f"a {name} string has {num_bytes} bytes; at most {most_bytes} are allowed", param=name
            )


def _check_ids(name: str, ids: tuple[int, ...], most: int) -> None:
    _check_count(name, ids, most, "token ids")
    for token_id in ids:
        check_integer(name, token_id, low=0, high=2**31 - 1)


def _shown(value: Any) -> str:
    """A value in an error: its beginning, when it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- the fields -----------------------------------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How one generation samples and stops. Names and defaults are those of SGLang's sampling parameters.

    Args:
        max_new_tokens: most tokens to generate; at least 0.
        min_new_tokens: end-of-sequence and stops are blocked until so many tokens exist.
        n: samples to draw from the same prompt, 1 to 16. A node in a graph has 1: builders lower more with
            `sgl.lang.graph.lower_samples`.
        temperature: 0 is greedy (as is anything below 1e-5), at most 1000; otherwise logits are divided by it.
        top_p: in (0, 1]: the smallest set of most probable tokens whose probabilities reach it, the token that crosses
            it included; 1 switches it off.
        top_k: that many most probable tokens; -1 switches it off.
        min_p: in [0, 1]: tokens with at least this share of the largest probability; 0 switches it off.
        frequency_penalty, presence_penalty: in [-2, 2], over the tokens generated so far.
        repetition_penalty: in (0, 2]; 1.0 switches it off.
        logit_bias: pairs of token id and a number in [-100, 100] that is added to its logit.
        max_reasoning_tokens: most tokens of the reasoning, exactly: then its end marker comes. Needs a model that
            reasons, or the name of a format (`reasoning`); `None` is unlimited.
        seed: makes this generation reproducible on its own; `None` draws from the engine's seed.
        stop: strings that end the generation; trimmed from the value unless `no_stop_trim`.
        stop_token_ids: token ids that end the generation, besides the model's own.
        stop_regex: patterns in the syntax of `re` that end it as soon as the text so far contains a match; that is
            looked for after every character, so `\\d+` stops at the first digit.
        ignore_eos: the model's end-of-sequence tokens do not end the generation.
        no_stop_trim: what ended the generation belongs to its value.
        skip_special_tokens: the value is without the text of special tokens.
        spaces_between_special_tokens: taken for compatibility, without effect: no tokenizer here inserts any.
        return_logprob: log-probabilities of the output tokens, of the model itself (before temperature and the rest).
        top_logprobs_num: of the most probable tokens beside each of them, and `token_ids_logprob`: of these ids.
        logprob_start_len: also those of the prompt from this position on; -1: of the output only. These three switch
            `return_logprob` on when it is not given.
        custom_logit_processor: name of a processor registered with the engine, and `custom_params`: what it is given,
            as canonical JSON text.
        grammar_backend: what compiles and checks this generation's constraint: `llguidance`, `xgrammar`, or `auto` for
            the engine's own.
        token_healing: the last token of the text before may be drawn anew, so that a token over the seam can be
            written; what is drawn begins with its text. Counted as `healed_tokens`.

    Raises:
        InvalidParameter: a value is not finite or out of range; `param` names the field.

    Example:
        >>> Sampling(temperature=float("nan"))
        Traceback (most recent call last):
        sgl.errors.InvalidParameter: temperature is nan; expected a finite number >= 0 and <= 1000
        >>> sampling_from_mapping({"temprature": 0.5})
        Traceback (most recent call last):
        sgl.errors.InvalidParameter: unknown sampling parameter 'temprature' (did you mean 'temperature'?)
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_reasoning_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    return_logprob: bool = False
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    logprob_start_len: int = -1
    custom_logit_processor: str | None = None
    custom_params: str | None = None
    grammar_backend: str = "auto"
    token_healing: bool = False

    def __post_init__(self) -> None:
        limits = DEFAULT_LIMITS
        check_number("temperature", self.temperature, low=0.0, high=1000.0)
        check_number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        check_number("min_p", self.min_p, low=0.0, high=1.0)
        check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        check_number("repetition_penalty", self.repetition_penalty, low=0.0, high=2.0, open_low=True)
        check_integer("max_new_tokens", self.max_new_tokens, low=0)
        check_integer("min_new_tokens", self.min_new_tokens, low=0)
        check_integer("n", self.n, low=1, high=limits.max_n)
        check_integer("top_logprobs_num", self.top_logprobs_num, low=0, high=limits.max_logprobs)
        check_integer("logprob_start_len", self.logprob_start_len, low=-1)
        check_integer("top_k", self.top_k, low=-1)
        if self.top_k == 0:
            raise InvalidParameter("top_k is 0; expected -1 (off) or at least 1", param="top_k")
        if self.max_reasoning_tokens is not None:
            check_integer("max_reasoning_tokens", self.max_reasoning_tokens, low=0)
        if self.seed is not None:
            check_integer("seed", self.seed, low=0)
        if self.min_new_tokens > self.max_new_tokens:
            raise InvalidParameter(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens {self.max_new_tokens}",
                param="min_new_tokens",
            )
        for name in _SWITCHES:
            _check_bool(name, getattr(self, name))
        _check_texts("stop", self.stop, limits.max_stops, limits.max_stop_bytes)
        _check_texts("stop_regex", self.stop_regex, limits.max_stops, limits.max_stop_regex_bytes)
        _check_ids("stop_token_ids", self.stop_token_ids, limits.max_stop_token_ids)
        _check_ids("token_ids_logprob", self.token_ids_logprob, limits.max_logprob_ids)
        _check_count("logit_bias", self.logit_bias, limits.max_logit_bias, "entries")
        for token_id, bias in self.logit_bias:
            check_integer("logit_bias", token_id, low=0, high=2**31 - 1)
            check_number("logit_bias", bias, low=-100.0, high=100.0)
        if self.grammar_backend not in _GRAMMAR_BACKENDS:
            raise InvalidParameter(
                f"grammar_backend is {_shown(self.grammar_backend)}; expected one of {', '.join(_GRAMMAR_BACKENDS)}",
                param="grammar_backend",
            )
        self._check_processor()

    def _check_processor(self) -> None:
        name, params = self.custom_logit_processor, self.custom_params
        if name is not None and (not isinstance(name, str) or not name):
            raise InvalidParameter(
                f"custom_logit_processor is {_shown(name)}; expected the name of a registered one",
                hint="processors are registered when the engine is started, with logit_processors",
                param="custom_logit_processor",
            )
        if params is not None:
            if name is None:
                raise InvalidParameter(
                    "custom_params is given without custom_logit_processor", hint="name one", param="custom_params"
                )
            if (num_bytes := len(params)) > DEFAULT_LIMITS.max_custom_params_bytes:
                raise InvalidParameter(
                    f"custom_params has {num_bytes} bytes of JSON; at most {DEFAULT_LIMITS.max_custom_params_bytes} "
                    "are allowed",
                    param="custom_params",
                )
            try:
                json.loads(params)
            except (ValueError, RecursionError) as error:
                raise InvalidParameter(f"custom_params is not JSON text: {error}", param="custom_params") from None


_SWITCHES = (
    "ignore_eos",
    "no_stop_trim",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "return_logprob",
    "token_healing",
)
_GRAMMAR_BACKENDS = ("auto", "llguidance", "xgrammar")
_ALIASES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "max_thinking_tokens": "max_reasoning_tokens",
    "thinking_budget": "max_reasoning_tokens",
    "sampling_seed": "seed",
}


# --- the door -------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A number or string of a kind that the wire does not know (numpy's, a subclass) as Python's own.

    Example:
        >>> import numpy
        >>> plain(numpy.float64(0.5)), plain(numpy.int64(3)), plain(numpy.str_("x"))
        (0.5, 3, 'x')
    """
    if type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _listed(name: str, value: Any, single: type) -> tuple[Any, ...]:
    """A single value or a list, tuple or array of them, as a tuple."""
    value = plain(value)
    if isinstance(value, single):
        return (value,)
    if isinstance(value, (Mapping, str, bytes)) or not isinstance(value, Iterable):
        raise InvalidParameter(
            f"{name} is {_shown(value)}; expected one {single.__name__} or a list of them", param=name
        )
    return tuple(plain(item) for item in value)


def _bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """A mapping of token id (an integer, or its digits as JSON has them) to bias, as pairs sorted by id."""
    if isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        value = dict(value)  # the stored form
    if not isinstance(value, Mapping):
        raise InvalidParameter(
            f"{name} is {_shown(value)}; expected a mapping of token id to number",
            hint=f'for example {{"42": -100}} for {name}, which all but forbids token 42',
            param=name,
        )
    if len(value) > DEFAULT_LIMITS.max_logit_bias:  # before any of them is looked at
        _check_count(name, tuple(value), DEFAULT_LIMITS.max_logit_bias, "entries")
    pairs: dict[int, Any] = {}
    for key, bias in value.items():
        token_id = (
            int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else plain(key)
        )
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
            raise InvalidParameter(
                f"{name} has the key {_shown(key)}; expected a token id, an integer >= 0",
                hint="the ids of a text are those that tokenizing it gives",
                param=name,
            )
        if token_id in pairs:
            raise InvalidParameter(f"{name} has token id {token_id} twice", hint="leave one out", param=name)
        bias = plain(bias)
        try:
            check_number(name, bias, low=-100.0, high=100.0)
        except InvalidParameter:
            raise InvalidParameter(
                f"{name} of token id {token_id} is {_shown(bias)}; expected a finite number >= -100 and <= 100",
                hint="100 all but forces a token, -100 all but forbids it",
                param=name,
            ) from None
        pairs[token_id] = float(bias)
    return tuple(sorted(pairs.items()))


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    patterns = _listed(name, value, str)
    _check_texts(name, patterns, DEFAULT_LIMITS.max_stops, DEFAULT_LIMITS.max_stop_regex_bytes)
    for pattern in patterns:
        check_stop_pattern(pattern)
    return patterns


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameter(f"{name} is not a JSON value: {error}", param=name) from None


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "stop": lambda name, value: _listed(name, value, str),
    "stop_regex": lambda name, value: _patterns(name, value),
    "stop_token_ids": lambda name, value: _listed(name, value, int),
    "token_ids_logprob": lambda name, value: _listed(name, value, int),
    "logit_bias": _bias,
    "custom_params": _json,
}
"""How a user's value becomes the stored one; `plain` where nothing is listed."""


def sampling_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Sampling` that a user's mapping sets, as they are stored; `None` means "not given".

    Raises:
        InvalidParameter: an unknown name (with the nearest known one), or a value that has no stored form.
    """
    values: dict[str, Any] = {}
    names = Sampling.__struct_fields__
    for key, value in given.items():
        name = _ALIASES.get(key, key)
        if name not in names:
            near = difflib.get_close_matches(str(name), (*names, *_ALIASES), n=1)
            raise InvalidParameter(
                f"unknown sampling parameter {_shown(key)}",
                hint=f"did you mean {near[0]!r}?" if near else "",
                param=str(key),
            )
        if value is not None:
            values[name] = _READERS[name](key, value) if name in _READERS else plain(value)
    implied = values.get("top_logprobs_num") or values.get("token_ids_logprob")
    if "return_logprob" not in values and (implied or values.get("logprob_start_len", -1) != -1):
        values["return_logprob"] = True
    return values


def sampling_from_mapping(given: Mapping[str, Any], base: Sampling | None = None) -> Sampling:
    """`Sampling` from a user's mapping, over `base`; `None` means "not given".

    Numbers may be of any kind that is one (numpy's, too); they are stored as Python's. A single `stop`, `stop_regex` or
    id stands for a list of one; `logit_bias` is a mapping, `custom_params` any JSON value. `max_tokens` is accepted for
    `max_new_tokens`, `min_tokens` for `min_new_tokens`, `sampling_seed` for `seed`.

    Raises:
        InvalidParameter: an unknown name (with the nearest known one), a wrong type, or a value out of range.

    Example:
        >>> sampling_from_mapping({"logit_bias": {"7": -100}, "stop": "."}).logit_bias
        ((7, -100.0),)
    """
    values = sampling_values(given)
    return msgspec.structs.replace(base, **values) if base is not None else Sampling(**values)
