"""What a `Gen` or `Select` needs before its requests can be made: encoded text, a compiled constraint, a seam.

Owns two jobs, which the program run starts and which may run off the step loop, where nobody touches their branch
meanwhile; and the threads for them. What they find is handed back as one value; they change nothing but the branch's
transcript.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from sgl.grammars.matcher import CompiledGrammar
from sgl.lang.graph import Gen, Select
from sgl.runtime.branch import SMALL, Branch, text_bytes, text_len
from sgl.runtime.healing import Seam, find_seam
from sgl.runtime.selection import Selection
from sgl.runtime.services import Services
from sgl.runtime.text.tokenizer import Piece, Tokenizer
from sgl.runtime.thinking import reasoning_section

_NICENESS = 10
"""A thread of the model gets ten times the time of such a thread, where both want the same core."""


def job_threads(count: int) -> ThreadPoolExecutor:
    """Threads for jobs, which give way to those of the model: what comes new slows what runs down as little as it can.
    Where a core is free they do not wait."""
    return ThreadPoolExecutor(count, thread_name_prefix="sgl-jobs", initializer=_give_way)


def _give_way() -> None:
    own = threading.get_native_id()  # Linux has a priority for each thread
    os.setpriority(os.PRIO_PROCESS, own, min(19, os.getpriority(os.PRIO_PROCESS, own) + _NICENESS))


class PreparedGen(NamedTuple):
    """The ids of the pending unit and the bytes of program text in it, the compiled constraint, and the seam."""

    ids: list[int]
    num_bytes: int
    grammar: CompiledGrammar | None
    seam: Seam | None


class PrepareGen:
    """The job before a `Gen`.

    Args:
        node, branch: what to draw, behind what.
        services: the engine core.
        program: its name, for fault points.
    """

    def __init__(self, node: Gen, branch: Branch, services: Services, program: str) -> None:
        sampling = node.sampling
        self._node = node
        self._branch = branch
        self._services = services
        self._program = program
        self._reasons = node.reasoning is not None or sampling.max_reasoning_tokens is not None
        self._heals = sampling.token_healing and sampling.max_new_tokens > 0 and not self._reasons

    @property
    def is_small(self) -> bool:
        """Whether it may run at once."""
        plain = self._node.constraint is None and not self._reasons and not self._heals
        return plain and text_len(self._branch.transcript.pending_pieces) < SMALL

    def __call__(self) -> PreparedGen:
        grammar = self._compiled()
        ids, num_bytes = self._branch.encode_unit()
        seam = find_seam(self._services.tokenizer, ids, grammar) if self._heals else None
        return PreparedGen(ids, num_bytes, grammar, seam)

    def _compiled(self) -> CompiledGrammar | None:
        services, constraint = self._services, self._node.constraint
        if services.faults is not None and constraint is not None:
            services.faults.reach("in_compile", self._program)
        backend = None if self._node.sampling.grammar_backend == "auto" else self._node.sampling.grammar_backend
        grammar = services.compiler.compile(constraint, backend) if constraint is not None else None
        if grammar is not None:
            # Looked for here, off the step loop, and kept.
            services.compiler.closer.start(grammar, self._node.sampling.max_new_tokens)
        return self._after_reasoning(grammar) if self._reasons else grammar

    def _after_reasoning(self, grammar: CompiledGrammar | None) -> CompiledGrammar | None:
        """The constraint behind the node's reasoning, which has its budget."""
        template = self._services.tokenizer.chat_template
        source = template.source if template is not None else None
        section = reasoning_section(self._node, self._branch.transcript.text, source)
        return grammar if section is None else self._services.compiler.after_reasoning(section, grammar)


def encode_options(
    node: Select, pending: Sequence[Piece], tokenizer: Tokenizer, *, start: bool
) -> tuple[Selection, list[int], int]:
    """The job before a `Select`: its options behind the pending unit, the unit's ids, the bytes of program text in it.

    Args:
        start: nothing stands before the unit.
    """
    unit, encoded = tokenizer.encode_continuations(pending, node.choices, start)
    return Selection(unit, encoded), unit, text_bytes(pending)
