"""Conversations whose keys and values stay computed between their turns.

Owns what a session knows: the token ids of the conversation so far, and the pin that keeps them in the cache. The ids
are the truth and stand here, in the client: a turn sends them as ids, in front of its own prompt, so nothing is encoded
twice, a turn that fails or is cancelled leaves the session as it was, and a cache that lost the pages (a lease that ran
out, a step that failed) costs a prefill and never an answer. `Engine` makes sessions and looks them up by id; a turn is
a program like any other (`sgl.runtime.offline`), and what it appended is read from its state before it ends.

What a session holds is bounded twice: its pin counts against the budget of all pins (`max_pinned_tokens`), and lasts
`ttl_s` seconds from the last turn. A turn that the budget has no room for is answered all the same; what it added is
ordinary cache then, which `num_pinned` shows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from sgl.errors import InvalidParameter
from sgl.lang.graph import MAIN_BRANCH, DoneEvent, Event, FailedEvent, Graph, Mark, ProgramOptions, StateText
from sgl.runtime import offline
from sgl.runtime.client import WorkerClient
from sgl.runtime.pinned import PinnedPrefix, check_pin, request_pin

if TYPE_CHECKING:
    from sgl.runtime.engine import Engine

DEFAULT_TTL_S = 600.0


class Session:
    """A conversation on an engine, made by `Engine.open_session`.

    The end of a turn ends a text unit, as `s.mark()` does: a program that marks after each generation has the same ids.

    Args:
        engine: takes the turns; `client` speaks to its worker.
        id: names it in `generate(session=...)` and `close_session`.
        ttl_s: seconds after a turn for which its keys and values are kept; `None` keeps them until the session closes.
        cache_salt: of all its turns.
        on_close: called once.

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
        on_close: Callable[[], object],
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
        self._on_close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- called by its turns ---

    def begin(self, turn: Turn) -> tuple[int, ...]:
        """A turn is about to start; the ids that stand before its prompt.

        Raises:
            InvalidParameter: the session is closed, or another turn has not ended.
        """
        with self._lock:
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

    def _submit(self, session: offline.Session, graph: Graph) -> None:
        """Ask for the state behind the output before the program ends; nobody waits for it in between."""
        session.submit(Graph(nodes=(*graph.nodes, Mark(id=len(graph.nodes), label="turn"))))
        self._state = session.read_state(MAIN_BRANCH)
        session.submit(Graph(nodes=()), finish=True)

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
