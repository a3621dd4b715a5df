"""Conversations whose keys and values stay computed between their turns.

A `Session` here is what `Engine.open_session` gives a user. What a backend of the language calls a session is one
program under way (`sgl.lang.backend.Session`, on an engine `EngineSession`): each turn is one of those.

Owns what a session knows: the token ids of the conversation so far, and the pin that keeps them in the cache. The ids
are the truth and stand here, in the client: a turn sends them as ids, in front of its own prompt, so nothing is encoded
twice, a turn that fails or is cancelled leaves the session as it was, and a cache that lost the pages (a lease that ran
out, a step that failed) costs a prefill and never an answer. `Engine` makes sessions and looks them up by id; a turn is
a program like any other (`sgl.runtime.offline`), and what it appended is read from its state before it ends.

A session that nobody goes on with ends by the lease that program states have: `state_lease` seconds after its last turn
(never by default) its ids and its pin are let go, and the next turn raises `StateLost`. `SessionTable` looks for such
sessions whenever one is opened or asked for.

What a session holds is bounded twice: its pin counts against the budget of all pins (`max_pinned_tokens`), and lasts
`ttl_s` seconds from the last turn. A turn that the budget has no room for is answered all the same; what it added is
ordinary cache then, which `num_pinned` shows.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from sgl.errors import InvalidParameter, StateLost
from sgl.lang.graph import MAIN_BRANCH, DoneEvent, Event, FailedEvent, Graph, Mark, ProgramOptions, StateText
from sgl.runtime import offline
from sgl.runtime.alarms import Alarms
from sgl.runtime.client import WorkerClient
from sgl.runtime.pinned import PinnedPrefix, check_pin, request_pin

if TYPE_CHECKING:
    from sgl.runtime.engine import Engine

DEFAULT_TTL_S = 600.0

_LOST_IDS = 1024
"""Sessions of which it is remembered that their lease ran out; the id of one before them is as good as unknown."""

now = time.monotonic


class Session:
    """A conversation on an engine, made by `Engine.open_session`.

    The end of a turn ends a text unit, as `s.mark()` does: a program that marks after each generation has the same ids.

    Args:
        engine: takes the turns; `client` speaks to its worker.
        id: names it in `generate(session=...)` and `close_session`.
        ttl_s: seconds after a turn for which its keys and values are kept; `None` keeps them until the session closes.
        cache_salt: of all its turns.
        lease_s: seconds after its last turn for which it can be gone on with; `None` is until it is closed.
        on_close: called with the session, once.

    Raises:
        InvalidParameter: `ttl_s` or `cache_salt`.

    Example:
        >>> import sgl
        >>> params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        >>> with sgl.Engine(model_path="dummy") as engine, engine.open_session() as session:
        ...     first = session.generate("Tell me a story. ", params)
        ...     second = session.generate("And then? ", params)
        ...     session.num_tokens, second["meta_info"]["prompt_tokens"], second["meta_info"]["cached_tokens"]
        (35, 31, 21)
    """

    def __init__(
        self,
        engine: Engine,
        client: WorkerClient,
        id: str,
        ttl_s: float | None,
        cache_salt: str,
        *,
        lease_s: float | None = None,
        on_close: Callable[[Session], object],
    ) -> None:
        check_pin(ttl_s, cache_salt)
        self.id = id
        self.ttl_s = ttl_s
        self.cache_salt = cache_salt
        self.engine = engine
        self._client = client
        self._on_close = on_close
        self._lock = threading.Lock()
        self._token_ids: tuple[int, ...] = ()
        self._turn: Turn | None = None
        self._asked: Future[PinnedPrefix] | None = None
        self._pin: PinnedPrefix | None = None
        self._closed = False
        self._lost = False
        self._lease_s = lease_s
        self._idle_since = now()

    def generate(
        self, prompt: str | None = None, sampling_params: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        """The next turn: `Engine.generate(..., session=self)`."""
        return self.engine.generate(prompt, sampling_params, session=self, **options)

    async def async_generate(
        self, prompt: str | None = None, sampling_params: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        """The next turn: `Engine.async_generate(..., session=self)`."""
        return await self.engine.async_generate(prompt, sampling_params, session=self, **options)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The conversation so far, outputs included."""
        return self._token_ids

    @property
    def num_tokens(self) -> int:
        """Length of the conversation in tokens."""
        return len(self._token_ids)

    @property
    def num_pinned(self) -> int:
        """How many of its tokens are kept, whatever else needs room; waits for the answer about the last turn's.

        A lease that ran out since then does not show here.
        """
        asked, pin = self._asked, self._pin
        if asked is not None and asked.exception() is None and not self._closed:
            pin = asked.result()
        return pin.num_tokens if pin is not None else 0

    def close(self) -> None:
        """End the session: what it computed stays cached until its pages are needed. Idempotent.

        A turn that is under way is cancelled.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            turn, pin, self._pin = self._turn, self._pin, None
        if turn is not None:
            turn.cancel()
        if pin is not None:
            pin.unpin()
        self._on_close(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- called by the table of sessions ---

    @property
    def expires_at(self) -> float | None:
        """When its lease ends, if nothing happens before; with a turn under way, if that ended now. `None` is never."""
        if self._lease_s is None:
            return None
        return (now() if self._turn is not None else self._idle_since) + self._lease_s

    def expire(self) -> bool:
        """Let everything go if the lease has run out; whether it has."""
        with self._lock:
            ends = self.expires_at
            if self._closed or self._turn is not None or ends is None or now() < ends:
                return False
            self._closed = self._lost = True
            self._token_ids = ()
            pin, self._pin = self._pin, None
        if pin is not None:
            pin.unpin()
        return True

    # --- called by its turns ---

    def begin(self, turn: Turn) -> tuple[int, ...]:
        """A turn is about to start; the ids that stand before its prompt.

        Raises:
            StateLost: its lease ran out.
            InvalidParameter: the session is closed, or another turn has not ended.
        """
        with self._lock:
            if self._lost:
                raise _lost(self.id)
            if self._closed:
                raise InvalidParameter(f"session {self.id!r} is closed", hint="open another one", param="session")
            if self._turn is not None:
                raise InvalidParameter(
                    f"a turn of session {self.id!r} has not ended",
                    hint="wait for it, as what comes next stands behind its output",
                    param="session",
                )
            self._turn = turn
            return self._token_ids

    def end(self, token_ids: tuple[int, ...] | None) -> None:
        """The turn ended, with this conversation; without one it failed, and nothing has changed."""
        with self._lock:
            self._turn = None
            self._idle_since = now()
            if token_ids is None or self._closed:
                return
            self._token_ids = token_ids
        self._asked = request_pin(self._client, token_ids, self.ttl_s, self.cache_salt)
        self._asked.add_done_callback(self._answered)

    def _answered(self, asked: Future[PinnedPrefix]) -> None:
        """A pin stands, or was refused: then the one before goes on to its own end.

        The one before is let go after the new one stands: what both hold is counted once, and kept all the time.
        """
        if asked.exception() is not None:
            return
        pin = spare = asked.result()
        with self._lock:
            known = self._pin.num_tokens if self._pin is not None else 0
            if not self._closed and pin.num_tokens >= known:  # else a later turn's stands already
                self._pin, spare = pin, self._pin
        if spare is not None:
            spare.unpin()


class SessionTable:
    """The open sessions of an engine, by id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._alarms: Alarms[str] = Alarms()
        self._lost_ids: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session) -> None:
        """A session was opened.

        Raises:
            InvalidParameter: one with its id is open.
        """
        self.expire()
        with self._lock:
            if self._sessions.setdefault(session.id, session) is not session:
                raise InvalidParameter(
                    f"session {session.id!r} is open already",
                    hint="close it first, or choose another id",
                    param="session_id",
                )
            self._lost_ids.pop(session.id, None)
            self._alarms.set(session.id, session.expires_at)

    def find(self, id: object) -> Session | None:
        """The open session of that id.

        Raises:
            StateLost: its lease ran out, not too long ago.
        """
        self.expire()
        if not isinstance(id, str):
            return None
        if id in self._lost_ids:
            raise _lost(id)
        return self._sessions.get(id)

    def remove(self, session: Session) -> None:
        """A session was closed."""
        with self._lock:
            if self._sessions.get(session.id) is session:
                del self._sessions[session.id]
                self._alarms.drop(session.id)

    def expire(self) -> None:
        """Let go of the sessions whose lease has run out."""
        with self._lock:
            for id in self._alarms.due(now()):
                session = self._sessions[id]
                if not session.expire():
                    self._alarms.set(id, session.expires_at)
                    continue
                del self._sessions[id]
                self._lost_ids[id] = None
                if len(self._lost_ids) > _LOST_IDS:
                    self._lost_ids.popitem(last=False)


