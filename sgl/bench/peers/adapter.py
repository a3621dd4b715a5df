"""The one class to write for a new peer.

An adapter lives in a process of its own (`sgl.bench.peers.host`), is built once from a `Load`, and is called from one
thread. It may start processes (a server, say): as its children they count as the side's own load, and `close` ends
them. What a peer cannot do it leaves to the defaults here, and the report says so.

Example:
    A peer behind an HTTP server needs `__init__` (start it, wait until it is ready), `loaded`, `generate` (one request
    per prompt, sent together) and `close`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from sgl.bench.peers.messages import Load, Loaded, Tuned


class Adapter(ABC):
    """Drives one engine.

    Args:
        load: the model and how to run it. Its dtype, device and number of threads are orders, not hints: the harness
            compares them with `loaded()` and refuses sides that differ.
    """

    @abstractmethod
    def __init__(self, load: Load) -> None: ...

    @abstractmethod
    def loaded(self) -> Loaded:
        """How the model runs, as found in the engine rather than as asked for."""

    @abstractmethod
    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """New tokens of each prompt: greedy, all prompts together, end-of-sequence ignored. This is what is timed."""

    def forget(self) -> None:
        """Drop what is cached of earlier prompts. Not timed."""
        return

    def tune(self, prompts: list[list[int]], new_tokens: int) -> Tuned:
        """Choose the fastest settings for such a call."""
        del prompts, new_tokens
        return Tuned()

    def preferred(self, texts: list[list[int]], start: int) -> list[list[int]] | None:
        """The most likely token after each position of each text, from position `start` on. By itself it lets the peer
        continue the text up to where it says something else, and again behind that place."""
        return [self._preferred(text, start) for text in texts]

    def weights_digest(self) -> str | None:
        """`sgl.bench.peers.weights.digest` of the weights as they are computed with."""
        return None

    def close(self) -> None:
        """Free everything, processes included."""
        return

    def _preferred(self, text: list[int], start: int) -> list[int]:
        liked: list[int] = []
        while (known := start + 1 + len(liked)) <= len(text):
            (said,) = self.generate([text[:known]], len(text) + 1 - known)
            same = [one == other for one, other in zip(said, text[known:], strict=False)]
            liked += said[: [*same, False].index(False) + 1]
        return liked
