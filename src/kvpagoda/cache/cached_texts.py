"""The texts in the prefix tree: the cached blocks of the full group, and what follows from their eviction."""

from __future__ import annotations

from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.cache.cached_blocks import CachedBlocks, Evicted, num_evicted_ahead
from kvpagoda.cache.checkpoints import KeptCheckpoints
from kvpagoda.cache.windows import Windows
from kvpagoda.prefix import Evicted as TreeEvicted
from kvpagoda.prefix import PrefixTree
from kvpagoda.prefix.id_pool import IdPool

_NOTHING = Evicted()


class CachedTexts(CachedBlocks):
    """The blocks of texts in ``tree``; see ``CachedBlocks``.

    ``full``: the group whose blocks are cached as long as their tokens; None if the model has no such group. Then texts
    take no device memory, and ``numbers`` numbers their blocks for an event log, if there is one.
    """

    def __init__(
        self, tree: PrefixTree, windows: Windows, kept: KeptCheckpoints, full: BlockGroup | None, numbers: IdPool | None
    ) -> None:
        self._tree, self._windows, self._kept, self._full, self._numbers = tree, windows, kept, full, numbers
        self._num_ahead = 0 if full is None else num_evicted_ahead(full)

    @property
    def num_cached(self) -> int:
        return self._tree.num_cached

    @property
    def num_evictable(self) -> int:
        return self._tree.num_evictable

    num_spare = num_evictable

    def span(self, num_blocks: int) -> range:
        return range(num_blocks)

    def oldest(self) -> int | None:
        return self._tree.oldest()

    def evict(self, n: int) -> Evicted:
        return self.gone(self._tree.evict(n + self._num_ahead))

    def gone(self, evicted: TreeEvicted) -> Evicted:
        """Return what follows in all groups from what the tree ``evicted``."""
        blocks, checkpoints, _ = self._kept.forget(evicted.states) if evicted.states else _NOTHING
        if self._full is not None:
            blocks += ((self._full, evicted.ids[0]),)
        texts = None if self._numbers is None else evicted.ids[-1]
        if self._numbers is not None:
            self._numbers.give(evicted.ids[-1])
        return Evicted((*blocks, *self._windows.forget(evicted.ids)) if self._windows else blocks, checkpoints, texts)

    def remap(self, new_ids: Ids) -> None:
        self._tree.remap(0, new_ids)

    def owned_ids(self) -> Ids:
        return self._tree.owned_ids(0)
