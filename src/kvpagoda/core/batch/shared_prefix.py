"""What the rows of a step share, as FlashInfer's cascade kernels take it: each shared run of kernel pages is read once.

    rows            tree                        level 0       level 1       last level
    0  a b c d      a b ── c ── d               a b  rows 0-3 c  rows 0, 1  d
    1  a b c e           │   └── e                                          e
    2  a b f             └ f                                  -  rows 2, 3  f
    3  a b g             └ g                                                g

Found from the block tables alone, by binary search: O(rows * log(columns)) for each level of the tree, and O(pages) for the
arrays. No loop over rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvpagoda.core.batch.step_buffers import Cells, StepArray, TableSnapshot, cells_between
from kvpagoda.core.memory.writes import Array

_MOST_DEPTH = 32
"""Levels of the tree that are looked for; what rows share below is read by each."""


class SharedPrefix(NamedTuple):
    """The levels of a step for ``MultiLevelCascadeAttentionWrapper``, the one nearest to the roots of the texts first:
    ``wrapper.plan(*shared[:4], ...)``. One array for each level, in the order and in the words of ``plan``.

    A level divides all ``T`` new tokens into segments, and each token reads the run of its segment in every level: what the
    levels before the last name, without a mask; of the last, whose segments are the rows, what comes after that, its own new
    tokens included, with the mask of plain attention. Where a segment shares nothing its run is empty, with
    ``kv_last_page_len`` 0. int32, in host memory, where ``plan`` reads them: tensors, or numpy arrays if the cache has no
    memory. New arrays, of which the batch keeps none.
    """

    qo_indptr: list[StepArray]
    """``[segments + 1]``: the new tokens of each segment."""
    kv_indptr: list[StepArray]
    """``[segments + 1]``: where the run of each segment begins in ``kv_indices``."""
    kv_indices: list[StepArray]
    """``[kv_indptr[-1]]``: kernel pages. The sum of their lengths is what attention reads; without levels it would read as
    many as ``kv_indices`` of the layer has."""
    kv_last_page_len: list[StepArray]
    """``[segments]``: tokens in the last page of each run."""
    order: StepArray | None
    """int32 ``[T]``, on the cache's device, valid as long as the batch is: token ``order[i]`` of the step is token i in the
    levels, where rows that share are adjacent: ``out[order] = wrapper.run(q[order], ..)``. None: they are in the step."""


class SharingTree(NamedTuple):
    """Which rows share how much: ``D`` levels of parts, each level divides the parts of the one before.

    ``order`` int64 ``[B]``: the row of the step at each place, so that the rows of a part are adjacent. The other arrays are
    in this order. ``parts`` int64 ``[D + 1, B]``: a number for each row, equal within a part; in the last level each row is a
    part. ``ends`` int64 ``[D + 1, B]``: up to which column the rows of its part share. ``first`` int64 ``[B]``: from which on.
    """

    order: Array
    parts: Array
    ends: Array
    first: Array


def sharing_tree(cells: Cells, shown: TableSnapshot, most: Array, *, is_proven: bool) -> SharingTree:
    """Return the tree of the rows that are ``shown`` of the table ``cells``. ``most`` int64 ``[B]``: row i may share its
    columns before ``most[i]``. ``is_proven``: a column that is equal in two rows may follow one that is not, so all are
    compared."""
    slots, end, rows = shown.slots, shown.first, np.arange(len(shown))
    part = end  # rows share from their first column on, which is the same then
    parts: list[Array] = []
    ends: list[Array] = []
    while len(parts) < _MOST_DEPTH:
        able = np.flatnonzero(end < most)
        heads = cells[slots[able], end[able]].astype(np.int64)
        _, leaders, which, counts = np.unique(
            part[able] << 32 | heads, return_index=True, return_inverse=True, return_counts=True
        )
        are_shared = (counts > 1)[which]
        if not are_shared.any():
            break
        members, leader = able[are_shared], able[leaders[which]][are_shared]
        low, high = end[members] + 1, _least(most[members], leader, len(rows))
        mine, others = slots[members], slots[leader]
        while (low < high).any():
            middle = (low + high + 1) // 2
            are_same = cells[mine, middle - 1] == cells[others, middle - 1]
            low, high = np.where(are_same, middle, low), np.where(are_same, high, middle - 1)
        if is_proven:
            at, columns = cells_between(end[members], low)
            differ = cells[mine[at], columns] != cells[others[at], columns]
            np.minimum.at(low, at[differ], columns[differ])
        is_alone = np.ones(len(rows), np.bool_)
        is_alone[members] = False
        alone, before, part, end = rows[is_alone], part, rows.copy(), end.copy()
        part[members], end[members] = leader, _least(low, leader, len(rows))
        if parts:  # rows that share no more stay together, as one part
            part[alone] = _least(alone, before[alone], len(rows))
        parts.append(part)
        ends.append(end)
    order = np.lexsort((rows, *parts[::-1]))
    return SharingTree(
        order, np.array([*parts, rows])[:, order], np.array([*ends, shown.end])[:, order], shown.first[order]
    )


def _least(values: Array, of: Array, num_rows: int) -> Array:
    """Return for each of ``values`` the least of those with the same row ``of``."""
    least = np.full(num_rows, np.iinfo(np.int64).max)
    np.minimum.at(least, of, values)
    return least[of]


def levels_to_read(tree: SharingTree, num_levels: int) -> list[int]:
    """Return which levels of ``tree`` to read, ascending, at most ``num_levels`` and the last one of all: those with which the
    fewest pages are read. A level that is left out is read with the next one below it. O(D * B + num_levels * D^2)."""
    num_shared = len(tree.parts) - 1
    if num_shared < num_levels:
        return [*range(num_shared + 1)]
    sizes = np.array([np.bincount(part)[part] for part in tree.parts])
    until = (1 / sizes) @ tree.ends.T  # [level, column of level]: pages if its parts read from column 0 to there
    own = until.diagonal()
    best = own - (1 / sizes) @ tree.first
    is_below = np.tri(num_shared + 1, k=-1, dtype=np.bool_)
    pages = np.where(is_below, own[:, None] - until, np.inf)  # [level, level that is read before it]
    chosen: list[Array] = []
    for _ in range(num_levels - 1):
        total = pages + best
        chosen.append(total.argmin(1))
        best = total.min(1)
    path = [num_shared]
    for before in chosen[::-1]:
        path.append(int(before[path[-1]]))
    return path[::-1]


class CascadeLevel(NamedTuple):
    """The arrays of one level, int32; see ``SharedPrefix``."""

    qo_indptr: Array
    kv_indptr: Array
    kv_indices: Array
    kv_last_page_len: Array


def levels_of(
    tree: SharingTree, cells: Cells, slots: Array, counts: Array, lengths: Array, page_size: int, num_levels: int
) -> list[CascadeLevel]:
    """Return ``num_levels`` levels of ``tree`` over the table ``cells``; if it has fewer, the first ones are empty.

    ``slots``, ``counts``, ``lengths`` int64 ``[B]``: of each row of the step its row of the table, its new tokens, and the
    tokens in its last page. ``page_size``: tokens in a page."""
    slots, indptr = slots[tree.order], np.append(0, np.cumsum(counts[tree.order]))
    path, begin = levels_to_read(tree, num_levels), tree.first
    nothing = CascadeLevel(np.array([0, indptr[-1]], np.int32), *(np.zeros(n, np.int32) for n in (2, 0, 1)))
    levels = [nothing] * (num_levels - len(path))
    for number in path:
        part, end = tree.parts[number], tree.ends[number]
        in_last = lengths[tree.order] if number == path[-1] else np.full(len(part), page_size)
        levels.append(_level(cells, slots, part, begin, end, indptr, in_last))
        begin = end
    return levels


def _level(
    cells: Cells, slots: Array, part: Array, begin: Array, end: Array, indptr: Array, lengths: Array
) -> CascadeLevel:
    """Return the level in which the rows of each ``part`` read their columns ``begin .. end - 1``."""
    is_first = np.ones(len(part), np.bool_)
    is_first[1:] = part[1:] != part[:-1]
    at = np.flatnonzero(is_first)
    begin, end = begin[at], end[at]
    rows, columns = cells_between(begin, end)
    kv_indptr, last = np.append(0, np.cumsum(end - begin)), np.where(end > begin, lengths[at], 0)
    arrays = np.append(indptr[at], indptr[-1]), kv_indptr, cells[slots[at][rows], columns], last
    return CascadeLevel(*(array.astype(np.int32) for array in arrays))
