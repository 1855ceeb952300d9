"""Full attention: every block of a text is cached as long as its tokens are in the prefix tree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvpagoda.arrays import Ids
from kvpagoda.core.blocks.group import BlockNames, BlockPlaces
from kvpagoda.core.groups.base import CacheGroup, Freed, ToCache
from kvpagoda.core.prefix.node import Evicted, Inserted, Lease


class FullGroup(CacheGroup):
    """Blocks of layers that read all tokens. The tree evicts them from the ends of texts, with what other groups have of the
    same tokens. ``removed``: returns what follows in all groups from what the tree evicted."""

    num_tree_rows = 1
    removed: Callable[[Evicted], Freed]

    @property
    def num_cached(self) -> int:
        return self.tree.num_cached

    @property
    def num_evictable(self) -> int:
        return self.tree.num_evictable

    @property
    def surplus(self) -> int:
        return self.free.num_free + self.tree.num_cached - self.tree.leases.num_pinned - self.outstanding

    def shared_columns(self, num_blocks: int) -> range:
        return range(num_blocks)

    def rows_to_cache(
        self, slots: list[int], begins: list[int], ends: list[int], rows: Ids, *, is_whole: bool
    ) -> ToCache:
        cells = self.table.cells
        parts = [cells[slot, begin:end] for slot, begin, end in zip(slots, begins, ends)]
        places = BlockPlaces(parts[0] if len(parts) == 1 else np.concatenate(parts))
        rows[self.row] = self.names_at(places) if self.may_move else places
        return ToCache(BlockNames(rows[self.row]), [end - begin for begin, end in zip(begins, ends)])

    def cache_blocks(self, slots: list[int], ends: list[int], ids: BlockNames) -> None:
        shared = self.shared
        for slot, end in zip(slots, ends):
            shared[slot] = end

    def adopt(
        self, lease: Lease, ids: BlockNames, inserted: Inserted, *, takes_over: bool
    ) -> tuple[BlockNames, BlockNames]:
        return BlockNames(inserted.ids[self.row]), BlockNames(ids[inserted.duplicates[self.row]])

    def oldest(self) -> int | None:
        return self.tree.oldest()

    def evict(self, n: int) -> Freed | None:
        evicted = self.tree.evict(n + self.num_ahead)
        self.num_evicted += evicted.ids.shape[1]
        return self.removed(evicted)

    def cached_in(self, rows: Ids) -> BlockNames:
        return BlockNames(rows[self.row])

    def cached_ids(self) -> BlockNames:
        return BlockNames(self.tree.owned_ids(self.row))
