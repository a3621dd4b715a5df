"""The program workloads for a peer: each generation of a program as one request to a library.

Owns a backend of plain requests (`sgl.bench.plain`) that are answered by somebody else, and what each workload takes of
a peer. Prompts are text: roles are rendered with the model's own chat template here, as a client of a completion API
does, and what was generated goes back as text. A generation of no tokens, which only fills our cache, is not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from sgl.bench.program_requests import Request
from sgl.errors import SglError, Unsupported
from sgl.grammars.spec import JsonSchema, Regex
from sgl.lang.backend import EventSink
from sgl.lang.graph import (
    DoneEvent,
    FailedEvent,
    Gen,
    Graph,
    LiteralText,
    ProgramOptions,
    Role,
    Select,
    StateText,
    Text,
    ValueEvent,
)
from sgl.runtime.rendering import ModelRenderer

Ask = Callable[[Request, Callable[["str | SglError"], None]], None]
"""Sends a request; the callback gets its text, or why there is none, on some thread."""

NEEDS: dict[str, tuple[str, ...]] = {
    "mmlu": ("exact",),
    "hellaswag": ("choose",),
    "gsm8k": ("exact",),
    "dspy_rag": ("exact",),
    "in_batch_prefix": ("exact",),
    "react": ("exact",),
    "generative_agents": ("exact",),
    "tree_of_thought": ("exact", "sample"),
    "tip_suggestion": ("exact",),
    "llm_judge": ("exact",),
    "multi_chain_reasoning": ("exact", "sample"),
    "json_jump_forward": ("match",),
    "json_schema": ("fill",),
    "long_json_decode": ("exact",),
    "multi_turn_chat": ("exact",),
    "multi_document_qa": ("exact",),
    "hierarchical_cache": ("exact",),
}
"""Of `sgl.bench.program_requests.ABILITIES`, what a peer must have for each workload to be the same work."""


class PeerBackend:
    """Answers graphs of one generation by asking a peer. Used as a context manager.

    Args:
        renderer: of the model, for its chat template.
    """

    def __init__(self, ask: Ask, renderer: ModelRenderer) -> None:
        self.ask = ask
        self.renderer = renderer
        self.later = ThreadPoolExecutor(1, thread_name_prefix="sgl-bench-peer")

    def open(self, sink: EventSink, options: ProgramOptions) -> PeerSession:
        """Start a request (see `sgl.lang.backend`)."""
        return PeerSession(self, sink)

    def flush_cache(self) -> bool:
        """False: the peer's caches are emptied by whoever runs it."""
        return False

    def server_info(self) -> Mapping[str, Any]:
        """Nothing: the report has what the peer says."""
        return {}

    def shutdown(self) -> None:
        """End the thread; the peer is not owned."""
        self.later.shutdown()

    def __enter__(self) -> PeerBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class PeerSession:
    """One request (see `sgl.lang.backend.Session`)."""

    def __init__(self, backend: PeerBackend, sink: EventSink) -> None:
        self._backend = backend
        self._sink = sink

    def submit(self, graph: Graph, *, finish: bool = False) -> None:
        """Send it.

        Raises:
            Unsupported: something else than a prompt and one generation, or a constraint that peers are not given.
        """
        *before, asked = graph.nodes
        if not isinstance(asked, Gen | Select):
            raise Unsupported(f"a request to a peer ends with {type(asked).__name__}; expected Gen or Select")
        state = self._backend.renderer.state()
        for node in before:
            match node:
                case Text():
                    state.add_text("".join(part.text for part in node.segments if isinstance(part, LiteralText)))
                case Role(role=role, begin=begin):
                    state.begin(role) if begin else state.end()
                case _:
                    raise Unsupported(f"{type(node).__name__} nodes are not text for a peer")
        request, done = request_of(state.text, asked), partial(self._answered, asked)
        if request.max_tokens:
            self._backend.ask(request, done)
        else:
            self._backend.later.submit(done, "")  # the sink is not called before this returns

    def read_state(self, branch: int) -> Future[StateText]:
        """Not possible.

        Raises:
            Unsupported: always.
        """
        raise Unsupported("a peer keeps no state that could be read")

    def cancel(self) -> None:
        """Nothing: what was sent is answered."""

    def _answered(self, asked: Gen | Select, answer: str | SglError) -> None:
        if isinstance(answer, SglError):
            self._sink(FailedEvent(error=answer.to_info(), node=asked.id, branch=asked.branch))
            return
        self._sink(ValueEvent(node=asked.id, branch=asked.branch, name=asked.name, value=answer))
        self._sink(DoneEvent())


def request_of(prompt: str, node: Gen | Select) -> Request:
    """A generation behind a prompt, as a peer is asked for it.

    Raises:
        Unsupported: a constraint that is neither a schema nor a regular expression.

    Example:
        >>> request_of("2 + 2 =", Select(id=0, name="sum", choices=("4", "5"))).options
        ('4', '5')
    """
    if isinstance(node, Select):
        return Request(prompt=prompt, options=node.choices)
    sampling = node.sampling
    match node.constraint:
        case None:
            constraint: dict[str, Any] = {}
        case JsonSchema(schema=schema):
            constraint = {"schema": schema}
        case Regex(pattern=pattern):
            constraint = {"regex": pattern}
        case _:
            raise Unsupported(f"a peer is not asked for {type(node.constraint).__name__} constraints")
    return Request(
        prompt=prompt,
        max_tokens=sampling.max_new_tokens,
        stop=sampling.stop,
        exact=sampling.ignore_eos,
        temperature=sampling.temperature,
        seed=sampling.seed,
        **constraint,
    )