def _lost(id: str) -> StateLost:
    return StateLost(
        f"session {id!r} waited longer than its lease for its next turn",
        hint="open another one with the conversation so far as its first prompt, or raise state_lease",
    )


class Turn(offline.Run):
    """One call of a session: a prompt behind the conversation so far."""

    def __init__(self, session: Session, call: offline.Call, options: ProgramOptions) -> None:
        super().__init__(call, 0, options)
        self._conversation = session
        self._state: Future[StateText] | None = None

    def start(self, engine: offline.Opener, notify: offline.Notify | None = None) -> None:
        """Begin (see `Run`).

        Raises:
            InvalidParameter: the session is closed, or another turn has not ended.
        """
        self.call = msgspec.structs.replace(self.call, before=self._conversation.begin(self))
        try:
            super().start(engine, notify)
        except BaseException:
            self._conversation.end(None)
            raise

    def _submit(self, program: offline.OpenProgram, graph: Graph) -> None:
        """Ask for the state behind the output before the program ends; nobody waits for it in between."""
        program.submit(Graph(nodes=(*graph.nodes, Mark(id=len(graph.nodes), label="turn"))))
        self._state = program.read_state(MAIN_BRANCH)
        program.submit(Graph(nodes=()), finish=True)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, FailedEvent):
            self._conversation.end(None)
        elif isinstance(event, DoneEvent) and self._state is not None:
            self._conversation.end(self._state.result(timeout=0).token_ids)  # it was read before the end
        super()._on_event(event)


def turn_of(session: Session, calls: list[offline.Call], *, stream: bool, cache_salt: str) -> Turn:
    """The one call of a turn.

    Raises:
        InvalidParameter: several prompts or samples, or another salt than the session's.
    """
    if len(calls) != 1 or calls[0].sampling.n != 1:
        raise InvalidParameter(
            f"a turn of a session has one prompt and one output, given were {len(calls)} prompts and "
            f"n={calls[0].sampling.n}",
            hint="send one prompt, with n=1",
            param="session",
        )
    if cache_salt not in ("", session.cache_salt):
        raise InvalidParameter(
            f"cache_salt is {cache_salt!r}; that of session {session.id!r} is {session.cache_salt!r}",
            hint="leave it out: a session has one salt",
            param="cache_salt",
        )
    return Turn(session, calls[0], offline.generate_options(stream=stream, cache_salt=session.cache_salt))
