"""Variables that a program gives the model's chat template: which there may be.

Owns their check, at every door where they come in. Templates read further variables (`enable_thinking`, `documents`)
and pass over what they do not know, so names are free, but for those that are not the caller's: what the conversation
itself gives, and what the template gets from the model. Fails with `InvalidParameter`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sgl.errors import InvalidParameter
from sgl.limits import DEFAULT_LIMITS

PARAM = "chat_template_kwargs"

_TAKEN = {
    "messages": "the turns are those of the program",
    "tools": "give the tools to the generation",
    "add_generation_prompt": "give it beside chat_template_kwargs",
    "continue_final_message": "give it beside chat_template_kwargs",
    "chat_template": "templates in requests are not taken: they are code",
    "strftime_now": "the time is the program's",
    "raise_exception": "it is the template's own",
}


def check_template_kwargs(given: Any) -> None:
    """Raise unless these may be given to a chat template.

    Raises:
        InvalidParameter: not a mapping, a name that is taken or cannot be a variable, a value that is no JSON, or more
            than `max_template_kwargs_bytes` of it.

    Example:
        >>> check_template_kwargs({"enable_thinking": False})
        >>> check_template_kwargs({"tools": []})
        Traceback (most recent call last):
        sgl.errors.InvalidParameter: chat_template_kwargs has 'tools' (give the tools to the generation)
    """
    if not isinstance(given, dict):
        raise InvalidParameter(f"{PARAM} is {given!r}; expected a mapping of variables to values", param=PARAM)
    if not given:
        return
    for name in given:
        if not isinstance(name, str) or not name.isidentifier():
            raise InvalidParameter(f"{PARAM} has {name!r}; expected names of variables", param=PARAM)
        if name in _TAKEN or name.endswith("_token"):
            why = _TAKEN.get(name, "special tokens are the model's")
            raise InvalidParameter(f"{PARAM} has {name!r}", hint=why, param=f"{PARAM}.{name}")
    try:
        size = len(msgspec.json.encode(given))
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidParameter(f"{PARAM} is no JSON: {error}", hint="give JSON values", param=PARAM) from None
    if size > DEFAULT_LIMITS.max_template_kwargs_bytes:
        raise InvalidParameter(
            f"{PARAM} has {size} bytes of JSON; at most {DEFAULT_LIMITS.max_template_kwargs_bytes} are allowed",
            param=PARAM,
        )
