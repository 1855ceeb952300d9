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
from kvpagoda.prefix.window_blocks import Flags, Handles, WindowBlocks

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


class Publishing(NamedTuple):
    """Blocks of one group that a request publishes: their ``handles``, intp ``[n]``, their cells ``ours``, int32 ``[2, n]``,
    and room for the cells and handles that are there already."""

    handles: Handles
    ours: Ids
    theirs: Ids
    found: Handles


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

    def handles_of(self, rows: Ids, spans: Many[range]) -> list[Handles]:
        """The handles of ``spans`` in ``rows``, int32 ``[rows of the tree, n]``, what it has of a text, by group."""
        if not self:
            return []
        return [rows[window.row, span.start : span.stop].astype(np.intp) for window, span in zip(self, spans)]

    def read(self, handles: Many[Handles]) -> None:
        """One more reads ``handles`` of each group, which are there."""
        for window, some in zip(self, handles):
            window.blocks.read(some)

    def leave(self, handles: Many[Handles]) -> None:
        """One less reads ``handles`` of each group."""
        for window, some in zip(self, handles):
            window.blocks.leave(some)

    def shared_by(self, slot: int) -> list[Handles]:
        """The handles of what ``slot`` reads, by group."""
        return [window.blocks.handles(window.group.shared_ids(slot)) for window in self] if self else []

    # -- publishing --------------------------------------------------------------------------------------------------

    def publishing(self, slot: int, begin: int, rows: Ids) -> list[Publishing]:
        """Write to ``rows``, int32 ``[rows of the tree, n]``, the cells of the blocks that ``slot`` has from block ``begin``
        on and that are not shared yet, and 0 for blocks that it has not. Returns, by group, what ``publish`` needs."""
        publishing: list[Publishing] = []
        end = begin + rows.shape[1]
        for group, blocks, row in self:
            unshared = max(group.first[slot], group.shared[slot])
            handles = blocks.handles(group.table.cells[slot, unshared:end])
            ours = np.empty((2, len(handles)), np.int32)
            blocks.write_cells(handles, ours)
            first = max(0, unshared - begin)
            rows[row : row + 2, :first] = 0
            rows[row : row + 2, first:] = ours[:, max(0, begin - unshared) :]
            publishing.append(Publishing(handles, ours, np.empty_like(ours), np.empty_like(handles)))
        return publishing

    def publish(
        self, tree: PrefixTree, slot: int, lease: Lease, publishing: Many[Publishing], begin: int, *, is_new: bool
    ) -> list[tuple[BlockGroup, Ids]]:
        """Share what ``publishing`` wrote, from block ``begin`` on, now that the tree has it and ``lease`` covers it;
        ``is_new``: none of these blocks was there. Returns those that were cached already, the caller's to free, by group."""
        spared: list[tuple[BlockGroup, Ids]] = []
        end = lease.num_blocks
        for (group, blocks, row), (handles, ours, theirs, found) in zip(self, publishing):
            first = end - len(handles)
            if is_new and first >= begin:
                blocks.publish(handles)
                group.share(slot, end)
                continue
            tree.read_ids(lease, first, row, theirs)
            lacking = ~blocks.are_there(theirs)
            theirs[:, lacking] = ours[:, lacking]
            tree.put_ids(lease, first, row, theirs)
            found[:] = theirs[0]
            is_duplicate = found != handles
            blocks.publish(handles[~is_duplicate])
            blocks.read(found[is_duplicate])
            group.share(slot, end, blocks.ids(found))
            spared.append((group, blocks.ids(handles[is_duplicate])))
        return spared

    def forget(self, rows: Ids) -> list[tuple[BlockGroup, Ids]]:
        """The tree gave up ``rows``, int32 ``[rows of the tree, n]``: the blocks that are cached no more, by group."""
        return [(group, blocks.forget(rows[row : row + 2])) for group, blocks, row in self]

    # -- proof -------------------------------------------------------------------------------------------------------

    def check(self, tree: PrefixTree, held: Iterable[Many[Handles]], kept: Iterable[Many[Handles]]) -> None:
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
