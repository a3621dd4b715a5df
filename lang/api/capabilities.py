"""What an endpoint can do, said before it is asked.

Owns the declaration. Backends have a default for the endpoint that they are named after; whoever runs another server
behind the same interface says what it can do: `sgl.OpenAI(..., capabilities={"regex": True})`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from sgl.errors import ConfigError


@dataclass(frozen=True)
class Capabilities:
    """What an endpoint offers.

    Attributes:
        is_chat: it takes turns; otherwise it continues a text.
        prefill: a chat endpoint continues an assistant turn that has begun.
        top_logprobs: most probable tokens that it names for a position; 0 for none.
        echo_logprobs: a completion endpoint scores the prompt (`echo`).
        json_schema: it holds its answer to a JSON schema; `regex`, `ebnf`: to these.
        tools: it takes tool definitions and writes calls.
        images, video: parts that it takes besides text.
        seed: it takes a seed.
        chat_template_kwargs: it takes variables for its chat template, as SGLang's and vLLM's servers do.
        max_stops: stop strings that it takes; the rest is looked for here.
        max_temperature: the highest that it takes.
        sampling: fields of `Sampling` that it takes besides temperature, top_p, stops and the budget; a generation that
            sets another one is refused.
    """

    is_chat: bool = True
    prefill: bool = False
    top_logprobs: int = 0
    echo_logprobs: bool = False
    json_schema: bool = False
    regex: bool = False
    ebnf: bool = False
    tools: bool = False
    images: bool = False
    video: bool = False
    seed: bool = False
    chat_template_kwargs: bool = False
    max_stops: int = 4
    max_temperature: float = 2.0
    sampling: tuple[str, ...] = ("frequency_penalty", "presence_penalty")

    def changed(self, given: Mapping[str, object] | None) -> Capabilities:
        """These, with those that the user declares.

        Raises:
            ConfigError: an unknown name.

        Example:
            >>> Capabilities().changed({"regex": True}).regex
            True
        """
        known = {field.name for field in fields(self)}
        for name in given or {}:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise ConfigError(
                    f"no capability {name!r}", hint=f"did you mean {near[0]!r}?" if near else ", ".join(sorted(known))
                )
        return replace(self, **dict(given or {}))  # type: ignore[arg-type]
