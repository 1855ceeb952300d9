"""The groups of a cache that keep windows or chunks: their blocks are shared by reference, through cells of the prefix tree.

rows of the tree   | full | window(128): id, generation | chunk(8192): id, generation | ...
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.prefix import Lease, Match, PrefixTree
from kvpagoda.prefix.window_blocks import Flags, WindowBlocks

_NONE: Ids = np.empty(0, np.int32)


class Window(NamedTuple):
    """One group, what is cached of its blocks, and the first of its two rows in the tree."""

    group: BlockGroup
    blocks: WindowBlocks
    row: int

    def cells_of(self, ids: Ids) -> Ids:
        """Of ``ids``, int32 ``[rows of the tree, n]``, those of this group, int32 ``[2, n]``."""
        cells: Ids = ids[self.row : self.row + 2]
        return cells


class Windows(tuple[Window, ...]):
    """All of them. A *span* is a range of blocks of a text for each."""

    @classmethod
    def of(cls, groups: Iterable[BlockGroup], first_row: int) -> Windows:
        """``groups``, in rows of the tree from ``first_row`` on."""
        return cls(
            Window(group, WindowBlocks(group.growth, group.block_size, group.plan.num_rows), first_row + 2 * number)
            for number, group in enumerate(groups)
        )

    def spans_before(self, num_blocks: int) -> list[range]:
        """What a text needs of each group to go on after ``num_blocks`` blocks."""
        return [range(window.blocks.first_needed(num_blocks), num_blocks) for window in self]

    def can_resume(self, match: Match) -> bool:
        """Whether a text can go on behind all blocks of ``match``, as far as these groups are asked."""
        return all(window.blocks.can_resume(window.cells_of(match.ids)) for window in self)

    def boundaries(self, match: Match) -> list[Flags]:
        """For each group, behind how many blocks of ``match`` it lets the text go on: bool ``[num_blocks + 1]``."""
        return [window.blocks.boundaries(window.cells_of(match.ids)) for window in self]

    # -- in the tree -------------------------------------------------------------------------------------------------

    def ids_of(self, tree: PrefixTree, lease: Lease, spans: Many[range]) -> list[Ids]:
        """The blocks of ``spans`` of what ``lease`` covers, which are there, int32 for each group."""
        return [
            window.blocks.ids(window.cells_of(tree.ids_between(lease, span.start, span.stop))) if span else _NONE
            for window, span in zip(self, spans)
        ]

    def read(self, ids: Many[Ids]) -> None:
        """One more reads ``ids`` of each group."""
        for window, some in zip(self, ids):
            if len(some):
                window.blocks.read(some)

    def leave(self, ids: Many[Ids]) -> None:
        """One less reads ``ids`` of each group."""
        for window, some in zip(self, ids):
            if len(some):
                window.blocks.leave(some)

    def give(self, slot: int, begin: int, rows: Ids) -> None:
        """Write what ``slot`` has from block ``begin`` on to ``rows``, int32 ``[rows of the tree, n]``, to be inserted."""
        for window in self:
            cells = window.group.table.cells[slot, begin : begin + rows.shape[1]]
            rows[window.row : window.row + 2] = window.blocks.cells(cells)

    def publish(
        self, tree: PrefixTree, slot: int, lease: Lease, begin: int, *, is_new: bool
    ) -> list[tuple[BlockGroup, Ids]]:
        """Share the blocks of ``slot`` up to the end of ``lease``, those from ``begin`` on inserted just now; ``is_new``: none
        of these was in the tree. Returns those that were cached already, the caller's to free, by group."""
        spared, end = list[tuple[BlockGroup, Ids]](), lease.num_blocks
        for group, blocks, row in self:
            first = max(group.first[slot], group.shared[slot])
            ours = group.table.cells[slot, first:end].copy()
            if is_new and first >= begin:
                blocks.publish(ours)
                group.share(slot, end)
                continue
            cells = tree.ids_between(lease, first, end)[row : row + 2]
            there = blocks.are_there(cells)
            cells[:, ~there] = blocks.cells(ours[~there])
            tree.put_ids(lease, first, row, cells)
            theirs = blocks.ids(cells)
            is_duplicate = theirs != ours
            blocks.publish(ours[~is_duplicate])
            blocks.read(theirs[is_duplicate])
            group.share(slot, end, theirs)
            spared.append((group, ours[is_duplicate]))
        return spared

    def forget(self, rows: Ids) -> list[tuple[BlockGroup, Ids]]:
        """The tree gave up ``rows``, int32 ``[rows of the tree, n]``: the blocks that are cached no more, by group."""
        return [(window.group, window.blocks.forget(window.cells_of(rows))) for window in self]

    # -- proof -------------------------------------------------------------------------------------------------------

    def check(self, tree: PrefixTree, held: Iterable[Many[Ids]], kept: Iterable[Many[Ids]]) -> None:
        """Prove who reads and keeps each block: rows of requests, and what is ``held``, int32 by group; checkpoints, what is
        ``kept``, cells by group. Raises CheckFailed."""
        rows, held, kept = tree.all_ids(), [*held], [*kept]
        for number, (group, blocks, row) in enumerate(self):
            shared = [group.table.cells[slot, group.first[slot] : end] for slot, end in enumerate(group.shared)]
            readers, keepers = [*shared, *(one[number] for one in held)], [one[number][0] for one in kept]
            counts = [
                np.bincount(np.concatenate([_NONE, *some]), minlength=group.plan.num_rows)
                for some in (readers, keepers)
            ]
            blocks.check(rows[row : row + 2], counts[0], counts[1])
