"""What nodes without a request do to a branch: its text grows, becomes token ids, is cut, marked, rewound and joined.

Owns the way from a branch's text (`Transcript`) to its ids (`Sequence`) and to the client that streams it. The program
run executes the nodes and calls this; a branch with a job under way is nobody's business here. Tokens that no request
accounts for (what a template rewrote, what a join computes again) are handed to `count`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgl.errors import InvalidProgram
from sgl.lang.graph import ProgramOptions, Rewind, Role, Text, TextEvent, Tokens, Usage
from sgl.runtime.branch import Branch, text_bytes
from sgl.runtime.selection import common_length
from sgl.runtime.services import Services

_ANYTHING = "x"
"""In place of a text that is yet to be generated."""


class ProgramText:
    """The text and ids of one program's branches.

    Args:
        program: its number.
        options: whether it streams.
        services: the engine core.
        count: takes tokens that belong to no request.
    """

    def __init__(
        self, program: int, options: ProgramOptions, services: Services, count: Callable[[Usage], object]
    ) -> None:
        self._program = program
        self._streams = options.stream
        self._services = services
        self._scheduler = services.scheduler
        self._count = count

    # --- text to ids ---

    def flush(self, branch: Branch) -> None:
        """Encode the pending unit and append it."""
        self.append_unit(branch, *branch.encode_unit())

    def append_unit(self, branch: Branch, ids: list[int], num_bytes: int) -> None:
        """Append a unit that was encoded from `num_bytes` of program text."""
        branch.sequence.token_ids.extend(ids)
        self._scheduler.stats.tokenized_bytes += num_bytes

    def append_ids(self, branch: Branch, token_ids: Sequence[int]) -> None:
        """Append token ids as they are, behind the pending unit.

        Raises:
            InvalidProgram: one is outside of the vocabulary.
        """
        tokenizer = self._services.tokenizer
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < tokenizer.vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < tokenizer.vocab_size)
            raise InvalidProgram(
                f"token id {wrong} is outside the vocabulary of {tokenizer.vocab_size}",
                hint=f"ids are 0 to {tokenizer.vocab_size - 1}",
            )
        self.flush(branch)
        branch.sequence.token_ids.extend(token_ids)
        branch.transcript.add_generated(tokenizer.decode(token_ids, skip_special_tokens=False), len(token_ids))
        self.stream(branch)

    def reopen(self, branch: Branch) -> None:
        """Take back a unit that a fork or mark ended: options of a select are encoded with its text all the same."""
        if reopened := branch.transcript.reopen():
            self._scheduler.truncate(branch.sequence, len(branch.sequence) - reopened)
            self._scheduler.stats.tokenized_bytes -= text_bytes(branch.transcript.pending_pieces)

    def follow_template(self, branch: Branch) -> None:
        """Cut the ids where the template rewrote earlier turns."""
        for cut in branch.transcript.cuts:
            if cut.drop_tokens:
                self._scheduler.truncate(branch.sequence, cut.keep_tokens)
                self._count(Usage(rerendered_tokens=cut.drop_tokens))
        branch.transcript.cuts.clear()

    def following(self, branch: Branch, beginning_of: Callable[[Text], tuple[str, bool]]) -> list[int]:
        """Ids of what the program writes on a branch whose generation ends now, up to its next generation, as far as
        that is known. A guess: a template may look at what was generated.

        Args:
            beginning_of: as `ProgramFlow.beginning_of`.
        """
        after = branch.transcript.copy()
        after.add_generated(_ANYTHING, 1)
        ids: list[int] = []
        for node in branch.queue:
            is_whole = True
            match node:
                case Text():
                    text, is_whole = beginning_of(node)
                    after.add_text(text)
                case Role(begin=True):
                    after.begin(node.role)
                case Role():
                    after.end()
                case Tokens():
                    ids += [*after.flush(), *node.token_ids]
                    after.add_generated(_ANYTHING, len(node.token_ids))
                case _:
                    break
            if after.cuts:
                return []
            if not is_whole:
                return (ids + after.flush())[:-1]  # the last one may be another with more text behind it
        return ids + after.flush()

    # --- marks and joins ---

    def mark(self, branch: Branch, label: str) -> None:
        """Remember the state of now."""
        self.flush(branch)
        branch.marks[label] = (list(branch.sequence.token_ids), branch.transcript.copy())

    def rewind(self, branch: Branch, node: Rewind) -> None:
        """Go back to a mark, and keep the pages up to there.

        Raises:
            InvalidProgram: there is none of that name.
        """
        if node.label not in branch.marks:
            raise InvalidProgram(f"no mark {node.label!r} on this branch", location=node.location)
        ids, transcript = branch.marks[node.label]
        # A select after the mark may have encoded its last word anew: the ids of the mark come back.
        kept = common_length([ids, branch.sequence.token_ids])
        self._scheduler.truncate(branch.sequence, kept)
        branch.sequence.token_ids.extend(ids[kept:])
        branch.transcript = transcript.copy()
        branch.num_streamed = min(branch.num_streamed, len(transcript.text))

    def append_children(self, branch: Branch, children: Sequence[Branch]) -> None:
        """Join by appending: the text of each child since the fork goes on on the parent.

        It is encoded with the parent's next unit; all but the first child's is computed again (see `Usage`).
        """
        for child in children:
            branch.transcript.add_text(child.transcript.text[child.text_at_fork :])
        self._count(Usage(joined_tokens=sum(len(child.sequence) - child.len_at_fork for child in children)))
        self.stream(branch)

    # --- to the client ---

    def stream(self, branch: Branch) -> None:
        """Send what was appended to the branch's text, once a template cannot change it any more by trimming."""
        if self._streams and not (branch.transcript.role is not None and branch.transcript.pending_pieces):
            self.stream_all(branch)

    def stream_all(self, branch: Branch) -> None:
        """Send what was appended, all of it."""
        if self._streams and (text := branch.unstreamed()):
            self._services.emit(self._program, TextEvent(branch=branch.id, text=text))
