"""What nodes without a request do to a branch: its text grows, becomes token ids, is cut, marked, rewound and joined.

Owns the way from a branch's text (`Transcript`) to its ids (`Sequence`) and to the client that streams it. The program
run executes the nodes and calls this; a branch with a job under way is nobody's business here. Tokens that no request
accounts for (what a template rewrote, what a join computes again) are handed to `count`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgl.errors import InvalidProgram
from sgl.lang.graph import MAIN_BRANCH, ProgramOptions, Rewind, Role, Text, TextEvent, Tokens, Usage
from sgl.runtime.branch import SMALL, SMALL_TURN, Branch, text_bytes, text_len
from sgl.runtime.selection import common_length
from sgl.runtime.services import Services

MAX_WRITTEN = 2**28
"""Characters that the texts of one program come to, the values in them included."""

MAX_HELD = 2**27
"""Token ids that the states and marks of one program hold, and `STATE_LEN` for each of these: some gigabyte."""
STATE_LEN = 512

MAX_RENDERED = 2**32
"""What the chat template is shown for all turns of one program (see `Transcript.turn_len`): a minute or two of work."""

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
        self._written = 0
        self._held = 0
        self._rendered = 0

    # --- text to ids ---

    def write(self, branch: Branch, text: str) -> None:
        """Append text as written.

        Raises:
            InvalidProgram: the program wrote too much: values may stand in its texts again and again.
        """
        self._count_written(len(text))
        branch.transcript.add_text(text)

    def _count_written(self, num_characters: int) -> None:
        self._written += num_characters
        if self._written > MAX_WRITTEN:
            raise InvalidProgram(
                f"the program's texts have more than {MAX_WRITTEN} characters", hint="write less, or several programs"
            )

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

    def take_turns(self, branch: Branch, beginning_of: Callable[[Text], tuple[str, bool]]) -> Role | None:
        """Let an empty branch begin with the whole turns in front of its queue but the last one, whose beginning is
        returned: the template is run over them once, and not at the beginning and the end of each.

        Args:
            beginning_of: as `ProgramFlow.beginning_of`.

        Raises:
            InvalidProgram: as `write`.
        """
        turns = branch.whole_turns(beginning_of) if self._services.config.rerender == "template" else []
        if not turns:
            return None
        *taken, last = turns
        self._count_written(sum(len(turn.content) for turn in taken))
        branch.transcript.take_turns([{"role": turn.begin.role, "content": turn.content} for turn in taken])
        for _ in range(sum(turn.num_nodes for turn in taken)):
            branch.queue.popleft()
        return last.begin

    def count_turn(self, branch: Branch) -> None:
        """A turn begins or ends.

        Raises:
            InvalidProgram: the template was run over too much already.
        """
        self._rendered += branch.transcript.turn_len
        if self._rendered > MAX_RENDERED:
            raise InvalidProgram(
                f"the chat template was run over {MAX_RENDERED} characters of this program's turns",
                hint="begin another program with the conversation so far; a template that looks at all turns for each "
                "is run over all of them again",
            )

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
                    after.add_text(text[:SMALL])
                case Role() if after.turn_len >= SMALL_TURN:
                    is_whole = False
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
            if not is_whole or text_len(after.pending_pieces) >= SMALL:  # a guess is not worth more
                return (ids + after.flush())[:-1]  # the last one may be another with more text behind it
        return ids + after.flush()

    # --- marks, forks and joins ---

    def hold(self, branch: Branch, num: int = 1) -> None:
        """So many states more are as that of `branch` is now.

        Raises:
            InvalidProgram: the program would hold too much.
        """
        size = len(branch.sequence) + STATE_LEN
        if self._held + num * size > MAX_HELD:
            raise InvalidProgram(
                f"{num} more states of {size - STATE_LEN} tokens: the states and marks of a program have at most "
                f"{MAX_HELD} tokens together, {STATE_LEN} for each state among them",
                hint="release states that are done, fork before the long text, or run several programs",
            )
        self._held += num * size

    def let_go(self, branch: Branch) -> None:
        """A branch is released, and its marks."""
        self._held -= sum(len(ids) + STATE_LEN for ids, _ in branch.marks.values())
        if branch.id != MAIN_BRANCH:
            self._held -= branch.len_at_fork + STATE_LEN

    def mark(self, branch: Branch, label: str) -> None:
        """Remember the state of now."""
        self.flush(branch)
        if label in branch.marks:
            self._held -= len(branch.marks[label][0]) + STATE_LEN
        self.hold(branch)
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
        branch.num_streamed = min(branch.num_streamed, transcript.text_len)

    def append_children(self, branch: Branch, children: Sequence[Branch]) -> None:
        """Join by appending: the text of each child since the fork goes on on the parent.

        It is encoded with the parent's next unit; all but the first child's is computed again (see `Usage`).
        """
        for child in children:
            branch.transcript.add_text(child.transcript.text_from(child.text_at_fork))
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
