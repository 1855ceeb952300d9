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
        return [range(window.blocks.first_needed(num_blocks), num_blocks) for window in self] if self else []

    def can_resume(self, match: Match) -> bool:
        """Whether a text can go on behind all blocks of ``match``, as far as these groups are asked."""
        return all(window.blocks.can_resume(window.cells_of(match.ids)) for window in self)

    def are_there(self, rows: Ids, spans: Many[range]) -> bool:
        """Whether ``rows``, what the tree has of a text, still have the blocks ``spans`` of each group."""
        there = [
            window.blocks.are_there(window.cells_of(rows)[:, span.start : span.stop]).all()
            for window, span in zip(self, spans)
        ]
        return all(there)

    def boundaries(self, match: Match) -> list[Flags]:
        """For each group, behind how many blocks of ``match`` it lets the text go on: bool ``[num_blocks + 1]``."""
        return [window.blocks.boundaries(window.cells_of(match.ids)) for window in self]

    # -- who reads ---------------------------------------------------------------------------------------------------

    def handles_of(self, rows: Ids, spans: Many[range]) -> list[Ids]:
        """The handles of ``spans`` in ``rows``, int32 ``[rows of the tree, n]``, what it has of a text: views, by group."""
        return [rows[window.row, span.start : span.stop] for window, span in zip(self, spans)] if self else []

    def read(self, handles: Many[Ids]) -> None:
        """One more reads ``handles`` of each group, which are there."""
        for window, some in zip(self, handles):
            window.blocks.read(some)

    def leave(self, handles: Many[Ids]) -> None:
        """One less reads ``handles`` of each group."""
        for window, some in zip(self, handles):
            window.blocks.leave(some)

    def shared_by(self, slot: int) -> list[Ids]:
        """The handles of what ``slot`` reads, by group."""
        return [window.blocks.handles(window.group.shared_ids(slot)) for window in self] if self else []

    # -- publishing --------------------------------------------------------------------------------------------------

    def publishing(self, slot: int, begin: int, rows: Ids) -> list[Ids]:
        """Write to ``rows``, int32 ``[rows of the tree, n]``, the cells of what ``slot`` has from block ``begin`` on that is
        not shared yet, and 0 for what it has not. Returns, by group, room for the cells that ``publish`` may have to
        compare."""
        room, end = list[Ids](), begin + rows.shape[1]
        for group, blocks, row in self:
            unshared = max(group.first[slot], group.shared[slot])
            first = max(unshared, begin)
            rows[row : row + 2, : first - begin] = 0
            blocks.write_cells(group.table.cells[slot, first:end], rows[row : row + 2, first - begin :])
            room.append(np.empty((2, 2, end - unshared), np.int32))
        return room

    def publish(
        self, tree: PrefixTree, slot: int, lease: Lease, rows: Ids, room: Many[Ids], *, is_new: bool
    ) -> list[tuple[BlockGroup, Ids]]:
        """Share what ``publishing`` wrote to ``rows``, now that the tree has them and ``lease`` covers them; ``is_new``: none
        of these blocks was there. Returns those that were cached already, the caller's to free, by group."""
        spared, end = list[tuple[BlockGroup, Ids]](), lease.num_blocks
        begin = end - rows.shape[1]
        for (group, blocks, row), (ours, theirs) in zip(self, room):
            first = end - ours.shape[1]
            if is_new and first >= begin:
                blocks.publish(rows[row, first - begin :])
                group.share(slot, end)
                continue
            blocks.write_cells(group.table.cells[slot, first:end], ours)
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
        return [(group, blocks.forget(rows[row : row + 2])) for group, blocks, row in self]

    # -- proof -------------------------------------------------------------------------------------------------------

    def check(self, tree: PrefixTree, held: Iterable[Many[Ids]], kept: Iterable[Many[Ids]]) -> None:
        """Prove who reads and keeps each block: rows of requests, and what is ``held``; checkpoints, what is ``kept``:
        handles, by group. Raises CheckFailed."""
        rows, held, kept = tree.all_ids(), [*held], [*kept]
        for number, (group, blocks, row) in enumerate(self):
            shared = [group.table.cells[slot, group.first[slot] : end] for slot, end in enumerate(group.shared)]
            readers = [*shared, *(blocks.ids(one[number]) for one in held)]
            keepers = [one[number] for one in kept]
            counts = [
                np.bincount(np.concatenate([_NONE, *some]), minlength=group.plan.num_rows)
                for some in (readers, keepers)
            ]
            blocks.check(rows[row : row + 2], counts[0], counts[1])
