"""One program while it runs in the engine: its nodes, requests and events.

Owns what a program does: the execution of its nodes, its requests, its end. Which branches there are and what waits for
what is `program_flow`'s; their text and ids, `program_text`'s; what precedes a generation, `program_jobs`'; how long it
may all take, `program_time`'s. Does not own pages, the tree or any step: it asks the scheduler to fork, release, and to
run requests. Called only from the engine core's thread, except that jobs (encoding text, compiling a constraint) may
run elsewhere; a branch with a job is busy and nobody touches it meanwhile.

A branch executes its nodes in order and stops at one that has to wait: for a value, for a join, for its request. What
fails ends the whole program: every request is aborted, every page let go, and one `FailedEvent` names the node.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from sgl.errors import (
    Cancelled,
    ErrorInfo,
    InvalidProgram,
    SglError,
    SourceLocation,
    StateLost,
    Unsupported,
)
from sgl.grammars.matcher import CompiledGrammar
from sgl.lang.graph import (
    MAIN_BRANCH,
    DoneEvent,
    FailedEvent,
    Fork,
    Gen,
    Graph,
    HandlesEvent,
    Join,
    JoinedEvent,
    Mark,
    Node,
    ProgramOptions,
    Release,
    Rewind,
    Role,
    Select,
    StateHandle,
    StateText,
    Text,
    Tokens,
    Usage,
    ValueEvent,
    validate,
)
from sgl.runtime.admission import check_generations
from sgl.runtime.branch import SMALL, Branch, Read, Reply, text_len
from sgl.runtime.cache_key import CacheKey
from sgl.runtime.failures import internal_error, typed
from sgl.runtime.healing import Seam
from sgl.runtime.lookahead import path_lengths
from sgl.runtime.next_use import Lane, next_uses
from sgl.runtime.program_flow import ProgramFlow, stuck
from sgl.runtime.program_gen import Drawing
from sgl.runtime.program_jobs import PrepareGen, encode_options
from sgl.runtime.program_select import OptionScoring
from sgl.runtime.program_text import ProgramText
from sgl.runtime.program_time import Lifetime
from sgl.runtime.selection import Selection
from sgl.runtime.sequence import ProgramInfo, Request
from sgl.runtime.sequence import Sequence as TokenSequence
from sgl.runtime.services import Services
from sgl.runtime.text.template import template_clock
from sgl.runtime.text.transcript import Transcript

MOST_NODES = 2000
"""Nodes of a program that are executed in one go, some 50 ms: then it is the turn of others."""


class ProgramRun:
    """Executes the fragments of one program.

    Args:
        id: number of the program in this engine.
        options: deadline, priority, streaming.
        services: the engine core.
    """

    def __init__(self, id: int, options: ProgramOptions, services: Services) -> None:
        self.id = id
        self.options = options
        self.ended = False
        self._info = ProgramInfo(id, options.name)
        self._path_lengths: dict[int, int] = {}
        self._services = services
        self._scheduler = services.scheduler
        self._time = Lifetime(options, services.config.state_lease, services.now())
        self._text = ProgramText(id, options, services, self._count)
        self._namespace = CacheKey(salt=options.cache_salt, program=id if services.config.disable_radix_cache else None)
        self._work: dict[int, Drawing | OptionScoring] = {}  # by sequence
        self._depth = 0
        self._num_pauses = 0
        self._finish = False
        self._usage = Usage()
        self._next_uses: dict[int, float | None] | None = None  # by sequence; made when asked for
        self._failed_at: tuple[int | None, int | None] = (None, None)
        main = Branch(
            MAIN_BRANCH,
            self._scheduler.new_sequence(self._namespace, owner=self),
            Transcript(
                services.tokenizer,
                services.config.rerender,
                {**options.chat_template_kwargs, **template_clock(options.now)},
            ),
        )
        self._flow = ProgramFlow(main)
        self._branches = self._flow.branches

    # --- called by the engine core ---

    def submit(self, graph: Graph, *, finish: bool) -> None:
        """Queue a fragment and go as far as it goes. Never raises: what is wrong ends the program."""
        try:
            self._flow.check_handles(graph, self._services.epoch)
            validate(graph, self._flow.known)
            check_generations(graph, self._services.tokenizer.vocab_size, self._services.processors)
            self._take(graph, finish=finish)
        except Exception as error:  # noqa: BLE001 - a bug in one program must not end the others
            self._fail_by(error)

    def _take(self, graph: Graph, *, finish: bool) -> None:
        self._time.go_on()
        self._path_lengths.update(path_lengths(graph))
        touched = self._flow.take(graph)
        self._finish = self._finish or finish
        self._advance(touched)

    def read_state(self, branch_id: int, reply: Reply) -> None:
        """Answer with the branch's text once everything queued on it is done."""
        if not self._flow.queue_read(branch_id, Read(reply)):
            reply(None, StateLost(f"branch {branch_id} is not alive", hint="read a state before it is released"))
            return
        try:
            self._advance([branch_id])
        except Exception as error:  # noqa: BLE001 - a bug in one program must not end the others
            self._fail_by(error)

    def on_request(self, request: Request) -> None:
        """A step gave `request` something."""
        work = self._work.get(request.sequence.id)
        if self.ended or work is None or not (request.done or self.options.stream):
            return  # nobody is to be told
        try:
            self._failed_at = (work.node.id, work.branch.id)
            if request.failed is not None:
                raise SglError.from_info(ErrorInfo(*request.failed)).at(work.node.location)
            self._on_result(work, request)
        except Exception as error:  # noqa: BLE001 - a bug in one program must not end the others
            self._fail_by(error)

    @property
    def expires_at(self) -> float | None:
        """When time ends it on the engine's clock, if nothing happens before (see `Lifetime`)."""
        return self._time.ends_at

    def check_time(self, now: float) -> None:
        """Fail the program when its time, or the lease of its state, is over."""
        if not self.ended and (error := self._time.over(now)) is not None:
            self.fail(error)

    def cancel(self) -> None:
        """End the program because the client says so."""
        if not self.ended:
            self._failed_at = (None, None)
            self.fail(Cancelled(f"program {self.options.name!r} was cancelled"))

    def fail(self, error: SglError) -> None:
        """End the program with `error`."""
        if self.ended:
            return
        node, branch = self._failed_at
        self._services.emit(self.id, FailedEvent(error=error.to_info(), node=node, branch=branch))
        self._close(StateLost(f"program {self.options.name!r} failed: {error.message}"))

    def _fail_by(self, error: Exception, location: SourceLocation | None = None) -> None:
        """End the program with what its own work raised, at `location` unless it says where."""
        self.fail(typed(f"program {self.options.name!r} failed", error).at(location))

    def next_use(self, sequence: TokenSequence) -> float | None:
        """The step in which a state of this program will be computed on: infinite when its graph ends without, `None`
        when that depends on fragments to come."""
        if self._next_uses is None:
            self._next_uses = self._foresee()
        return self._next_uses.get(sequence.id)

    def _foresee(self) -> dict[int, float | None]:
        values: dict[tuple[int, str], float] = dict.fromkeys(self._flow.names, 0.0)
        delays: dict[int, float] = {}
        for work in self._work.values():
            delays[work.branch.id] = values[work.branch.id, work.node.name] = float(work.steps_left)
        # The node of a busy branch is out of the queue as soon as it runs, and in front of it while a job prepares it.
        lanes = {id: Lane(tuple(branch.queue), delays.get(id, 0.0)) for id, branch in self._branches.items()}
        uses = next_uses(lanes, self._flow.unborn, values, self._flow.lineage)
        now = self._scheduler.step + 1
        return {
            branch.sequence.id: now + uses[id] if id in uses else (math.inf if self._ends(branch) else None)
            for id, branch in self._branches.items()
        }

    def _ends(self, branch: Branch) -> bool:
        """Whether nothing can follow on a branch but what is queued on it."""
        return self._finish or (bool(branch.queue) and isinstance(branch.queue[-1], Release))

    # --- executing nodes ---

    def _advance(self, branches: Iterable[int]) -> None:
        """Execute what can be executed, starting with `branches`, and end the program when nothing is left."""
        if self.ended:
            return
        self._next_uses = None
        ready = deque(sorted(branches))
        self._depth += 1
        left = MOST_NODES
        while ready and left and not self.ended:
            branch = self._branches.get(ready.popleft())
            if branch is None:
                continue
            while branch.queue and not branch.busy and not self.ended:
                if not left:
                    ready.append(branch.id)
                    break
                left -= 1
                node = branch.queue[0]
                self._failed_at = (None, None) if isinstance(node, Read) else (node.id, branch.id)
                try:
                    born = self._execute(branch, node)
                except Exception as error:  # noqa: BLE001 - a bug in one program must not end the others
                    self._fail_by(error, None if isinstance(node, Read) else node.location)
                    break
                if born is None:
                    break
                branch.queue.popleft()
                ready.extend(born)
            ready.extend(self._flow.woken_by(branch))
        self._depth -= 1
        if ready and not self.ended:  # others have their turn in between
            self._num_pauses += 1
            self._services.run_job(tuple, partial(self._go_on, tuple(ready)), small=False)
        if self._depth == 0:  # a job that ran at once advances from within: whoever called it is not done yet
            self._maybe_finish()

    def _go_on(self, branches: Sequence[int], result: object, error: SglError | None) -> None:
        """A pause is over."""
        self._num_pauses -= 1
        self._advance(branches)

    def _execute(self, branch: Branch, node: Node | Read) -> Sequence[int] | None:
        """Run one node; the branches that it gave something to do, or `None` when it has to wait.

        A node that waits says for what, so that one end wakes those that it concerns: a program of 500 branches has 500
        releases that wait for one join.
        """
        match node:
            case Read():
                text = branch.transcript.text
                node.reply(StateText(text=text, token_ids=tuple(branch.sequence.token_ids)), None)
            case Text():
                if (written := self._flow.text_of(branch, node)) is None:
                    self._text.stream(branch)
                    return None
                self._text.write(branch, written)
                if not (len(branch.queue) > 1 and isinstance(branch.queue[1], Text)):  # else with the next
                    self._text.stream(branch)
            case Role():
                if branch.transcript.is_empty:
                    node = self._text.take_turns(branch, self._flow.beginning_of) or node
                branch.busy = True
                self._text.count_turn(branch)
                self._services.run_job(
                    partial(branch.turn, node),
                    partial(self._guarded, branch, node, self._turned),
                    small=not branch.has_long_turn,
                )
                return None if branch.busy else ()
            case Tokens() | Fork() | Mark() if branch.has_long_unit:
                branch.busy = True
                self._services.run_job(
                    branch.encode_unit, partial(self._guarded, branch, node, self._flushed), small=False
                )
                return None
            case Tokens():
                self._text.append_ids(branch, node.token_ids)
            case Gen():
                branch.busy = True
                branch.started_at = self._services.now()
                self._prepare_gen(branch, node)
            case Select():
                branch.busy = True
                branch.started_at = self._services.now()
                self._text.reopen(branch)
                pending = branch.transcript.pending_pieces
                self._services.run_job(
                    partial(encode_options, node, pending, self._services.tokenizer, start=not len(branch.sequence)),
                    partial(self._guarded, branch, node, self._start_select),
                    small=len(node.choices) * text_len(pending) < SMALL,
                )
            case Fork():
                self._text.flush(branch)
                self._text.hold(branch, len(node.children))
                for child_id in node.children:
                    sequence = self._scheduler.fork(branch.sequence)
                    self._flow.bear(Branch(child_id, sequence, branch.transcript.copy()))
                return node.children
            case Join():
                if not self._flow.joins(branch, node):
                    return None
                if node.mode == "append":
                    self._text.append_children(branch, [self._branches[child_id] for child_id in node.children])
                self._flow.joined(node)
                self._services.emit(self.id, JoinedEvent(node=node.id, branch=branch.id))
                return node.children
            case Release():
                if self._flow.is_read_by_join(branch.id):
                    return None
                self._scheduler.release(branch.sequence)
                self._text.let_go(branch)
                self._flow.bury(branch)
            case Mark():
                self._text.mark(branch, node.label)
            case Rewind():
                self._text.rewind(branch, node)
            case _:
                raise Unsupported(
                    f"the local engine cannot execute {type(node).__name__} nodes",
                    hint="use a backend that can, or leave it out",
                    location=node.location,
                )
        return ()

    def _turned(self, branch: Branch, node: Node) -> None:
        """A turn has begun or ended."""
        branch.busy = False
        self._text.follow_template(branch)
        self._text.stream(branch)
        if self._depth == 0:  # in a job: whoever began it has gone on elsewhere
            branch.queue.popleft()
            self._advance([branch.id])

    def _flushed(self, branch: Branch, node: Node, ids: list[int], num_bytes: int) -> None:
        """A long unit is encoded: the node that ended it can run now."""
        self._text.append_unit(branch, ids, num_bytes)
        branch.busy = False
        self._advance([branch.id])

    # --- generations ---

    def _prepare_gen(self, branch: Branch, node: Gen) -> None:
        job = PrepareGen(node, branch, self._services, self.options.name)
        self._services.run_job(job, partial(self._guarded, branch, node, self._start_gen), small=job.is_small)

    def _guarded(
        self, branch: Branch, node: Node, start: Callable[..., None], result: Any, error: SglError | None
    ) -> None:
        """A job is done: go on with `start`, unless the program ended meanwhile."""
        if self.ended:
            return
        self._failed_at = (node.id, branch.id)
        try:
            if error is not None:
                raise error
            start(branch, node, *result)
        except Exception as failure:  # noqa: BLE001 - a bug in one program must not end the others
            self._fail_by(failure, node.location)

    def _start_gen(
        self,
        branch: Branch,
        node: Gen,
        ids: list[int],
        num_bytes: int,
        grammar: CompiledGrammar | None,
        seam: Seam | None,
    ) -> None:
        self._text.stream(branch)
        if seam is not None and len(branch.sequence) + len(ids) > 1 and branch.transcript.take_back(seam.text):
            branch.num_streamed -= len(seam.text) if self.options.stream else 0
            ids = ids[:-1]
            self._count(Usage(healed_tokens=1))
        else:
            seam = None
        self._text.append_unit(branch, ids, num_bytes)
        seed = self._seed(node.id)
        drawing = Drawing(node, branch, grammar, self._services, self.options, seed=seed, seam=seam)
        drawing.request.following = partial(self._following, branch)
        self._run(drawing)

    def _following(self, branch: Branch) -> Sequence[int]:
        """See `ProgramText.following`. What cannot be rendered is said when it is its turn, not by a guess."""
        try:
            return self._text.following(branch, self._flow.beginning_of)
        except SglError:
            return ()

    # --- selects ---

    def _start_select(
        self, branch: Branch, node: Select, selection: Selection, unit: list[int], num_bytes: int
    ) -> None:
        self._text.append_unit(branch, unit[: selection.num_stable], num_bytes)
        self._count(Usage(healed_tokens=len(unit) - selection.num_stable))
        self._run(OptionScoring(node, branch, selection, self._services, self.options, seed=self._seed(node.id)))

    # --- requests ---

    def _run(self, work: Drawing | OptionScoring) -> None:
        """Queue everything that `work` asks for and that is not queued yet."""
        requests = [request for request in work.requests if not request.queued and not request.done]
        for request in requests:
            self._work[request.sequence.id] = work
        for request in requests:
            self._add(request, work.branch, work.node)

    def _on_result(self, work: Drawing | OptionScoring, request: Request) -> None:
        """A step gave a request of `work` something."""
        if isinstance(work, Drawing) and (delta := work.delta()) is not None:
            self._services.emit(self.id, delta)
        if not request.done:
            return
        del self._work[request.sequence.id]
        if isinstance(work, OptionScoring):
            if not work.take(request):
                return
            if work.ask_more():
                self._run(work)
                return
        event = work.finish()
        first_s = max(request.first_at - work.branch.started_at, 0.0) if request.first_at else 0.0
        self._text.stream(work.branch)
        if isinstance(work, Drawing) and (check := work.value_check(event)) is not None:
            done = partial(self._guarded, work.branch, work.node, partial(self._done, event=event, first_s=first_s))
            self._services.run_job(check, done, small=False)
        else:
            self._done(work.branch, work.node, event, first_s=first_s)

    # --- ends ---

    def _add(self, request: Request, branch: Branch, node: Gen | Select) -> None:
        request.program = self._info
        request.branch, request.node, request.label = branch.id, node.id, node.name
        request.path_len = self._path_lengths.get(node.id, request.new_tokens)
        request.queued_at = self._services.now()
        if self._services.faults is not None:
            self._services.faults.reach("before_admit", self.options.name)
        self._services.watch(request, self)
        self._scheduler.add(request)

    def _done(self, branch: Branch, node: Gen | Select, event: ValueEvent, *, first_s: float = 0.0) -> None:
        """A value exists: tell the client, and go on with the branch and with whoever waited for it."""
        self._usage += event.usage
        event = msgspec.structs.replace(event, latency_s=self._services.now() - branch.started_at, first_s=first_s)
        woken = self._flow.put(node, event.value)
        self._services.emit(self.id, event)
        branch.busy = False
        self._advance({branch.id, *woken})

    def _count(self, usage: Usage) -> None:
        """Count what belongs to no request, in the program's usage and in the engine's statistics."""
        self._scheduler.stats.add(usage)
        self._usage += usage

    def _seed(self, node: int) -> int:
        data = f"{self._services.config.random_seed}:{self.id}:{node}".encode()
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1

    def _maybe_finish(self) -> None:
        if self.ended or self._num_pauses or any(branch.busy for branch in self._branches.values()):
            return
        for branch in self._branches.values():
            if branch.queue:  # nothing runs that could ever let it go on
                node = branch.queue[0]
                self._failed_at = (None if isinstance(node, Read) else node.id, branch.id)
                self.fail(stuck(node))
                return
        if unborn := self._flow.unborn:
            self.fail(InvalidProgram(f"nodes on branches that nothing forks: {sorted(unborn)}"))
            return
        if not self._finish:
            self._time.rest(self._services.now())
            self._services.expect_end(self)
            touched = [self._branches[id] for id in sorted(self._flow.touched) if id in self._branches]
            self._flow.touched.clear()
            handles = tuple(StateHandle(self._services.epoch, b.id, len(b.sequence)) for b in touched)
            if handles:
                self._services.emit(self.id, HandlesEvent(handles))
            return
        main = self._branches.get(MAIN_BRANCH)
        if main is not None:
            self._text.stream_all(main)
        text = main.transcript.text if self.options.want_text and main is not None else ""
        self._services.emit(self.id, DoneEvent(usage=self._usage, text=text))
        self._close(StateLost(f"program {self.options.name!r} has ended"))

    def _close(self, lost: SglError) -> None:
        """Answer every open read, and let go of everything. The client has been told the end: this cannot fail."""
        self.ended = True
        for read in self._flow.reads():
            read.reply(None, lost)
        try:
            self._free()
        except Exception as error:  # noqa: BLE001 - whatever bookkeeping broke, the engine goes on with a new one
            internal_error(f"program {self.options.name!r} could not be freed; the cache is dropped", error)
            self._scheduler.rebuild(self._sequences())
        self._services.ended(self, list(self._work))
        self._work.clear()
        self._branches.clear()

    def _free(self) -> None:
        """Abort every request and let go of every page."""
        if self._services.faults is not None:
            self._services.faults.reach("on_free", self.options.name)
        for work in self._work.values():
            self._scheduler.abort(work.requests)
        for work in self._work.values():
            work.release()
        for branch in self._branches.values():
            self._scheduler.release(branch.sequence)
        if self._namespace.program is not None:
            self._scheduler.drop_namespace(self._namespace)

    def _sequences(self) -> set[int]:
        """Ids of everything that the program holds in the scheduler."""
        ids = {branch.sequence.id for branch in self._branches.values()}
        for work in self._work.values():
            ids.update(request.sequence.id for request in work.requests)
        return ids
