"""What a request may ask for, as one value.

Owns the numbers that bound a request before any work is done for it: each with its default, its meaning and the reason
for the default. Checked at the door by the code that owns the field concerned; what nothing enforces is not listed.
Standard library and msgspec only, so that every room may import it.
"""

from __future__ import annotations

from typing import Annotated, get_args, get_type_hints

import msgspec
from msgspec import Meta

# Those that an operator gives an engine at its start; `EngineConfig` has a field of the same name and type for each.
MaxStopRegexS = Annotated[
    float,
    Meta(gt=0, le=3600, description="CPU time that the stop patterns of one generation take in all; then it fails."),
]
MaxCompileS = Annotated[float, Meta(gt=0, le=3600, description="Seconds of compiling one constraint.")]
MaxCompileBytes = Annotated[int, Meta(ge=1, le=2**40, description="Memory of compiling one constraint.")]
MaxQueue = Annotated[
    int,
    Meta(
        ge=1, le=2**31 - 1, description="Programs waiting for their first step, branches not counted; more are refused."
    ),
]
MaxQueueS = Annotated[
    float, Meta(gt=0, le=1e9, description="Seconds that a program waits for its first step at most; then it fails.")
]

ENGINE_LIMITS = ("max_stop_regex_s", "max_compile_s", "max_compile_bytes", "max_queue", "max_queue_s")
"""The others bound what a request may say; clients check them as engines do, so they are the same everywhere."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds on one request. Units are in the names (`_bytes`, `_s`, `_len` in tokens).

    Example:
        >>> Limits(max_stops=4).max_stops
        4
        >>> [name for name, _, _ in describe() if name == "max_json_depth"]
        ['max_json_depth']
    """

    max_prompt_bytes: Annotated[
        int, Meta(ge=1, description="Text of one unit, checked before tokenizing, which costs about 1.5 s per MB.")
    ] = 4 * 2**20
    max_json_depth: Annotated[
        int, Meta(ge=1, description="Nesting of a JSON body or schema; Python's own recursion limit varies.")
    ] = 64
    max_stops: Annotated[int, Meta(ge=0, description="Stop strings of one generation; each is searched per token.")] = (
        16
    )
    max_stop_bytes: Annotated[
        int, Meta(ge=1, description="One stop string; also the most text a stream can hold back.")
    ] = 256
    max_stop_regex_bytes: Annotated[int, Meta(ge=1, description="One stop pattern.")] = 1024
    max_stop_regex_s: MaxStopRegexS = 1.0
    max_stop_token_ids: Annotated[int, Meta(ge=0, description="Stop token ids of one generation.")] = 1024
    max_logit_bias: Annotated[
        int, Meta(ge=0, description="Biased token ids; each is written for every token drawn.")
    ] = 1024
    max_custom_params_bytes: Annotated[int, Meta(ge=0, description="JSON text handed to a custom logit processor.")] = (
        64 * 2**10
    )
    max_n: Annotated[int, Meta(ge=1, description="Samples drawn from one prompt; each is a sequence.")] = 16
    max_logprobs: Annotated[int, Meta(ge=0, description="Top log-probabilities per position.")] = 20
    max_logprob_ids: Annotated[
        int, Meta(ge=0, description="Token ids whose log-probabilities are returned at every position.")
    ] = 256
    max_logit_rows: Annotated[
        int, Meta(ge=1, description="Scored positions in one step; each costs a row of the vocabulary, 200 KB of it.")
    ] = 128
    max_choices: Annotated[
        int, Meta(ge=1, description="Options of one select, each a scored sequence; scored rows of options in a step.")
    ] = 1024
    max_template_kwargs_bytes: Annotated[
        int, Meta(ge=0, description="JSON text of a program's variables for the chat template, read at every turn.")
    ] = 16 * 2**10
    max_schema_bytes: Annotated[int, Meta(ge=1, description="JSON schema, regex or grammar text.")] = 64 * 2**10
    max_shortest_bytes: Annotated[
        int, Meta(ge=1, description="Shortest text that a constraint allows; engines write a forced one out at once.")
    ] = 512 * 2**10
    max_compile_s: MaxCompileS = 2.0
    max_compile_bytes: MaxCompileBytes = 256 * 2**20
    max_graph_nodes: Annotated[
        int, Meta(ge=1, description="Nodes of one submitted graph; a longer program submits fragments.")
    ] = 100_000
    max_fork: Annotated[
        int, Meta(ge=1, description="Children of one fork; each costs a few kilobytes on the host.")
    ] = 10_000
    max_prompts: Annotated[
        int, Meta(ge=1, description="Sequences of one `generate` call (prompts times n), half of the queue.")
    ] = 50_000
    max_call_tokens: Annotated[
        int, Meta(ge=1, description="Prompt tokens of one `generate` call; text counts its bytes, which are more.")
    ] = 2**26
    max_queue: MaxQueue = 100_000
    max_queue_s: MaxQueueS = 600.0


DEFAULT_LIMITS = Limits()


def describe() -> list[tuple[str, object, str]]:
    """(name, default, meaning) of every limit, for `sgl doctor` and the documentation."""
    hints = get_type_hints(Limits, include_extras=True)
    return [
        (
            field.name,
            field.default,
            next(m.description or "" for m in get_args(hints[field.name]) if isinstance(m, Meta)),
        )
        for field in msgspec.structs.fields(Limits)
    ]
