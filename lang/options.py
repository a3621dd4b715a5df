"""What holds for a whole run: the arguments of `run`, `run_batch` and their asynchronous twins, checked once.

Owns the names that a run takes for itself and `RunOptions`, which every way to start a program goes through. Fails with
`InvalidParameter` before anything is run.
"""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from sgl.lang.arguments import refuse
from sgl.lang.backend import Backend
from sgl.lang.branches import derived_seed
from sgl.lang.defaults import check_backend, default_backend, sampling_defaults
from sgl.lang.graph import ProgramOptions, Sampling, sampling_values
from sgl.lang.interpreter import Program
from sgl.lang.sampling import LONGEST_S, check_integer, check_number

SAMPLING = (
    "max_new_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
)
"""Arguments of a run that are sampling parameters."""

current_backend: contextvars.ContextVar[Backend | None] = contextvars.ContextVar("sgl_backend", default=None)
"""What executes the program whose body is running here: programs that it runs use it too."""


@dataclass(frozen=True)
class RunOptions:
    """What holds for a run besides the program's own arguments.

    Attributes:
        sampling: fields of `Sampling` for generations that do not say them.
        program: name, deadline, priority, streaming.
        backend: what executes it; `None` is that of the program in whose body it is run, else the default one.
        seed: of the program.
        key: under what the record of a run is found as the last one.
    """

    sampling: Mapping[str, Any]
    program: ProgramOptions
    backend: Backend | None = None
    seed: int | None = None
    key: str | None = None

    @staticmethod
    def of(
        name: str, given: Mapping[str, Any], num_api_spec_tokens: int | None = None, key: str | None = None
    ) -> RunOptions:
        """From the arguments of a run by name; others may be among them.

        Raises:
            InvalidParameter: a wrong type, or a value out of range.
            Unsupported: an argument that no backend executes yet.
        """
        refuse(return_text_in_logprobs=given["return_text_in_logprobs"])
        values = sampling_values({name: given[name] for name in SAMPLING})
        Sampling(**values)  # checks
        backend, seed, deadline_s, priority = (given[name] for name in ("backend", "seed", "deadline_s", "priority"))
        if backend is not None:
            check_backend(backend)
        if seed is not None:
            check_integer("seed", seed, low=0)
        if deadline_s is not None:
            check_number("deadline_s", deadline_s, low=0.0, high=LONGEST_S, open_low=True)
        check_integer("priority", priority, low=-(2**31), high=2**31 - 1)
        options = ProgramOptions(
            name=name,
            deadline_s=deadline_s,
            priority=priority,
            stream=bool(given.get("stream", False)),
            cache_salt=given["cache_salt"],
            chat_template_kwargs=_as_dict(given["chat_template_kwargs"]),
            num_api_spec_tokens=num_api_spec_tokens,
        )
        return RunOptions(values, options, backend, seed, key)

    def chosen(self) -> RunOptions:
        """With the backend that will execute it."""
        return replace(self, backend=self._backend())

    def _backend(self) -> Backend:
        return self.backend or current_backend.get() or default_backend()

    def row(self, index: int) -> RunOptions:
        """For one row of a batch: it has a seed of its own."""
        return self if self.seed is None else replace(self, seed=derived_seed(self.seed, "row", index))

    def start(self) -> Program:
        """A program that nothing was appended to."""
        backend = self._backend()
        sampling = msgspec.structs.replace(sampling_defaults(backend), **self.sampling)
        return Program(backend, self.program, sampling, self.seed, self.key)


def _as_dict(given: Any) -> Any:
    """A mapping as a dict; what is none is for the check to name."""
    return dict(given) if isinstance(given, Mapping) else {} if given is None else given
