"""One prompt state of a running program: its tokens, its text, and the nodes it has yet to execute.

Owns the seam between the text of a branch (`Transcript`) and its token ids (`Sequence`): units are encoded and appended
here, and cut where the chat template rewrote earlier turns. `program_run` executes the nodes; the scheduler alone
changes pages. A branch with a job under way is `busy`, and nobody touches it meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from sgl.errors import SglError
from sgl.lang.graph import Node, Role, StateText, Text
from sgl.runtime.sequence import Sequence as TokenSequence
from sgl.runtime.text.tokenizer import Piece
from sgl.runtime.text.transcript import Transcript

Reply = Callable[[StateText | None, SglError | None], None]

_MOST_NODES = 2000
"""Nodes that are looked through for whole turns at once, as others wait meanwhile."""
SMALL = 4096
"""Characters that are encoded at once, on the core's thread; longer text goes to a job."""

SMALL_TURN = 2**15
"""The same of what a chat template is shown when a turn begins or ends (see `Transcript.turn_len`)."""


class Read:
    """A queued `read_state`: answered when its branch gets there."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply


class WholeTurn(NamedTuple):
    """A turn in a queue: `num_nodes` from its beginning to its end."""

    begin: Role
    content: str
    num_nodes: int


class Branch:
    """A prompt state: its token ids are the truth, its transcript is their text.

    Args:
        id: in the program.
        sequence, transcript: what it begins with; of a fork child, the parent's.

    Attributes:
        queue: nodes and reads that wait for their turn.
        text_at_fork, len_at_fork: characters and tokens that it had when it was made.
        num_streamed: characters of its text that the client has been sent.
        marks: by label, the ids and the transcript of that moment.
    """

    def __init__(self, id: int, sequence: TokenSequence, transcript: Transcript) -> None:
        self.id = id
        self.sequence = sequence
        self.transcript = transcript
        self.queue: deque[Node | Read] = deque()
        self.busy = False
        self.started_at = 0.0
        self.text_at_fork = transcript.text_len
        self.len_at_fork = len(sequence)
        self.num_streamed = self.text_at_fork
        self.marks: dict[str, tuple[list[int], Transcript]] = {}

    @property
    def has_long_unit(self) -> bool:
        """Whether the pending unit is too long to be encoded at once."""
        return text_len(self.transcript.pending_pieces) >= SMALL

    @property
    def has_long_turn(self) -> bool:
        """Whether the conversation is too long for its template to be run at once."""
        return self.transcript.turn_len >= SMALL_TURN

    def turn(self, node: Role) -> tuple[()]:
        """Begin or end a turn (may run as a job)."""
        if node.begin:
            self.transcript.begin(node.role)
        else:
            self.transcript.end()
        return ()

    def whole_turns(self, text_of: Callable[[Text], tuple[str, bool]]) -> list[WholeTurn]:
        """The turns in front of the queue that are known from beginning to end.

        Args:
            text_of: the text of a node as far as it is known, and whether that is all of it.
        """
        turns: list[WholeTurn] = []
        begin: Role | None = None
        content: list[str] = []
        for node in islice(self.queue, _MOST_NODES):
            match node:
                case Role(begin=True) if begin is None:
                    begin, content, num_nodes = node, [], 1
                case Role(begin=False) if begin is not None:
                    turns.append(WholeTurn(begin, "".join(content), num_nodes + 1))
                    begin = None
                case Text() if begin is not None:
                    text, is_whole = text_of(node)
                    content.append(text)
                    num_nodes += 1
                    if not is_whole:
                        break
                case _:
                    break
        return turns

    def encode_unit(self) -> tuple[list[int], int]:
        """Encode the pending unit (may run as a job); ids, and the bytes of program text in it."""
        pieces = self.transcript.pending_pieces
        ids = self.transcript.flush()  # refuses text that has no UTF-8 form
        return ids, text_bytes(pieces)

    def unstreamed(self) -> str:
        """Text that the client has not been sent; it is taken as sent from now on."""
        new = self.transcript.text_from(self.num_streamed)
        self.num_streamed = self.transcript.text_len
        return new


def text_len(pieces: Sequence[Piece]) -> int:
    """Characters of `pieces`."""
    return sum(len(piece.text) for piece in pieces)


def text_bytes(pieces: Sequence[Piece]) -> int:
    """UTF-8 bytes of the text in `pieces`, special tokens aside."""
    return sum(len(piece.text.encode()) for piece in pieces if not piece.template)
