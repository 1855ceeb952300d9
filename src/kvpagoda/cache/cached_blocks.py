"""The cached blocks of one group: how many there are, which are evicted next, and what follows from that.

    CachedTexts         blocks of the full group      cached as long as their tokens are in the prefix tree
    Window              blocks of a window group      cold ones are evicted; the others lose their checkpoint first
    KeptCheckpoints     copies of states              evicted with their checkpoint

``Capacity`` uses all of them through ``CachedBlocks``.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.prefix import PrefixTree
from kvpagoda.prefix.window_blocks import Handles

EVICT_AHEAD = 1024  # eviction frees 1/1024 of a group more than is needed, so that most steps find free blocks
_SHARE = 32  # at most 1/32 of a window group


def num_evicted_ahead(group: BlockGroup) -> int:
    """Return how many blocks of ``group`` ``CachedBlocks.evict`` evicts beyond those that it is asked for. For a window
    group these are as many as a request holds in a step, up to 1/32 of the group: they are cold, and seldom found."""
    return max(group.plan.num_blocks // EVICT_AHEAD, min(group.plan.most_blocks or 0, group.plan.num_blocks // _SHARE))


class Tail(NamedTuple):
    """The last window blocks before a checkpoint."""

    handles: tuple[Handles, ...]
    """By window group: the handles of the last blocks, intp ``[n]``."""
    needed: tuple[int, ...]
    """How many of these are needed to resume at the checkpoint; the others serve texts that part a little earlier."""


class Kept(NamedTuple):
    """What one checkpoint keeps: ``tail`` by reference, and ``states``, a block that holds a copy of the states: int32
    ``[1]``, or ``[0]`` for a model without states."""

    tail: Tail
    states: Ids


class Evicted(NamedTuple):
    """What is no longer cached; the caller frees the blocks."""

    blocks: tuple[tuple[BlockGroup, Ids], ...] = ()
    """(group, block ids), int32. Blocks of the full group are ordered deepest in their texts first."""
    checkpoints: tuple[tuple[int, Kept], ...] = ()
    """(name, what the checkpoint kept)."""
    texts: Ids | None = None
    """The numbers of evicted blocks of texts, int32, where there is no full group and an event log needs numbers."""


class CachedBlocks(Protocol):
    """The cached blocks of one group of the cache whose prefix tree is ``_tree``. Counts are O(1)."""

    _tree: PrefixTree

    @property
    def num_cached(self) -> int:
        """Cached blocks, in use or not."""

    @property
    def num_evictable(self) -> int:
        """Cached blocks that could be evicted now."""

    @property
    def num_spare(self) -> int:
        """How many evictable blocks reservations can count on."""
        return self.num_evictable

    @property
    def num_cold(self) -> int:
        """Cached blocks that nothing keeps, which are evicted before all others."""
        return 0

    def span(self, num_blocks: int) -> range:
        """Return which blocks of a text are read, and shared with others, to go on after its first ``num_blocks``."""
        return range(0)

    def oldest(self) -> int | None:
        """Return when the block that is evicted next, if none is cold, was last used, by one clock for all groups; None
        if unknown."""
        return self._tree.checkpoints.oldest()

    def evict(self, n: int) -> Evicted | None:
        """Evict ``n`` blocks and some ahead, or fewer if there are fewer. None if checkpoints keep all of them."""
        return None

    def remap(self, new_ids: Ids) -> None:
        """Replace every block id by ``new_ids[id]``, int32. O(blocks)."""

    def owned_ids(self) -> Ids:
        """Return the ids of the cached blocks, int32. O(blocks)."""
