"""Prometheus metrics under the names that users of vLLM and SGLang have in their dashboards.

Owns one registry per server: histograms that the server observes, and what the engine counts, read at each scrape.
Counters stand for what can be summed (a hit rate is two of them, divided where they are read).

The time to the first token is from when the server started a program to when the engine had the first token of its
generations, streamed or not: a stream's first delta comes with it, and of a whole value the engine reports how long
before its end it was. Programs that generate nothing have none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sgl.lang.graph import DeltaEvent, DoneEvent, Event, FailedEvent, Gen, Graph, ValueEvent

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)

_COUNTERS = {
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens, or those of encoded texts."),
    "vllm:generation_tokens": ("output_tokens", "Output tokens, forced ones included."),
    "vllm:prefix_cache_queries": ("looked_up_tokens", "Prompt tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("cached_tokens", "Prompt tokens found in the prefix cache."),
    "vllm:num_preemptions": ("retractions", "Running sequences put back because the pool was full."),
    "sglang:prompt_tokens": ("prompt_tokens", "Prompt tokens."),
    "sglang:generation_tokens": ("output_tokens", "Output tokens, forced ones included."),
    "sglang:cached_tokens": ("cached_tokens", "Prompt tokens found in the prefix cache."),
    "sgl:forwards": ("forwards", "Model steps."),
    "sgl:forced_tokens": ("forced_tokens", "Output tokens appended without sampling."),
    "sgl:accepted_tokens": ("accepted_tokens", "Drafted tokens that were kept."),
    "sgl:drafted_tokens": ("drafted_tokens", "Tokens that speculation proposed."),
    "sgl:verifications": ("verifications", "Rows of steps that had drafts."),
    "sgl:programs": ("programs", "Programs opened."),
}
_GAUGES = {
    "vllm:num_requests_running": ("num_running", "Sequences in the batch."),
    "vllm:num_requests_waiting": ("num_waiting", "Sequences before it."),
    "vllm:kv_cache_usage_perc": ("usage", "Share of the pool's pages that are held (1 is all)."),
    "sglang:num_running_reqs": ("num_running", "Sequences in the batch."),
    "sglang:num_queue_reqs": ("num_waiting", "Sequences before it."),
    "sglang:token_usage": ("usage", "Share of the pool's pages that are held (1 is all)."),
    "sglang:spec_accept_length": ("accept_len", "Tokens that a verification of drafts gives, on average."),
    "sglang:spec_accept_rate": ("accept_rate", "Share of the drafted tokens that were kept."),
    "sgl:num_programs": ("num_programs", "Open programs."),
}


class Metrics:
    """The metrics of one server; `model` is their label `model_name`."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.registry = CollectorRegistry()
        self._engine = _EngineStats(model)
        self.registry.register(self._engine)
        self._first = self._histograms("time_to_first_token_seconds", "Until the first token.", _LATENCIES)
        self._between = self._histograms("inter_token_latency_seconds", "Between outputs.", _TOKEN_LATENCIES)
        self._whole = self._histograms("e2e_request_latency_seconds", "From arrival to the end.", _LATENCIES)
        self._requests = Counter(
            "sgl:http_requests", "Answers by path and status.", ("path", "status"), registry=self.registry
        )
        self._started = self._counter("sglang:num_requests", "Programs started, and calls of an encoder.")
        self._constrained = self._counter("sglang:num_so_requests", "Programs started that have a constraint.")
        self._aborted = self._counter("sglang:num_aborted_requests", "Programs that failed or were cancelled.")
        self._ended = Counter(
            "vllm:request_success", "Generations that ended, by why.", ("model_name", "finished_reason"),
            registry=self.registry,
        )  # fmt: skip

    def _histograms(self, name: str, text: str, buckets: tuple[float, ...]) -> list[Histogram]:
        return [
            Histogram(f"{prefix}:{name}", text, ("model_name",), buckets=buckets, registry=self.registry).labels(
                self._model
            )
            for prefix in ("vllm", "sglang")
        ]

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model_name",), registry=self.registry).labels(self._model)

    def answered(self, path: str, status: int) -> None:
        """A request was answered; `path` is that of its route."""
        self._requests.labels(path, str(status)).inc()

    def watch(self, graph: Graph) -> Watch:
        """Observes a program that starts now, with this graph or first fragment."""
        self._started.inc()
        if any(isinstance(node, Gen) and node.constraint is not None for node in graph.nodes):
            self._constrained.inc()
        return Watch(self)

    def computed(self, seconds: float) -> None:
        """What is no program (texts were encoded) took so long."""
        self._started.inc()
        _observe(self._whole, seconds)

    def ended(self, reason: str) -> None:
        """A generation ended."""
        self._ended.labels(self._model, reason).inc()

    def text(self, stats: Mapping[str, Any]) -> bytes:
        """All of it in Prometheus' text format, with the engine's counters."""
        self._engine.stats = stats
        return generate_latest(self.registry)


class Watch:
    """Times the outputs of one program."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = self._last = time.monotonic()
        self._first_s: float | None = None
        self._is_told = False

    def see(self, event: Event) -> None:
        """An event came."""
        now = time.monotonic()
        match event:
            case DeltaEvent():
                if not self._is_told:
                    self._tell(now - self._start)
                else:
                    num = max(len(event.token_ids), 1)
                    _observe(self._metrics._between, (now - self._last) / num, num)
                self._last = now
            case ValueEvent():
                if not event.choices:
                    self._metrics.ended(event.finish)
                if event.first_s:
                    since_s = now - self._start - (event.latency_s - event.first_s)
                    self._first_s = since_s if self._first_s is None else min(self._first_s, since_s)
                self._last = now
            case DoneEvent():
                if not self._is_told and self._first_s is not None:
                    self._tell(self._first_s)
                _observe(self._metrics._whole, now - self._start)
            case FailedEvent():
                self._metrics._aborted.inc()
            case _:
                pass

    def _tell(self, seconds: float) -> None:
        self._is_told = True
        _observe(self._metrics._first, max(seconds, 0.0))


def _observe(histograms: list[Histogram], seconds: float, times: int = 1) -> None:
    for histogram in histograms:
        for _ in range(times):
            histogram.observe(seconds)


class _EngineStats(Collector):
    """The engine's counters and gauges, as they were handed over last."""

    def __init__(self, model: str) -> None:
        self.stats: Mapping[str, Any] = {}
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """One family for each known name."""
        stats = dict(self.stats)
        if not stats:
            return
        stats["looked_up_tokens"] = stats["prompt_tokens"]
        if "num_padded" in stats:  # an encoder, which caches nothing
            stats["prompt_tokens"] = stats["num_tokens"] - stats["num_padded"]
        stats["output_tokens"] = stats["decode_tokens"] + stats["forced_tokens"]
        stats["accept_len"] = 1 + stats["accepted_tokens"] / max(stats["verifications"], 1)
        stats["accept_rate"] = stats["accepted_tokens"] / max(stats["drafted_tokens"], 1)
        stats["usage"] = stats["pages_held"] / max(stats["pages_total"], 1)
        for families, kind in ((_COUNTERS, CounterMetricFamily), (_GAUGES, GaugeMetricFamily)):
            for name, (field, text) in families.items():
                family = kind(name, text, labels=("model_name",))
                family.add_metric((self._model,), stats[field])
                yield family
