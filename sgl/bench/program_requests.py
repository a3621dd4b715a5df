"""What a library is asked for, and the driver that asks it: requests in, texts out.

Owns `Request`, `Driver` and the names of what a request may need. `sgl.bench.program_tasks` writes tasks with it,
`sgl.bench.program_workloads` turns the generations of our programs into requests, and the drivers of
`sgl.bench.program_drivers` and `sgl.bench.program_servers` answer them, in the peer's own process and interpreter: so
this needs msgspec and nothing of ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec

ABILITIES = {
    "choose": "options",
    "fill": "JSON schemas",
    "match": "regular expressions",
    "exact": "outputs of an exact number of tokens",
    "sample": "seeded sampling",
}
"""What a driver may be able to do beside greedy generation, in words for the report."""

CHOICE_TOKENS = 64
"""Most tokens of an option, for libraries that want a bound."""

Done = Callable[[int, "str | Exception"], None]
"""Called with a request's number and its text, or why there is none; on any thread."""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One generation: greedy unless `temperature` is given.

    Attributes:
        max_tokens: at most; of options it is not asked.
        stop: strings that end it, and are not part of the text.
        exact: neither the end of the sequence nor anything else ends it before `max_tokens`.
        options: the text is one of them.
        schema: the text is a JSON value that is valid under this schema (JSON text).
        regex: the text matches it, as a whole.
    """

    prompt: str
    max_tokens: int = CHOICE_TOKENS
    stop: tuple[str, ...] = ()
    exact: bool = False
    options: tuple[str, ...] = ()
    schema: str = ""
    regex: str = ""
    temperature: float = 0.0
    seed: int | None = None

    @property
    def needs(self) -> frozenset[str]:
        """Which of `ABILITIES` it takes."""
        needs = {
            "choose": self.options,
            "fill": self.schema,
            "match": self.regex,
            "exact": self.exact,
            "sample": self.temperature,
        }
        return frozenset(name for name, value in needs.items() if value)


class Driver(ABC):
    """A library that generates.

    Attributes:
        can: which of `ABILITIES` it has.
        settings: what was chosen for it, for the report.
        variants: ways to run it among which only a measurement can decide; the comparison keeps the fastest of a task.
        gathers: whether requests that arrive within a moment are answered as one batch. Without it they are started as
            they come, for engines that batch by themselves.
    """

    can: ClassVar[frozenset[str]]
    settings: ClassVar[dict[str, str]]
    variants: ClassVar[tuple[str, ...]] = ("",)
    gathers: ClassVar[bool] = True

    @abstractmethod
    def answer(self, requests: Sequence[Request]) -> list[str]:
        """The text of each request, in order."""

    def start(self, requests: Sequence[Request], done: Done) -> None:
        """Answer requests, telling each when it is known; may return before."""
        try:
            answers: Sequence[str | Exception] = self.answer(requests)
        except Exception as error:  # noqa: BLE001 - of whatever library this is: each request is told
            answers = [error] * len(requests)
        for number, text in enumerate(answers):
            done(number, text)

    def use(self, variant: str) -> None:
        """Run as one of `variants` from now on."""
        return

    def forget(self) -> None:
        """Drop what is kept of earlier prompts. Not timed."""
        return

    def close(self) -> None:
        """End what it started."""
        return

    # --- in which tasks are written ---

    def generate(self, prompts: Sequence[str], max_tokens: int, stop: str) -> list[str]:
        """Greedy continuations, up to `stop`, which is not part of them."""
        return self.answer([Request(prompt=each, max_tokens=max_tokens, stop=(stop,)) for each in prompts])

    def choose(self, prompts: Sequence[str], options: Sequence[str]) -> list[str]:
        """For each prompt one of the options."""
        return self.answer([Request(prompt=each, options=tuple(options)) for each in prompts])

    def fill(self, prompts: Sequence[str], schema: str, max_tokens: int) -> list[str]:
        """For each prompt a JSON text that is valid under the schema."""
        return self.answer([Request(prompt=each, schema=schema, max_tokens=max_tokens) for each in prompts])


def grouped(requests: Sequence[Request], key: Callable[[Request], object]) -> list[list[int]]:
    """Numbers of the requests that have the same key, group after group in order of appearance."""
    groups: dict[object, list[int]] = {}
    for number, request in enumerate(requests):
        groups.setdefault(key(request), []).append(number)
    return list(groups.values())


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stops."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
