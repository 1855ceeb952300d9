"""The window and chunk groups of a cache, whose blocks are shared by reference through cells of the prefix tree.

rows of the tree   | full | window(128): handle, generation | chunk(8192): handle, generation | ...

A *cell* is the pair of numbers that names a window block in the tree; its *handle* is the first of them (see
``WindowBlocks``). A *reader* of a block is a running request in whose window the block lies, a request that starts, or
a pin.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many

import numpy as np

from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.cache.cached_blocks import CachedBlocks, Evicted, num_evicted_ahead
from kvpagoda.prefix import Lease, Match, PrefixTree
from kvpagoda.prefix.window_blocks import Flags, Handles, WindowBlocks

_NONE: Ids = np.empty(0, np.int32)


class Window(CachedBlocks):
    """One window group of ``tree``, its cached ``blocks``, and the first of its two rows there; see ``CachedBlocks``."""

    def __init__(self, tree: PrefixTree, group: BlockGroup, row: int) -> None:
        self._tree, self.group, self.row = tree, group, row
        self.blocks = WindowBlocks(group.growth, group.block_size, group.plan.num_rows)
        self._num_ahead = num_evicted_ahead(group)
        columns = group.table.cells.shape[1]
        self.cells: Ids = np.empty((2, 2, columns), np.int32)  #: scratch of ``publish``, like ``handles``
        self.handles: Handles = np.empty(columns, np.intp)

    def cells_of(self, ids: Ids) -> Ids:
        """Return the rows of this group, int32 ``[2, n]``, of ``ids``, int32 ``[rows of the tree, n]``; a view."""
        cells: Ids = ids[self.row : self.row + 2]
        return cells

    @property
    def num_cached(self) -> int:
        return self.blocks.num_cached

    @property
    def num_evictable(self) -> int:
        return self.blocks.num_idle

    @property
    def num_spare(self) -> int:
        # each reader counts as a block in use: its reservation expects a free block when it slides on
        return self.blocks.num_cached - self.blocks.num_reads

    @property
    def num_cold(self) -> int:
        return self.blocks.num_cold

    def span(self, num_blocks: int) -> range:
        return range(self.blocks.first_needed(num_blocks), num_blocks)

    def evict(self, n: int) -> Evicted | None:
        return Evicted(((self.group, self.blocks.evict(n + self._num_ahead)),)) if self.blocks.num_cold else None

    def remap(self, new_ids: Ids) -> None:
        self.blocks.remap(new_ids)

    def owned_ids(self) -> Ids:
        cells = self.cells_of(self._tree.all_ids())
        return self.blocks.ids(cells[0, self.blocks.are_there(cells)])


class Windows(tuple[Window, ...]):
    """All window and chunk groups of a cache. *Spans* are a range of blocks of a text for each of them."""

    @classmethod
    def of(cls, tree: PrefixTree, groups: Iterable[BlockGroup], first_row: int) -> Windows:
        """Return ``Windows`` for ``groups``, which use the rows of ``tree`` from ``first_row`` on."""
        return cls(Window(tree, group, first_row + 2 * number) for number, group in enumerate(groups))

    def can_resume(self, match: Match) -> bool:
        """Return whether a text can be resumed after all blocks of ``match``, as far as these groups matter."""
        return all(window.blocks.can_resume(window.cells_of(match.ids)) for window in self)

    def are_there(self, rows: Ids, spans: Many[range]) -> bool:
        """Return whether the blocks ``spans`` of each group are still cached. ``rows``: the cells that the tree has of
        the text, int32 ``[rows of the tree, n]``."""
        are_cached = [
            window.blocks.are_there(window.cells_of(rows)[:, span.start : span.stop]).all()
            for window, span in zip(self, spans)
        ]
        return all(are_cached)

    def boundaries(self, match: Match) -> list[Flags]:
        """Return, by group, after how many blocks of ``match`` it allows to resume: bool ``[num_blocks + 1]``."""
        return [window.blocks.boundaries(window.cells_of(match.ids)) for window in self]

    # -- readers -----------------------------------------------------------------------------------------------------

    def handles_of(self, rows: Ids, spans: Many[range]) -> list[Handles]:
        """Return, by group, the handles in ``spans`` of ``rows``, which are the cells that the tree has of a text,
        int32 ``[rows of the tree, n]``. intp each."""
        if not self:
            return []
        return [rows[window.row, span.start : span.stop].astype(np.intp) for window, span in zip(self, spans)]

    def read(self, handles: Many[Handles]) -> None:
        """Add one reader to the cached blocks ``handles`` of each group."""
        for window, group_handles in zip(self, handles):
            window.blocks.read(group_handles)

    def leave(self, handles: Many[Handles]) -> None:
        """Remove one reader from the blocks ``handles`` of each group."""
        for window, group_handles in zip(self, handles):
            window.blocks.leave(group_handles)

    def shared_by(self, slot: int) -> list[Handles]:
        """Return, by group, the handles of the shared blocks that ``slot`` reads. intp each."""
        return [window.blocks.handles(window.group.shared_ids(slot)) for window in self] if self else []

    # -- publishing --------------------------------------------------------------------------------------------------

    def publishing(self, slot: int, begin: int, rows: Ids) -> list[Handles]:
        """Write to ``rows`` the cells of the unshared blocks that ``slot`` has from block ``begin`` on, and 0 for
        blocks that it does not have. ``rows``: int32 ``[rows of the tree, n]``. Returns, by group, the handles of all
        its unshared blocks up to there."""
        publishing: list[Handles] = []
        end = begin + rows.shape[1]
        for window in self:
            group, row = window.group, window.row
            unshared = max(group.first[slot], group.shared[slot])
            handles = window.blocks.handles(group.table.cells[slot, unshared:end])
            first = max(0, unshared - begin)
            rows[row : row + 2, :first] = 0
            window.blocks.write_cells(handles[max(0, begin - unshared) :], rows[row : row + 2, first:])
            publishing.append(handles)
        return publishing

    def publish(
        self, tree: PrefixTree, slot: int, lease: Lease, publishing: Many[Handles], begin: int, *, is_new: bool
    ) -> list[tuple[BlockGroup, Ids]]:
        """Share the blocks of ``publishing``, whose cells from block ``begin`` on were inserted into the tree.

        ``lease``: covers them now. ``is_new``: the tree had none of them before. Returns, by group, the blocks that
        duplicate cached ones, int32: the caller frees them.
        """
        duplicates: list[tuple[BlockGroup, Ids]] = []
        end = lease.num_blocks
        for window, handles in zip(self, publishing):
            group, blocks, row = window.group, window.blocks, window.row
            first = end - len(handles)
            if is_new and first >= begin:
                blocks.publish(handles)
                group.share(slot, end)
                continue
            (ours, theirs), found = window.cells[:, :, : len(handles)], window.handles[: len(handles)]
            blocks.write_cells(handles, ours)
            tree.read_ids(lease, first, row, theirs)
            lacking = ~blocks.are_there(theirs)
            theirs[:, lacking] = ours[:, lacking]
            tree.put_ids(lease, first, row, theirs)
            found[:] = theirs[0]
            is_duplicate = found != handles
            blocks.publish(handles[~is_duplicate])
            blocks.read(found[is_duplicate])
            group.share(slot, end, blocks.ids(found))
            duplicates.append((group, blocks.ids(handles[is_duplicate])))
        return duplicates

    def forget(self, rows: Ids) -> list[tuple[BlockGroup, Ids]]:
        """Return, by group, the blocks that are no longer cached once the tree has removed ``rows``, int32
        ``[rows of the tree, n]``."""
        return [(window.group, window.blocks.forget(window.cells_of(rows))) for window in self]

    # -- proof -------------------------------------------------------------------------------------------------------

    def check(self, tree: PrefixTree, held: Iterable[Many[Handles]], kept: Iterable[Many[Handles]]) -> None:
        """Prove the counts of readers and keepers of each block. Raises CheckFailed.

        Readers are the rows of requests and ``held``, keepers are the checkpoints, ``kept``; both are lists of handles
        by group.
        """
        rows, held, kept = tree.all_ids(), [*held], [*kept]
        for number, window in enumerate(self):
            group, blocks = window.group, window.blocks
            shared = [group.table.cells[slot, group.first[slot] : end] for slot, end in enumerate(group.shared)]
            readers = [*shared, *(blocks.ids(handles[number]) for handles in held)]
            keepers = [handles[number] for handles in kept]
            counts = [
                np.bincount(np.concatenate([_NONE, *users]), minlength=group.plan.num_rows)
                for users in (readers, keepers)
            ]
            blocks.check(window.cells_of(rows), counts[0], counts[1])
