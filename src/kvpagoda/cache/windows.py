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


class Unpublished(NamedTuple):
    """Blocks of one request that are to be shared: those from ``first`` on, ``cells``; ``room`` for what the tree has."""

    window: Window
    first: int
    cells: Ids
    room: Ids


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
        return [range(window.blocks.first_needed(num_blocks), num_blocks) for window in self] if self else []

    def can_resume(self, match: Match) -> bool:
        """Whether a text can go on behind all blocks of ``match``, as far as these groups are asked."""
        return all(window.blocks.can_resume(window.cells_of(match.ids)) for window in self)

    def boundaries(self, match: Match) -> list[Flags]:
        """For each group, behind how many blocks of ``match`` it lets the text go on: bool ``[num_blocks + 1]``."""
        return [window.blocks.boundaries(window.cells_of(match.ids)) for window in self]

    # -- who reads ---------------------------------------------------------------------------------------------------

    def cells_of(self, rows: Ids, spans: Many[range]) -> list[Ids]:
        """The cells of ``spans`` in ``rows``, int32 ``[rows of the tree, n]``, what it has of a text: views, by group."""
        return [window.cells_of(rows)[:, span.start : span.stop] for window, span in zip(self, spans)] if self else []

    def read(self, cells: Many[Ids]) -> None:
        """One more reads ``cells`` of each group, which are there."""
        for window, some in zip(self, cells):
            window.blocks.read(some[0])

    def leave(self, cells: Many[Ids]) -> None:
        """One less reads ``cells`` of each group."""
        for window, some in zip(self, cells):
            window.blocks.leave(some[0])

    def shared_by(self, slot: int) -> list[Ids]:
        """The cells of what ``slot`` reads, by group."""
        return [window.blocks.cells(window.group.shared_ids(slot)) for window in self] if self else []

    # -- publishing --------------------------------------------------------------------------------------------------

    def publishing(self, slot: int, begin: int, rows: Ids) -> list[Unpublished]:
        """What ``slot`` has of each group that is not shared yet, up to the end of ``rows``, int32 ``[rows of the tree, n]``,
        which are to be inserted from block ``begin`` on: it is written there."""
        found, end = list[Unpublished](), begin + rows.shape[1]
        for window in self:
            group = window.group
            first = max(group.first[slot], group.shared[slot])
            cells = window.blocks.cells(group.table.cells[slot, first:end])
            mine = window.cells_of(rows)
            mine[:, : max(0, first - begin)] = 0
            mine[:, max(0, first - begin) :] = cells[:, max(0, begin - first) :]
            found.append(Unpublished(window, first, cells, np.empty_like(cells)))
        return found

    @staticmethod
    def publish(
        tree: PrefixTree, slot: int, lease: Lease, begin: int, unpublished: Many[Unpublished], *, is_new: bool
    ) -> list[tuple[BlockGroup, Ids]]:
        """Share what ``publishing`` said, now that the tree has the rows and ``lease`` covers them; ``is_new``: none of these
        blocks was there. Returns those that were cached already, the caller's to free, by group."""
        spared, end = list[tuple[BlockGroup, Ids]](), lease.num_blocks
        for (group, blocks, row), first, ours, theirs in unpublished:
            if is_new and first >= begin:
                blocks.publish(ours[0])
                group.share(slot, end)
                continue
            tree.read_ids(lease, first, row, theirs)
            lacking = ~blocks.are_there(theirs)
            theirs[:, lacking] = ours[:, lacking]
            tree.put_ids(lease, first, row, theirs)
            is_duplicate = theirs[0] != ours[0]
            blocks.publish(ours[0, ~is_duplicate])
            blocks.read(theirs[0, is_duplicate])
            group.share(slot, end, blocks.ids(theirs[0]))
            spared.append((group, blocks.ids(ours[0, is_duplicate])))
        return spared

    def forget(self, rows: Ids) -> list[tuple[BlockGroup, Ids]]:
        """The tree gave up ``rows``, int32 ``[rows of the tree, n]``: the blocks that are cached no more, by group."""
        return [(window.group, window.blocks.forget(window.cells_of(rows))) for window in self]

    # -- proof -------------------------------------------------------------------------------------------------------

    def check(self, tree: PrefixTree, held: Iterable[Many[Ids]], kept: Iterable[Many[Ids]]) -> None:
        """Prove who reads and keeps each block: rows of requests, and what is ``held``; checkpoints, what is ``kept``: cells,
        by group. Raises CheckFailed."""
        rows, held, kept = tree.all_ids(), [*held], [*kept]
        for number, (group, blocks, row) in enumerate(self):
            shared = [group.table.cells[slot, group.first[slot] : end] for slot, end in enumerate(group.shared)]
            readers = [*shared, *(blocks.ids(one[number][0]) for one in held)]
            keepers = [one[number][0] for one in kept]
            counts = [
                np.bincount(np.concatenate([_NONE, *some]), minlength=group.plan.num_rows)
                for some in (readers, keepers)
            ]
            blocks.check(rows[row : row + 2], counts[0], counts[1])
