"""Which branches a program has, and what waits for what.

Owns the branches with their queues, the nodes of branches that a fork is yet to make, who was forked from whom, the
values so far, and who waits for a value or a branch. Only bookkeeping: nodes are executed, and everything is started
and freed, by the program run, which has one of these and alone changes it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from sgl.errors import InvalidProgram, SglError, StateLost
from sgl.lang.graph import MAIN_BRANCH, Fork, Gen, Graph, Join, LiteralText, Node, Reads, Release, Select, Text, Var
from sgl.limits import DEFAULT_LIMITS
from sgl.runtime.branch import Branch, Read


class ProgramFlow:
    """The branches of one program.

    Attributes:
        branches: those that exist, by number.
        unborn: by number, what is queued on branches that a fork is yet to make.
        lineage: branch -> the one that it was or will be forked from.
        known: branches that live after everything submitted.
        touched: branches that something happened to since the client was told of them last.
        names: of values that exist, with their branch.
    """

    def __init__(self, main: Branch) -> None:
        self.branches = {MAIN_BRANCH: main}
        self.unborn: dict[int, deque[Node | Read]] = {}
        self.lineage: dict[int, int] = {}
        self.known = {MAIN_BRANCH}
        self.touched: set[int] = set()
        self.names: set[tuple[int, str]] = set()
        self._values: dict[int, str] = {}  # by node
        self._reads = Reads()
        self._released: set[int] = set()
        self._joining: Counter[int] = Counter()  # branch -> joins of it that are still queued
        self._await_value: dict[str, set[int]] = {}  # value's name -> branches whose text names it
        self._await_branch: dict[int, set[int]] = {}  # child -> branches whose join found it unfinished

    # --- fragments ---

    def check_handles(self, graph: Graph, epoch: str) -> None:
        """Raise `StateLost` unless every state that a fragment goes on with is here."""
        for handle in graph.handles:
            if handle.epoch != epoch:
                raise StateLost("the state handle belongs to another run of the engine", hint="run the program again")
            branch = self.branches.get(handle.branch)
            if branch is None or len(branch.sequence) != handle.length:
                raise StateLost(f"the state of branch {handle.branch} is gone", hint="run the program again")

    def take(self, graph: Graph) -> list[int]:
        """Queue the nodes of a fragment; the branches that they are on."""
        by_branch: dict[int, list[Node]] = {}
        for node in graph.nodes:
            by_branch.setdefault(node.branch, []).append(node)
            if isinstance(node, Fork):
                self.known.update(node.children)
                self._reads.forked(node.branch, node.children, node.id)
                for child in node.children:
                    self.lineage[child] = node.branch
            elif isinstance(node, (Gen, Select)):
                self._reads.generated(node.branch, node.name, node.id)
            elif isinstance(node, Release):
                self.known.discard(node.branch)
            elif isinstance(node, Join):
                self._joining.update(node.children)
        for id, nodes in by_branch.items():
            if id in self.branches:
                self.branches[id].queue.extend(nodes)
            else:
                self.unborn.setdefault(id, deque()).extend(nodes)
        self.touched.update(by_branch)
        return list(by_branch)

    def queue_read(self, id: int, read: Read) -> bool:
        """Queue a read of a branch's state behind everything on it; False when there is no such branch any more."""
        if id in self.branches:
            self.branches[id].queue.append(read)
        elif id in self.lineage and id not in self._released:
            self.unborn.setdefault(id, deque()).append(read)
        else:
            return False
        return True

    def reads(self) -> Iterator[Read]:
        """Every read that is still queued."""
        for queue in (*(branch.queue for branch in self.branches.values()), *self.unborn.values()):
            yield from (node for node in queue if isinstance(node, Read))

    # --- branches ---

    def bear(self, branch: Branch) -> None:
        """A fork made `branch`."""
        branch.queue.extend(self.unborn.pop(branch.id, ()))
        self.branches[branch.id] = branch
        self.touched.add(branch.id)

    def bury(self, branch: Branch) -> None:
        """`branch` was released."""
        self._released.add(branch.id)
        del self.branches[branch.id]

    def is_read_by_join(self, id: int) -> bool:
        """Whether a join that stands before a branch's release has yet to read it; that join wakes it."""
        return self._joining[id] > 0

    def is_joinable(self, id: int) -> bool:
        """Whether everything on a branch that stands before its release is done."""
        branch = self.branches.get(id)
        if branch is None:
            return id in self._released
        return not branch.busy and (not branch.queue or isinstance(branch.queue[0], Release))

    def joins(self, branch: Branch, node: Join) -> bool:
        """Whether a join can be done; else `branch` is woken when more is known."""
        # From the last one, which usually ends last: those before it are looked at once, then.
        unfinished = next((child for child in reversed(node.children) if not self.is_joinable(child)), None)
        if unfinished is not None:
            self._await_branch.setdefault(unfinished, set()).add(branch.id)
        return unfinished is None

    def joined(self, node: Join) -> None:
        """A join was done."""
        self._joining.subtract(node.children)

    def woken_by(self, branch: Branch) -> list[int]:
        """The branches whose join waited for `branch`, if it is joinable now."""
        if branch.id not in self._await_branch or not self.is_joinable(branch.id):
            return []
        return sorted(self._await_branch.pop(branch.id))

    # --- values ---

    def text_of(self, branch: Branch, node: Text) -> str | None:
        """The text of a node with its values; `None` when one is missing, whose coming wakes `branch`.

        Raises:
            InvalidProgram: a value stands in it so often that it is longer than any text may be.
        """
        texts = []
        for segment in node.segments:
            text = segment.text if isinstance(segment, LiteralText) else self._lookup(segment, node.id)
            if text is None and not isinstance(segment, LiteralText):
                self._await_value.setdefault(segment.name, set()).add(branch.id)
                return None
            texts.append(text or "")
        if (size := sum(map(len, texts))) > DEFAULT_LIMITS.max_prompt_bytes:
            raise InvalidProgram(
                f"a text of {size} characters; at most {DEFAULT_LIMITS.max_prompt_bytes} are taken",
                hint="repeat its values less often",
                location=node.location,
            )
        return "".join(texts)

    def beginning_of(self, node: Text) -> tuple[str, bool]:
        """The text of a node up to the first value that does not exist, or to the length that `text_of` refuses, and
        whether that is all of it."""
        texts: list[str] = []
        size = 0
        for segment in node.segments:
            text = segment.text if isinstance(segment, LiteralText) else self._lookup(segment, node.id)
            size += len(text or "")
            if text is None or size > DEFAULT_LIMITS.max_prompt_bytes:
                return "".join(texts), False
            texts.append(text)
        return "".join(texts), True

    def put(self, node: Gen | Select, value: str) -> Iterable[int]:
        """A value exists; the branches that waited for one of its name."""
        self.names.add((node.branch, node.name))
        self._values[node.id] = value
        return self._await_value.pop(node.name, ())

    def _lookup(self, variable: Var, at: int) -> str | None:
        source = self._reads.of(variable, at)
        return self._values.get(source) if source is not None else None


def stuck(node: Node | Read) -> SglError:
    """The error of a program whose next node waits for what never comes."""
    match node:
        case Text():
            names = ", ".join(repr(segment.name) for segment in node.segments if not isinstance(segment, LiteralText))
            what = f"text waits for the value of {names}, which nothing before it generates"
        case Join():
            what = f"a join waits for branches {list(node.children)}, which nothing forks"
        case _:
            what = "the program waits for itself"
    return InvalidProgram(what, location=None if isinstance(node, Read) else node.location)
