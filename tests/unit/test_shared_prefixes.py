"""Groups of rows with a common prefix, found from step to step."""

from __future__ import annotations

import numpy as np
import pytest

from sgl.kernels.prefix_groups import PrefixGroup
from sgl.runtime.page_table import PageTable
from sgl.runtime.shared_prefixes import SharedPrefixes


def tables(*pages: list[int]) -> list[PageTable]:
    return [PageTable(each) for each in pages]


def groups(finder: SharedPrefixes, rows: list[PageTable]) -> list[tuple[tuple[int, ...], int]]:
    return [(group.rows, group.num_keys) for group in finder.groups([row.view for row in rows])]


def test_groups_are_those_that_save_most() -> None:
    a, b = [1, 2, 3, 4, 5, 6], [1, 2, 30, 31, 32, 33, 34]
    rows = tables([*a, 7], [9, 2, 3], [*b, 8], [*a, 10], [*b, 11], [*a, 12], [1, 2, 13])
    # Two pages of all six rows save ten, six of three and seven of two save 12 + 7.
    assert groups(SharedPrefixes(1, 1), rows) == [((0, 3, 5), 6), ((2, 4), 7)]
    # With one row of each, what they have in common at the beginning is all there is.
    assert groups(SharedPrefixes(1, 1), [rows[0], rows[2], rows[6]]) == [((0, 1, 2), 2)]


def test_what_saves_little_is_left_out_and_pages_count_whole() -> None:
    rows = tables([1, 2, 3], [1, 2, 4], [5, 6], [5, 7])
    assert groups(SharedPrefixes(16, 17), rows) == [((0, 1), 32)]
    assert groups(SharedPrefixes(16, 33), rows) == []


def test_the_page_that_a_row_writes_is_its_own() -> None:
    """Even if it were not: a row keeps a key for itself."""
    assert groups(SharedPrefixes(1, 1), tables([1, 2, 3], [1, 2, 3])) == [((0, 1), 2)]
    assert groups(SharedPrefixes(1, 1), tables([1], [1], [])) == []


def test_a_step_that_only_grows_looks_for_nothing() -> None:
    rows = tables([1, 2, 3, 10], [1, 2, 3, 11], [4, 5], [4, 6, 7])
    finder = SharedPrefixes(1, 1)
    for row in rows:
        row.extend(range(50, 90))  # so that there is room behind
        row.cut(len(row) - 30)
        row.extend([90])
    first = finder.groups([row.view for row in rows])
    searches = finder.searches
    for page in range(100, 110):
        for offset, row in enumerate(rows):
            row.extend([page * 10 + offset])
        assert finder.groups([row.view for row in rows]) is first
    assert finder.searches == searches
    # One row is rewritten: another array, another search, other groups.
    rows[1].replace(1, np.array([77], dtype=np.int32))
    assert groups(finder, rows) == [((0, 1), 1), ((2, 3), 1)]
    assert finder.searches == searches + 1
    # A row leaves, another comes in its place.
    assert groups(finder, [rows[0], *tables([1, 2, 3, 9]), rows[3]]) == [((0, 1), 3)]


@pytest.mark.parametrize("seed", range(20))
def test_against_every_row_with_every_other(seed: int) -> None:
    """On random trees of pages, over steps in which rows come, go and grow: groups have their pages in common, are
    disjoint, and save what the best choice at one level of the tree saves."""
    random = np.random.default_rng(seed)
    finder = SharedPrefixes(1, 1)
    rows: list[PageTable] = []
    fresh = iter(range(1000, 10**6))
    for _ in range(12):
        if len(rows) > 5 and random.random() < 0.4:
            del rows[int(random.integers(len(rows)))]
        parent = rows[int(random.integers(len(rows)))].view if rows and random.random() < 0.8 else np.array([0])
        kept = parent[: int(random.integers(0, len(parent)))].tolist()
        rows.append(PageTable([*kept, *(next(fresh) for _ in range(int(random.integers(1, 5))))]))
        for row in rows:
            row.extend([next(fresh)])
        found = finder.groups([row.view for row in rows])
        members = [row for group in found for row in group.rows]
        assert len(members) == len(set(members))
        for group in found:
            assert len({tuple(rows[row].view[: group.num_keys].tolist()) for row in group.rows}) == 1
            assert all(len(rows[row]) > group.num_keys for row in group.rows)
        assert sum(group.saved for group in found) == best([row.view.tolist()[:-1] for row in rows], 0)


def best(tables: list[list[int]], place: int) -> int:
    """Most keys that groups among rows alike up to `place` can save."""
    if len(tables) < 2:
        return 0
    together: dict[int, list[list[int]]] = {}
    for table in tables:
        if len(table) > place:
            together.setdefault(table[place], []).append(table)
    own = (len(tables) - 1) * place
    return max(own, sum(best(each, place + 1) for each in together.values()))


def test_at_most_eight_groups() -> None:
    rows = [[i, *range(100 * i + 10, 100 * i + 10 + i), 1000 + 2 * i + j] for i in range(1, 11) for j in range(2)]
    found = SharedPrefixes(1, 1).groups([np.array(row, dtype=np.int32) for row in rows])
    assert [group.num_keys for group in found] == [11, 10, 9, 8, 7, 6, 5, 4]
    assert found[0] == PrefixGroup((18, 19), 11)
