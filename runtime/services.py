"""What a program run asks of the engine core: the protocol between the two, so that neither imports the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from sgl.errors import SglError
from sgl.grammars.compiler import GrammarCompiler
from sgl.lang.graph import Event
from sgl.limits import Limits
from sgl.runtime.config import ResolvedConfig
from sgl.runtime.faults import FaultPoints
from sgl.runtime.processors import LogitProcessor
from sgl.runtime.scheduler import Scheduler
from sgl.runtime.sequence import Request
from sgl.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sgl.runtime.program_run import ProgramRun


class Services(Protocol):
    """The engine core as its programs see it."""

    epoch: str
    config: ResolvedConfig
    limits: Limits
    scheduler: Scheduler
    tokenizer: Tokenizer
    compiler: GrammarCompiler
    processors: Mapping[str, LogitProcessor]
    faults: FaultPoints | None

    def now(self) -> float:
        """Seconds of the engine's clock."""

    def emit(self, program: int, event: Event) -> None:
        """Send an event to the client."""

    def run_job(self, job: Callable[[], Any], done: Callable[[Any, SglError | None], None], *, small: bool) -> None:
        """Run `job` off the step loop (at once when `small`) and call `done` on the core's thread."""

    def watch(self, request: Request, run: ProgramRun) -> None:
        """Tell `run` when `request` gets something."""

    def expect_end(self, run: ProgramRun) -> None:
        """Time may end `run` (see `expires_at`) at another moment than before."""

    def ended(self, run: ProgramRun, sequences: Iterable[int]) -> None:
        """`run` is over; `sequences` had requests of it."""
