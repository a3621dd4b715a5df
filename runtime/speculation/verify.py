"""What came of drafts: which of a chunk's draws count, and how many of its drafts were right.

Owns the rule of acceptance. Called by the scheduler for each chunk that drew. Draws are taken one after another as
if each had come from a step of its own; the one behind a draft counts if that draft is what was taken there. So
everything that a token can cause (a stop, forced tokens, a constraint's end, another token taken in its place) is the
generation's business as ever, and ends the run of acceptance where the text goes on otherwise than was guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgl.runtime.plan import Chunk, RowResult
from sgl.runtime.sequence import NOTHING_FORCED, Request, Sampled


def take(request: Request, generation: Sampled, chunk: Chunk, row: RowResult) -> None:
    """Append what `chunk` drew, as far as it counts, and the tokens that must follow.

    A row that is unusable sets `request.failed`; those that do not count may be whatever they are.
    """
    token_ids, known = request.sequence.token_ids, chunk.known_end
    results = (row, *row.more)
    place = 0
    while True:
        drawn = results[place]
        if drawn.failed is not None or drawn.token_id is None:
            request.failed = drawn.failed
            return
        request.completion_tokens += 1
        token_id = generation.push(drawn)
        if token_id is not None:
            token_ids.append(token_id)
        if (forced := generation.force()) is not NOTHING_FORCED:
            request.take_forced(forced)
        if len(results) == 1 or generation.finished or generation.failed is not None or request.has_scores_left:
            return
        path = right_path(chunk, token_ids)
        if len(path) < len(token_ids) - known:
            return
        place = path[-1] + 1
        if place >= len(results):
            return


def right_path(chunk: Chunk, token_ids: Sequence[int]) -> list[int]:
    """Which of the drafts of `chunk` are what `token_ids`, those of its sequence by now, go on with; in order.

    Example:
        >>> import msgspec, numpy as np
        >>> chunk = Chunk(sequence=1, token_ids=[4, 7, 8], start=2, page_table=np.zeros(5, np.int32), num_drafts=2)
        >>> right_path(chunk, [1, 2, 4, 7, 9]), right_path(chunk, [1, 2, 4])
        ([0], [])
        >>> right_path(msgspec.structs.replace(chunk, parents=(-1, -1)), [1, 2, 4, 8, 7])
        [1]
    """
    drafts, parents = chunk.drafts, chunk.parents
    path: list[int] = []
    at = -1
    for token_id in token_ids[chunk.known_end :]:
        if parents:
            children = (i for i in range(at + 1, len(drafts)) if parents[i] == at and drafts[i] == token_id)
            at = next(children, len(drafts))
        else:
            at += 1
        if at >= len(drafts) or drafts[at] != token_id:
            break
        path.append(at)
    return path
