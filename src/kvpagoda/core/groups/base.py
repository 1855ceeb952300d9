"""What each kind of layers does, and the records in which groups and the prefix cache speak of blocks.

    FullGroup      full.py      each block of a text         in the prefix tree; cached as long as its tokens
    WindowGroup    window.py    the last window of a text    in the tree; evicted first once they slid out, unless a checkpoint
                                                             keeps them: then with the checkpoint
    StateGroup     state.py     copies of states             one for each checkpoint, evicted with it

    rows of the tree | full | .. | window: id, generation | window: id, generation | .. | number of a block

A new kind is a subclass of ``CacheGroup``, which ``groups_of`` makes for its spec (``Growth.spec``). It has a block table, a
free list and reservations of ``BlockGroup``, and its own answer to: ``shared_columns``, ``can_resume`` (hits), ``hold`` and
``leave`` (readers), ``rows_to_cache`` and ``cache_blocks`` (publishing), ``leaving`` and ``slide`` (blocks that slid out),
``surplus``, ``oldest`` and ``evict`` (eviction), ``cached_ids`` and ``check``. Requests and the cache loop over groups and do
not ask for their kind.

Blocks are given by id, never by where they lie. Methods return what follows from them; ``Capacity`` frees it.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from kvpagoda.arrays import Ids
from kvpagoda.core.blocks.group import BlockGroup, BlockNames, BlockPlaces, places_for
from kvpagoda.core.prefix.node import Inserted, Lease
from kvpagoda.core.prefix.order import Entry
from kvpagoda.core.prefix.tree import PrefixTree
from kvpagoda.schema.plan import GroupPlan

# -- records ---------------------------------------------------------------------------------------------------------


class CachedPart(NamedTuple):
    """What one checkpoint keeps."""

    tails: tuple[BlockNames, ...]
    """For each window group: its last blocks before the checkpoint, intp ``[n]``, by reference."""
    needed: tuple[int, ...]
    """How many of these are needed to resume at the checkpoint; the others serve texts that part a little earlier."""
    states: BlockNames
    """The block with a copy of the states, ``[1]``; ``[0]`` where no states are copied."""


class Freed(NamedTuple):
    """What is no longer cached; the caller frees the blocks."""

    blocks: tuple[tuple[int, BlockNames], ...] = ()
    """(index of the group, ids). Blocks of the full group are ordered deepest first."""
    checkpoints: tuple[tuple[int, CachedPart], ...] = ()
    """(name of the checkpoint, what it kept)."""
    numbers: Ids | None = None
    """The numbers of evicted blocks of texts, int32, where the tree numbers them."""


class Holding(NamedTuple):
    """What is kept from eviction, for a request that starts or for a pin, until it is released."""

    lease: Lease
    windows: tuple[BlockNames, ...]
    """For each window group: the blocks that are read, intp ``[n]``."""
    checkpoint: int | None = None
    partial: Lease | None = None
    """The pin of the cached block that begins with the last matching tokens, to be copied."""


class Added(NamedTuple):
    """What a request makes shareable: the whole blocks of ``keys``, which follow what ``lease`` covers. New blocks enter the
    eviction order as ``entry`` says (``is_late``: with those before them), others count as used when ``lease`` was opened.
    ``text``, ``priority``: see ``PrefixTree.insert``."""

    lease: Lease
    keys: Ids
    text: Ids | None = None
    priority: int = 0
    entry: Entry | None = None
    is_late: bool = False


class ToCache(NamedTuple):
    """The blocks of a group that several texts make shareable: ``counts[i]`` of ``ids`` for text i, its last ones."""

    ids: BlockNames
    counts: list[int]


class Leaving(NamedTuple):
    """What the rows of ``slots`` lose when they begin at columns ``firsts``: blocks that they share, in parts in which no
    block is twice, and own ones, by place."""

    slots: list[int]
    firsts: list[int]
    shared: list[BlockNames]
    own: BlockPlaces


class Running(Protocol):
    """What a group reads of a request: its slot, and how many tokens it has committed, was given and published."""

    slot: int
    own_length: int
    prompt_length: int
    publishes: bool
    lease: Lease


# -- what every group has --------------------------------------------------------------------------------------------

NO_IDS = BlockNames(np.empty(0, np.intp))
_EVICT_AHEAD = 1024  # eviction frees 1/1024 of a group more than is needed, so that most steps find free blocks
_SHARE = 32  # at most 1/32 of a window group


class CacheGroup(BlockGroup):
    """The blocks of one kind of layers. This base has what requests hold and caches nothing.

    ``num_tree_rows``: the rows of the prefix tree in which its blocks are. ``num_ahead``: how many blocks are evicted beyond
    those that are asked for. For a window group these are as many as a request holds in a step, up to 1/32 of the group: they
    are cold, and seldom found. ``is_optional``: a text can be resumed without its blocks."""

    num_tree_rows = 0
    is_optional = False

    def __init__(self, plan: GroupPlan, num_slots: int, num_columns: int, index: int, *, may_move: bool) -> None:
        columns = plan.places if plan.growth.is_state else num_columns
        super().__init__(plan, num_slots, columns, index=index, places=places_for(plan.num_rows, may_move=may_move))
        most = min(plan.most_blocks or 0, plan.num_blocks // _SHARE)
        self.num_ahead = max(plan.num_blocks // _EVICT_AHEAD, most)
        self.num_evicted = 0  #: blocks, so far

    def begin_empty(self, tree: PrefixTree, row: int) -> None:
        """Begin with nothing cached in ``tree``, whose rows from ``row`` on are those of this group."""
        self.tree, self.row = tree, row

    @property
    def num_cached(self) -> int:
        """Cached blocks, in use or not. O(1)."""
        return 0

    @property
    def num_evictable(self) -> int:
        """Cached blocks that could be evicted now. O(1)."""
        return 0

    @property
    def num_cold(self) -> int:
        """Cached blocks that are evicted before all others. O(1)."""
        return 0

    @property
    def surplus(self) -> int:
        """How many blocks of its own memory are free or evictable, less the outstanding ones; below 0 if it needs memory of
        other groups. O(1)."""
        return self.free.num_free + self.num_evictable - self.outstanding

    # -- hits --------------------------------------------------------------------------------------------------------

    def shared_columns(self, num_blocks: int) -> range:
        """Return which cached blocks of a text are read to go on after its first ``num_blocks``."""
        return range(0)

    # -- publishing --------------------------------------------------------------------------------------------------

    def rows_to_cache(
        self, slots: list[int], begins: list[int], ends: list[int], rows: Ids, *, is_whole: bool
    ) -> ToCache:
        """Write what the tree keeps of columns ``begins[i] .. ends[i] - 1`` of each of ``slots`` to ``rows``, int32 ``[rows
        of the tree, n]``, one text after another, and return the ids. ``is_whole``: every group has the rows of all tokens.
        Changes nothing."""
        return _NOTHING

    def cache_blocks(self, slots: list[int], ends: list[int], ids: BlockNames) -> None:
        """Share the first ``ends[i]`` columns of each of ``slots``: the tree took ``ids``, which nobody else reads yet."""

    def adopt(
        self, lease: Lease, ids: BlockNames, inserted: Inserted, *, takes_over: bool
    ) -> tuple[BlockNames, BlockNames]:
        """Cache ``ids``, the last blocks of ``lease``, of which the tree had some already, as ``inserted`` says. Return the
        ids that it has now, and those of ``ids`` that duplicate them. ``takes_over``: the request reads the cached blocks from
        now on; else only its own."""
        return ids, NO_IDS

    # -- eviction ----------------------------------------------------------------------------------------------------

    def oldest(self) -> int | None:
        """Return when the block that is evicted next, if none is cold, was last used, by one clock for all groups; None if
        unknown."""
        return None

    def evict(self, n: int) -> Freed | None:
        """Evict ``n`` blocks and some ahead, or fewer if there are fewer. None: a checkpoint must be evicted for them."""
        return None

    def cold_among(self, ids: BlockNames) -> BlockNames:
        """Return which of the cached blocks ``ids`` are cold, those that are so the longest first. O(n log n)."""
        return NO_IDS

    def evict_cold(self, ids: BlockNames) -> Freed:
        """Evict ``ids``, some of what ``cold_among`` returned. O(n)."""
        return Freed()

    def cached_in(self, rows: Ids) -> BlockNames:
        """Return the ids of the blocks that are cached of those in ``rows``, int32 ``[rows of the tree, n]``. O(n)."""
        return NO_IDS

    def cached_ids(self) -> BlockNames:
        """Return the ids of the cached blocks. O(blocks)."""
        return NO_IDS


_NOTHING = ToCache(NO_IDS, [])
