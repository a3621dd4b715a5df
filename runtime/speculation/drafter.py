"""The drafts of a step: what proposers guess, as far as the constraint allows it and it is likely enough to pay.

Owns the composition of chains, to which `tree.py` adds branches, and what is remembered of them until they are
verified. Called by the scheduler: `draft` for each row that decodes, `verified` with what came of it. Never changes a
request, and leaves its matcher as it was.

Where steps overlap, rows that guess have to wait for their last tokens: all of a step do, or none (`waits`). What was
guessed is sent if all of it together is likely to save more than that costs (`pays`).

A chain grows token by token while the chance that all of it is right is above `_bar`, what a row costs in units of an
output token. Behind a token that the constraint answers with forced ones these follow at once, since they would be
appended without a draw. A draft that the constraint refuses ends the chain: it is not sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from sgl.grammars.matcher import StopReason
from sgl.runtime.plan import Proposed, SampleSpec, StepPlan
from sgl.runtime.sequence import Request, Sampled
from sgl.runtime.speculation.control import AdaptiveParams, AdaptiveSteps, Rounds, StepCosts, Trust
from sgl.runtime.speculation.draft_model import DraftModel
from sgl.runtime.speculation.proposer import NOTHING, Proposal, Proposer
from sgl.runtime.speculation.text import Endings, Literals, node_of
from sgl.runtime.speculation.tree import BRANCH, Layout, Sent, Tree, bounded

_OWN = 0.15
"""Weight of a request's newest draft in what it makes of everyone's trust."""
_FADES = 0.98
_NEWEST = 0.3
"""Weight of the newest step in what a row gains by guesses, and of the newest row in what those of its node do."""
_MOST_NODES = 4096
_HOPED = 1.0
"""Tokens that a row of a node that nobody knows is believed to gain."""
_MARGIN = 1.2
"""Times its cost that a round of guesses has to save."""
_WAITING = 0.5
"""What waiting adds to a step, as a share of it, until it was timed."""
_LEAST_BAR = 0.03
FORCED = "forced"
"""The source of a guess that the constraint forces."""
_LONGEST_LITERAL = 32
"""Tokens of program text that are drafted behind a generation; a longer one is a prefill of its own."""
_FIRST_PAUSE, _LONGEST_PAUSE, _PROBE, _LOW_BAR = 32, 512, 2, 0.4
"""Steps without drafts before a lower bar is tried, at first and at most; for how many steps, and the bar."""
_ROUNDS = 3
"""How often proposers are asked for one chain."""


_BRANCHES_BELOW = 0.4
"""The bar below which a second way to go on may pay: it is seldom likelier."""


class Draft(NamedTuple):
    """Guesses behind the known tokens of a row; `checks`, `num_ahead`, `parents` and `proposed` as in `Chunk`."""

    token_ids: tuple[int, ...]
    checks: tuple[SampleSpec, ...] = ()
    num_ahead: int = 0
    parents: tuple[int, ...] = ()
    proposed: Proposed | None = None


NO_DRAFT = Draft(())


class _Memory:
    """What is remembered of one request: the drafts under way (`parents` as in `Chunk`), how much better they are than
    everyone's, how many tokens its guesses save in a step (`gain`), and those of the step that is planned (`promised`).
    """

    __slots__ = ("better", "gain", "parents", "promised", "sent")

    def __init__(self, gain: float) -> None:
        self.sent: list[Sent] = []
        self.parents: tuple[int, ...] = ()
        self.better = 0.0
        self.gain = gain
        self.promised = 0.0


class Drafter:
    """Makes and judges drafts.

    Attributes:
        longest: drafts of a generation that a row may have now; `most_of_row`: those behind its end included.

    Args:
        proposers: asked in this order; the first that has something is heard.
        most: drafts of a row; `most_of_step`: of all rows of a step.
        adaptive: how long chains may get by batch size; `None` tries `most` always, whatever it costs.
        slope: see `StepCosts`.
        most_of_row, most_tokens: of a step that has drafts, known tokens included, at most; where larger steps of a
            device take far longer.
        by_block: whether drafts that were drawn from distributions are judged by block, or one by one.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        *,
        most: int,
        most_of_step: int,
        adaptive: AdaptiveParams | None = None,
        slope: float = 0.1,
        by_block: bool = False,
        most_of_row: int | None = None,
        most_tokens: int | None = None,
    ) -> None:
        self.proposers = tuple(proposers)
        self._model = next((proposer for proposer in proposers if isinstance(proposer, DraftModel)), None)
        self.costs = StepCosts(slope)
        self._overlapped = StepCosts(slope)
        """Of steps that no row waited for."""
        self._overlaps = False
        """Whether steps do, as far as is known."""
        self._rounds = Rounds()
        self.trust = Trust()
        self._most = most
        self._most_of_step = most_of_step
        self._by_block = by_block
        self.most_of_row = most + _LONGEST_LITERAL
        if most_of_row is not None:
            self.most_of_row = min(self.most_of_row, most_of_row - 1)
        self._most_tokens = most_tokens
        self._steps = AdaptiveSteps(adaptive) if adaptive is not None else None
        self._endings = Endings()
        self._literals = Literals()
        self._memory: dict[int, _Memory] = {}  # by sequence
        self._gains: OrderedDict[object, float] = OrderedDict()  # of a row, by node of a program
        self._asked: list[_Memory] = []  # in the step that is planned
        self._num_asked = 0
        self._num_rows = 1
        self.longest = most
        self._left = most_of_step
        self._bar = 0.0
        self._idle, self._pause, self._is_probing = 0, _FIRST_PAUSE, False
        self._num_drafted = 0  # in the step that is planned
        self._verified: list[int] = []  # accepted drafts of the rows of this step
        self._gain = 0.0  # accepted drafts per row and step, lately

    @property
    def has_model(self) -> bool:
        """Whether guessing itself takes the device's time, which is counted apart."""
        return self._model is not None

    def begin_step(self, num_rows: int) -> None:
        """A step is planned in which about `num_rows` rows decode."""
        if self._verified and self._steps is not None:
            self._steps.add(self._num_rows, sum(self._verified) / len(self._verified))
        self._gain += 0.1 * (sum(self._verified) / self._num_rows - self._gain)
        if not self._num_drafted and (self._num_asked or not self._overlaps):
            self.trust.rest()
        self._verified.clear()
        self._num_rows = max(1, num_rows)
        self._left = self._most_of_step
        if self._most_tokens is not None:
            self._left = min(self._left, self._most_tokens - num_rows)
        self._asked.clear()
        self._num_asked = 0
        if self._steps is not None:
            self.longest = min(self._most, self._steps.of(self._num_rows))
            bar = max(_LEAST_BAR, self._break_even(self._num_rows))
            if self._overlaps:
                self._bar = _LEAST_BAR if self._rounds.is_trying else bar
            else:
                self._bar = self._probed(bar)
        self._num_drafted = 0

    def _probed(self, bar: float) -> float:
        """The bar, or now and then a low one, where nothing has come above it for long: what is known of times and
        guesses gets old when they are not tried. What came above the low one alone makes it no less rare."""
        if self._num_drafted and not self._is_probing:
            self._idle, self._pause = 0, _FIRST_PAUSE
        self._idle += 1
        self._is_probing = self._idle >= self._pause
        if not self._is_probing:
            return bar
        if self._idle >= self._pause + _PROBE:
            self._idle, self._pause = 0, min(2 * self._pause, _LONGEST_PAUSE)
        return min(bar, _LOW_BAR)

    def _break_even(self, num_rows: int) -> float:
        """The chance from which on a draft pays: seconds of its row, over those of an output token as it goes now."""
        costs = self.costs if self.costs.is_known else self._overlapped
        per_token = self._plain_seconds(num_rows) / num_rows
        if self._gain:
            num_tokens = num_rows * (1 + self._gain)
            per_token = min(per_token, costs.seconds(round(num_tokens)) / num_tokens)
        return costs.row(num_rows, max(2, min(2 * num_rows, 64))) / per_token

    def waits(self, requests: Sequence[Request]) -> bool:
        """Where steps overlap: whether the rows of a step had better know their last tokens before they go on, since
        guesses behind them are likely to save more than that costs."""
        if self._steps is None:
            return bool(requests)
        self._overlaps = True
        num_rows = len(requests)
        if not num_rows or (self._most_tokens is not None and num_rows >= self._most_tokens):
            return False
        hoped = sum(self._remembered(request).gain for request in requests) if self._bar < 1 else 0.0
        return self._rounds.wait(hoped, self._needed(num_rows, num_rows))

    def pays(self) -> bool:
        """Whether the drafts that were made for a step are worth what they cost together; else none is to be sent."""
        asked, self._asked = self._asked, []
        if not asked:
            return False
        self._num_asked = len(asked)
        # What proposers promise of this place, and what came of others lately: either alone is wrong for long at times.
        hoped = sum(memory.promised + memory.gain for memory in asked) / 2
        is_sent = (
            self._steps is None
            or not self._overlaps
            or self._rounds.is_trying
            or hoped > self._needed(self._num_rows, self._num_drafted)
        )
        for memory in asked:
            if not (is_sent and memory.sent):  # else verifying will tell
                memory.gain += _NEWEST * (memory.promised - memory.gain)
        if not is_sent:
            self._num_drafted = 0
        self._rounds.is_trying = False
        return is_sent

    def _needed(self, num_rows: int, num_drafts: int) -> float:
        """Tokens that have to be spared by a step of that many drafts, so that nothing is lost by it."""
        plain = self._plain_seconds(num_rows)
        seconds = self.costs.seconds(num_rows + num_drafts)
        if not (self.costs.is_known and self._overlapped.is_known):
            seconds = (1 + _WAITING) * plain
        if self._model is not None:
            seconds += self.longest * self._model.seconds
        return _MARGIN * num_rows * max(0.0, seconds / plain - 1)

    def _plain_seconds(self, num_rows: int) -> float:
        """What a step without drafts takes."""
        return (self._overlapped if self._overlapped.is_known else self.costs).seconds(num_rows)

    def _remembered(self, request: Request) -> _Memory:
        memory = self._memory.get(request.sequence.id)
        if memory is None:
            memory = self._memory[request.sequence.id] = _Memory(self._gains.get(node_of(request), _HOPED))
        return memory

    def prepare(self, rows: Sequence[tuple[Request, Sampled]]) -> None:
        """These rows are asked for next, all of a step."""
        pays = bool(rows) and self._bar < 1 and self._model_pays(len(rows))
        for proposer in self.proposers:
            proposer.prepare(rows if pays else (), self.longest)

    def _model_pays(self, num_rows: int) -> bool:
        """Whether a draft model's forwards are worth their time: the tokens that a row gets from a step, beside how
        much longer that takes."""
        if (
            self._model is None
            or self._steps is None
            or not self._model.seconds
            or self._is_probing
            or self._rounds.is_trying
        ):
            return True
        right = self.trust.of("model", 0)
        tokens = sum(right**i for i in range(self.longest + 1))
        plain = self._plain_seconds(num_rows)
        return tokens * plain > self.costs.seconds(num_rows * (1 + self.longest)) + self.longest * self._model.seconds

    def draft(self, request: Request, generation: Sampled, room: int) -> Draft:
        """The drafts of a row, at most `room`."""
        if self._bar >= 1 or generation.num_left <= 0:
            return NO_DRAFT
        memory = self._remembered(request)
        memory.promised, memory.sent = 0.0, []
        self._asked.append(memory)
        room = min(room, self._left)
        if room <= 0:
            return NO_DRAFT
        literal = self._literals.of(request)
        longest = min(room, self.longest, generation.num_left - (not literal))
        chain = _Chain(generation, longest, self._bar, self.trust, memory.better)
        try:
            for _ in range(_ROUNDS):
                before = len(chain.token_ids)
                chain.extend(self._ask(request, chain.token_ids, chain.room))
                if chain.is_over or len(chain.token_ids) == before:
                    break
            ahead = self._beyond(request, chain, literal, room - len(chain.token_ids)) if literal else []
        finally:
            chain.rewind()
        own, memory.sent, memory.parents = tuple(chain.token_ids), chain.sent, ()
        if not ahead and (tree := self._grown(request, generation, chain, room)) is not None:
            own, memory.parents, memory.sent = tree
        if not own and not ahead:
            memory.better *= _FADES
            return NO_DRAFT
        memory.promised = _promised(memory.sent, memory.parents) + bool(ahead)
        self._left -= len(own) + len(ahead)
        self._num_drafted += len(own) + len(ahead)
        if memory.parents:
            return Draft(own, _tree_checks(generation, own, memory.parents), parents=memory.parents)
        checks = tuple(generation.spec(own[: i + 1]) for i in range(min(len(own), generation.num_left - 1)))
        drawn_from = chain.drawn_from[: len(own)]
        return Draft(
            (*own, *ahead),
            checks,
            max(0, len(ahead) - len(literal) + 1) if ahead else 0,
            proposed=Proposed(tuple(drawn_from), self._by_block) if drawn_from else None,
        )

    def _grown(self, request: Request, generation: Sampled, chain: _Chain, room: int) -> Layout | None:
        """The chain with branches, where such pay and somebody has some; each of its drafts is checked."""
        longest = min(self.longest, generation.num_left - 1)
        has_something = chain.token_ids or chain.is_over
        if self._bar >= _BRANCHES_BELOW or not has_something or not len(chain.token_ids) <= longest > 0:
            return None
        proposals = [each for proposer in self.proposers for each in proposer.branches(request, longest)]
        if not proposals:
            return None
        better = self._memory[request.sequence.id].better
        tree = Tree(chain.token_ids, chain.sent, longest=longest, bar=self._bar, trust=self.trust, better=better)
        for proposal in proposals:
            tree.add(proposal, generation)
        return tree.lay_out(min(room, self._most), generation.matcher)

    def _ask(self, request: Request, drafts: Sequence[int], room: int) -> Proposal:
        """What the first proposer that has something says."""
        for proposer in self.proposers if room > 0 else ():
            proposal = proposer.propose(request, drafts, room)
            if proposal.token_ids:
                return proposal
        return NOTHING

    def _beyond(self, request: Request, chain: _Chain, literal: Sequence[int], room: int) -> list[int]:
        """Drafts for what comes if the generation ends behind `chain`: the literal, and a guess of what follows it.

        A literal saves a step if the end is there, and its tokens have to be computed then in any case; they are
        computed for nothing if it is not.
        """
        if len(literal) > min(room, _LONGEST_LITERAL):
            return []
        chance = chain.chance_of_end(self._endings.chance(node_of(request), chain.length))
        if chance <= (1 - chance) * self._bar * len(literal):
            return []
        ahead = [*literal]
        proposal = self._ask(request, [*chain.token_ids, *ahead], min(room - len(ahead), self.longest))
        for i, token_id in enumerate(proposal.token_ids):
            chance *= self.trust.of(proposal.source, proposal.strength + i)
            if chance <= self._bar:
                break
            ahead.append(token_id)
        return ahead

    def verified(self, request: Request, path: Sequence[int]) -> None:
        """Of the drafts that were sent last for a request, those at `path` were right."""
        memory = self._memory.get(request.sequence.id)
        if memory is None or not memory.sent:
            return
        self._verified.append(len(path))
        saved = sum(i < len(memory.sent) and memory.sent[i].source != FORCED for i in path)
        memory.gain += _NEWEST * (saved - memory.gain)
        right = {-1, *path}
        for i, sent in enumerate(memory.sent):
            parent = memory.parents[i] if memory.parents else i - 1
            if parent not in right:  # nobody knows
                continue
            self.trust.add(sent.source, sent.strength, right=i in right)
            if sent.source != BRANCH:
                memory.better += _OWN * ((i in right) - sent.chance)
        memory.sent = []

    def ended(self, request: Request) -> None:
        """The request is over, or was put back."""
        memory = self._memory.pop(request.sequence.id, None)
        if memory is not None:
            node = node_of(request)
            before = self._gains.pop(node, memory.gain)
            self._gains[node] = before + _NEWEST * (memory.gain - before)
            if len(self._gains) > _MOST_NODES:
                self._gains.popitem(last=False)
        self._literals.forget(request)
        generation = request.generation
        if generation is not None and generation.finished and request.following is not None:
            self._endings.add(node_of(request), generation.num_kept, ended=generation.matched is not None)
        for proposer in self.proposers:
            proposer.ended(request)

    def timed(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long, drawing included; 0 where nobody measures. One that did not only decode says nothing,
        nor one that some rows waited for and some did not."""
        if not all(len(chunk.draws) == len(chunk.token_ids) - chunk.num_ahead for chunk in plan.chunks):
            return
        num_following = sum(chunk.follows is not None for chunk in plan.chunks)
        if num_following in (0, len(plan.chunks)):
            (self._overlapped if num_following else self.costs).add(plan.num_tokens, seconds)


def _promised(sent: Sequence[Sent], parents: Sequence[int]) -> float:
    """How many of the drafts are likely to be right, less those that would be appended without a draw."""
    chances: list[float] = []
    for i, each in enumerate(sent):
        parent = parents[i] if parents else i - 1
        chances.append(each.chance * (chances[parent] if parent >= 0 else 1.0))
    return sum(chance for chance, each in zip(chances, sent, strict=True) if each.source != FORCED)


def _tree_checks(generation: Sampled, token_ids: Sequence[int], parents: Sequence[int]) -> tuple[SampleSpec, ...]:
    """How to draw behind each draft of a tree."""
    texts: list[list[int]] = []
    for token_id, parent in zip(token_ids, parents, strict=True):
        texts.append([*(texts[parent] if parent >= 0 else ()), token_id])
    return tuple(generation.spec(text) for text in texts)


class _Chain:
    """Drafts of one row while they are made; goes along with the matcher, until `rewind`."""

    def __init__(self, generation: Sampled, most: int, bar: float, trust: Trust, better: float) -> None:
        self.token_ids: list[int] = []
        self.sent: list[Sent] = []
        self.drawn_from: list[Any] = []  # of the first drafts
        self.is_over = False
        self._generation = generation
        self._matcher = generation.matcher
        self._end = 0.0  # the chance that the generation ends here, if a proposer or its limits say so
        self._most = most
        self._bar = bar
        self._trust = trust
        self._better = better
        self._chance = 1.0

    @property
    def room(self) -> int:
        """Drafts that may still come."""
        return self._most - len(self.token_ids)

    def extend(self, proposal: Proposal) -> None:
        """Take of a proposal what is likely enough, and what the constraint forces behind it."""
        self.drawn_from += proposal.drawn_from
        for i, token_id in enumerate(proposal.token_ids):
            if not self._push(token_id, proposal.source, proposal.strength + i):
                self.is_over = True
                return
            forced = self._matcher.forced_tokens() if self._matcher is not None else []
            for token in forced:
                if not self._push(token, FORCED, 0):
                    self.is_over = True
                    return
            if forced or self.is_over:  # behind forced tokens the proposal may go on otherwise
                return

    def _push(self, token_id: int, source: str, strength: int) -> bool:
        chance = bounded(self._trust.of(source, strength) + (self._better if source != FORCED else 0.0))
        is_end = self._generation.ends_with(token_id) and not self._generation.sampling.no_stop_trim
        if is_end and not self.drawn_from:
            self._end = chance
            return False
        if not self.room or self._chance * chance <= self._bar:
            return False
        if self._matcher is not None and not self._matcher.accept(token_id):
            return False
        self._chance *= chance
        self.token_ids.append(token_id)
        self.sent.append(Sent(source, strength, chance))
        if is_end or len(self.token_ids) == self._generation.num_left or self._is_complete():
            self._end = 1.0
            self.is_over = True
        return True

    def _is_complete(self) -> bool:
        return self._matcher is not None and self._matcher.stop_reason() is not StopReason.NOT_STOPPED

    @property
    def length(self) -> int:
        """Tokens of the output, with the drafts."""
        return len(self._generation.output_ids) + len(self.token_ids)

    def chance_of_end(self, usual: float) -> float:
        """That the drafts are right and the generation ends behind them; `usual` is how often such ones do."""
        if not self._end and self._matcher is not None and not self._matcher.is_complete():
            return 0.0
        return self._chance * max(self._end, usual)

    def rewind(self) -> None:
        """Bring the matcher back to where it was."""
        if self._matcher is not None and self.token_ids:
            self._matcher.rollback(len(self.token_ids))
