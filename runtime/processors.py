"""Custom logit processors: code of the operator that changes a row's logits, named in a request and never sent by one.

Owns the protocol `LogitProcessor`, the built-in ones and the loading of others. The worker builds the registry once,
from the engine's `logit_processors`; a request names one (`custom_logit_processor`) and gives it JSON
(`custom_params`). One that cannot be imported is a `ConfigError` at start. Parameters that a processor's own `check`
refuses fail their program at admission, before anything is computed. One that raises while it runs, or returns
something else than a row, fails that row alone (the sampler sees to it).
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sgl.errors import ConfigError, InvalidParameter, SglError

if TYPE_CHECKING:
    import torch


class LogitProcessor(Protocol):
    """A function of one row.

    Called after penalties and logit bias, before the constraint's mask, temperature and the rest; once per token drawn,
    on the worker's step loop, so it should be quick. Rows are independent: the same arguments give the same result.

    A processor may also have a method `check(params, vocab_size)`, which raises when it cannot work with a request's
    parameters: such a request is refused before it is queued. Without it, wrong parameters fail while they are used.
    """

    def __call__(self, logits: torch.Tensor, output_ids: Sequence[int], params: Any) -> torch.Tensor:
        """The changed row.

        Args:
            logits: `[V]` float32, a copy that may be changed in place.
            output_ids: tokens generated so far.
            params: the request's `custom_params`, `None` without.

        Returns:
            `[V]` float32; minus infinity forbids a token.
        """


class DisallowedTokens:
    """Never draws the ids in `params["token_ids"]`; registered as `disallowed_tokens`.

    Example:
        >>> DisallowedTokens().check({"token_ids": 6}, vocab_size=512)
        Traceback (most recent call last):
        ...
        sgl.errors.InvalidParameter: custom_params is {'token_ids': 6}; expected {"token_ids": [...]} with ids below 512
    """

    def __call__(self, logits: torch.Tensor, output_ids: Sequence[int], params: Any) -> torch.Tensor:
        logits[params["token_ids"]] = float("-inf")
        return logits

    def check(self, params: Any, vocab_size: int) -> None:
        """Refuse parameters of another form, and ids outside of the vocabulary."""
        ids = params.get("token_ids") if isinstance(params, dict) else None
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise InvalidParameter(
                f'custom_params is {str(params)[:80]}; expected {{"token_ids": [...]}} with ids below {vocab_size}',
                param="custom_params",
            )


disallowed_tokens = DisallowedTokens()

BUILT_IN: Mapping[str, LogitProcessor] = {"disallowed_tokens": disallowed_tokens}


def check_params(name: str, processor: LogitProcessor, params: str | None, vocab_size: int) -> None:
    """Ask a processor whether it can work with a request's `custom_params` (JSON text).

    Raises:
        InvalidParameter: it says no, whatever it raises.
    """
    check = getattr(processor, "check", None)
    if not callable(check):
        return
    try:
        check(json.loads(params) if params is not None else None, vocab_size)
    except SglError:
        raise
    except Exception as error:
        raise InvalidParameter(
            f"the logit processor {name!r} refuses custom_params: {type(error).__name__}: {error}",
            hint="the processor's check says what it expects",
            param="custom_params",
        ) from error


def load_processors(paths: Sequence[str]) -> dict[str, LogitProcessor]:
    """The registry: the built-in processors, and those at `paths` under their attribute's name.

    Args:
        paths: each `"module:attribute"`, of a function or of a class that is made without arguments.

    Raises:
        ConfigError: one cannot be imported or called, or two have the same name.

    Example:
        >>> sorted(load_processors(["operator:getitem"]))
        ['disallowed_tokens', 'getitem']
    """
    found = dict(BUILT_IN)
    for path in paths:
        module, _, name = path.partition(":")
        if not module or not name.isidentifier():
            raise _wrong(path, 'is not "module:attribute"')
        try:
            made = getattr(importlib.import_module(module), name)
            processor = made() if inspect.isclass(made) else made
        except Exception as error:
            raise _wrong(path, f"cannot be imported: {type(error).__name__}: {error}") from error
        if not callable(processor):
            raise _wrong(path, f"is {processor!r}, which cannot be called")
        if name in found:
            raise _wrong(path, f"has the name {name!r}, which is taken")
        found[name] = processor
    return found


def _wrong(path: str, what: str) -> ConfigError:
    return ConfigError(
        f"logit_processors: {path!r} {what}",
        hint="name a function that the worker can import",
        param="logit_processors",
    )
