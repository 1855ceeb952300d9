"""The parts of one cache, and the requests that use them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from kvpagoda.arrays import Ids, are_media
from kvpagoda.core.blocks.group import BlockPlaces
from kvpagoda.core.blocks.sectors import Sectors
from kvpagoda.core.cache.below import NoHandOvers, NoTiers, RowChecker
from kvpagoda.core.cache.capacity import Capacity
from kvpagoda.core.cache.counters import Counters
from kvpagoda.core.cache.guard import Guard
from kvpagoda.core.cache.observers import Observers
from kvpagoda.core.cache.options import Identity, Limits, Retention
from kvpagoda.core.cache.prefix_cache import PrefixCache
from kvpagoda.core.cache.request import RequestState, State, TextPart
from kvpagoda.core.cache.swap import Suspended, Swap
from kvpagoda.core.groups import CacheGroup, StateGroup, groups_of
from kvpagoda.core.groups.base import Added
from kvpagoda.core.memory.copies import agreement_of
from kvpagoda.core.memory.no_memory import NoMemory
from kvpagoda.core.prefix import EvictionPolicy
from kvpagoda.errors import BadInput, StaleHandle
from kvpagoda.namespace import Media, Namespaces
from kvpagoda.schema import Plan
from kvpagoda.tiers.health import Histogram
from kvpagoda.units import ceil_div, format_bytes

_log = logging.getLogger(__name__)
DEFAULT_CONTEXT = 131_072
UNBACKED_BLOCKS = 2**20
"""The most blocks of texts that a cache without a full group remembers. They take only host memory: their tokens, and
64 bytes each."""


@dataclass(frozen=True)
class Settings:
    """The settings of a cache; see ``KVCache``."""

    vocab_size: int | None = None
    fingerprint: str = ""
    policy: str | EvictionPolicy = "lru"
    retention: Retention = field(default_factory=Retention)
    identity: Identity = field(default_factory=Identity)
    limits: Limits = field(default_factory=Limits)
    tiers: Callable[[PrefixCache, Media, NoMemory], NoTiers] = lambda *_: NoTiers()
    """Makes the tiers below the device for a prefix cache, the digests of media in its texts, and its memory."""
    is_followed: bool = False
    """Whether somebody waits for each block that can be shared: it is shared as soon as it is full."""


class Core:
    """The state of one cache for ``plan``: who owns which slot and which block.

    It consists of request slots, one ``CacheGroup`` for each kind of layers, and the prefix cache. ``memory`` moves the
    bytes. No torch.

    ``running``: slot -> request. ``suspended``: request -> where its bytes are. ``stale``: namespaces that were
    invalidated, or whose epoch ended, while their blocks were in use. ``dropped``: one
    item for each sequence that was collected before it was closed, and each fence that was in its ``with`` block.
    ``dropped_fences``: the requests around which these fences are. Finalizers append to both, in any thread; ``Ending``
    empties them.
    """

    sanitizer: RowChecker | None = None

    def __init__(self, plan: Plan, memory: NoMemory, settings: Settings) -> None:
        self.plan, self.memory, self.settings = plan, memory, settings
        self.guard, self.block_size, self.vocab_size = Guard(), plan.block_size, settings.vocab_size
        limits = [plan.longest_context, plan.max_positions, settings.limits.max_context]
        self.max_context = min([limit for limit in limits if limit is not None], default=DEFAULT_CONTEXT)
        columns = ceil_div(self.max_context, plan.block_size)
        self.groups = groups_of(plan, columns)
        self.states = next((group for group in self.groups if isinstance(group, StateGroup)), None)
        grid = settings.limits.hit_grid
        if grid > 1 and grid % plan.block_size:
            text = f"hit_grid is a multiple of the block size, {plan.block_size} tokens, got {grid}"
            raise BadInput(text, needed=grid, available=plan.block_size)
        if settings.retention.rounds_states and grid < 2:
            text = "rounds_states rounds at multiples of Limits.hit_grid, which is 1; set it to the prefill chunk"
            raise BadInput(text, needed="hit_grid", available=grid)
        self.prefix = PrefixCache(
            self.groups, plan.block_size, settings.policy, settings.retention, plan.num_checkpoints,
            max(8 * columns, UNBACKED_BLOCKS), grid, is_followed=settings.is_followed,
        )  # fmt: skip
        self.full, self.bounded = self.prefix.full, self.prefix.bounded
        if self.states is not None and self.prefix.states is not None:
            self.states.begin_with_memory(memory, self.prefix.states)
        self._held = tuple(group for group in self.groups if group.places)
        self.sectors = Sectors(plan.num_sectors, self.groups) if plan.num_sectors else None
        swap = settings.limits.swap
        swap_nbytes = plan.nbytes if swap is None else int(swap)
        self.swap = Swap(swap_nbytes, self.groups, memory)
        identity, fingerprint = settings.identity, settings.fingerprint
        self.namespaces = Namespaces(fingerprint, identity.weights.encode())
        self.media = Media(self._media_in_use, lambda: self.prefix.tree.num_cached)
        self.texts_elsewhere: list[Callable[[], Iterable[Ids]]] = []  #: texts with media ids that others remember
        self.running: dict[int, RequestState] = {}
        self.suspended: dict[RequestState, Suspended] = {}
        self.stale: set[bytes] = set()
        self.dropped: deque[object] = deque()
        self.dropped_fences: deque[list[RequestState]] = deque()
        self.waiting: dict[RequestState, None] = {}  #: requests that are to be settled, the oldest first
        self.free_slots = list(range(plan.max_requests - 1, -1, -1))
        self.counters, self.is_open = Counters(identity.secret), True
        self.tiers = settings.tiers(self.prefix, self.media, memory)
        self.hand_overs = NoHandOvers()
        self.observers = Observers(self.guard, self.prefix, self.namespaces, self.media)
        self.residency: Callable[[], tuple[Histogram, Histogram, Histogram]] | None = None
        """Returns a ``ResidencyStats`` as a tuple, where somebody follows how long blocks live."""
        self.capacity = Capacity(
            self.groups,
            self.sectors,
            self.prefix,
            self.tiers,
            memory,
            self.guard,
            self.running,
            self.observers,
        )
        self.capacity.watermark = settings.limits.watermark
        #: their ``observable`` methods can be observed
        self.parts: tuple[object, ...] = (self.capacity, self.tiers, *self.tiers.parts)
        _log.info(
            "cache of %s for %d requests: %s", format_bytes(plan.nbytes), plan.max_requests,
            ", ".join(f"{group.num_blocks} blocks of {group.name}" for group in plan.groups),
        )  # fmt: skip

    @cached_property
    def agreement(self) -> str:
        """What a worker that has the memory of this cache must have in common with it, as text."""
        return agreement_of(self.plan, self.settings.fingerprint, self.swap.num_rows, self.swap.width)

    def check_open(self) -> None:
        """Raise StaleHandle if the cache is closed."""
        if not self.is_open:
            raise StaleHandle("this cache is closed", needed="cache", available="closed")

    def set_epoch(self, request: RequestState, epoch: int | None) -> None:
        """Bind the new ``request`` to the weights of ``epoch`` until it ends; None: to the newest weights, which may
        change while it runs."""
        request.stays, request.epochs = epoch is not None, [(0, self.namespaces.epoch if epoch is None else epoch)]
        if request.stays and not self.namespaces.is_current(request.namespace):
            self.stale.add(request.namespace)  # dropped when its last request ends

    def allocated(self, request: RequestState) -> None:
        """Set for how many tokens ``request`` has room, after its blocks changed. Cannot fail. O(groups)."""
        capacity, slot = self.max_context, request.slot
        for group in self._held:
            group_capacity = group.end[slot] * group.block_size
            if group_capacity < capacity:
                capacity = group_capacity
        request.capacity = capacity

    def release(self, request: RequestState, suspended: Suspended | None = None, last: TextPart | None = None) -> None:
        """Stop ``request``: free its own blocks and its slot, and unpin what it published.

        ``suspended``: from ``Swap.copy_out``; the request is then suspended, else it is closed. ``last``: blocks to
        publish first, if there is memory for that.
        """
        slot, guard = request.slot, self.guard
        owned = [(group, group.own_places(slot)) for group in self.groups]
        read = [group.shared_names(slot) for group in self.prefix.windows]
        if self.memory.is_copying:
            self.memory.finish_copies()
        guard.is_torn = True
        if last is not None:
            owned = self._publish_last(request, last, owned)
        for group in self.groups:
            group.close(slot)
        for group, places in owned:
            group.release(places)
            if self.capacity.tells_freed or self.observers.freed:
                self.capacity.freed(group, places)
        if self.states is not None and self.states.named:
            self.give_back(request, [*self.states.named.get(request, ())])
        for group, ids in zip(self.prefix.windows, read):
            group.leave(ids)
        self.prefix.tree.unpin(request.lease)
        if request.own_length < request.prompt_length:  # the rest of its prompt will not be computed
            request.lease.node.trim()
        del self.running[slot]
        self.waiting.pop(request, None)
        self.free_slots.append(slot)
        request.slot, request.state = -1, State.CLOSED
        if suspended is None:
            request.handle = None
            if self.observers.ended:
                self.observers.note_end(request)
        else:
            self.swap.put(suspended)
            self.suspended[request] = suspended
            request.state = State.SUSPENDED
        self.counters.stopped += 1
        guard.is_torn = False

    def give_back(self, request: RequestState, depths: Collection[int]) -> None:
        """Free the blocks that steps of ``request`` named for the states after ``depths`` blocks. Cannot fail."""
        for depth in depths:
            assert self.states is not None
            self.capacity.release(self.states, self.states.places_of(self.states.pop(request, depth)))

    def _publish_last(
        self, request: RequestState, last: TextPart, owned: list[tuple[CacheGroup, BlockPlaces]]
    ) -> list[tuple[CacheGroup, BlockPlaces]]:
        """Publish the ``last`` blocks of ``request``, and return the blocks, by group, that its release must free.

        They are as old as those before them: at the end of a request nothing of it is used. ``owned``: its own blocks,
        by group. Returns duplicates of cached blocks, and own blocks behind the published ones; all of ``owned`` if
        there is no memory to publish.
        """
        begin = request.lease.num_blocks
        try:
            added = Added(request.lease, *last, request.priority, is_late=True)
            _, duplicates = self.prefix.cache_blocks([request.slot], [begin], [added], is_whole=False)
        except MemoryError:
            return owned
        if self.observers.cached:
            self.observers.note_cached(request, begin, request.namespace not in self.stale)
        count = request.lease.num_blocks - begin
        return duplicates + [
            (group, places if group.is_optional else BlockPlaces(places[count:])) for group, places in owned
        ]

    def clear(self) -> None:
        """Forget every request and everything cached, also after an interrupt in the middle of a change."""
        self.guard.is_torn = True
        for request in (*self.running.values(), *self.suspended):
            request.state, request.rows, request.slot = State.CLOSED, None, -1
            request.num_fences, request.handle = 0, None
        self.running.clear()
        self.suspended.clear()
        self.stale.clear()
        self.waiting.clear()
        self.free_slots[:] = range(self.plan.max_requests - 1, -1, -1)
        self.counters.stopped += 1
        for group in self.groups:
            group.clear()
        if self.sectors is not None:
            self.sectors.clear()
        self.swap.clear()
        self.prefix.clear_all()
        self.media.clear()
        self.tiers.clear()
        self.memory.forget_copies()
        self.memory.restart()
        for group in self.groups:
            self.memory.freed(group.index, group.free.free_ids())
        self.observers.note_reset()
        self.guard.is_torn = False

    def _media_in_use(self) -> set[int]:
        """Return the media ids in everything that is cached, runs or is suspended, or that others remember. O(tokens)."""
        requests = *self.running.values(), *self.suspended
        ids = {media_id for request in requests for media_id in request.media_ids.values()}
        texts = (node.tokens for node in self.prefix.tree.nodes())
        for keys in chain(texts, *(elsewhere() for elsewhere in self.texts_elsewhere)):
            ids.update(keys[are_media(keys)].tolist())
        return ids

    def num_blocks(self, group: CacheGroup) -> int:
        """Return the number of blocks that ``group`` has memory for now."""
        if self.sectors is None:
            return group.free.num_ids
        return self.sectors.num_owned[group.index] * group.plan.per_sector

    def unusable_nbytes(self) -> int:
        """Return the bytes that are unused and that no group in need could use.

        These are free blocks that are not reserved and that no other group can take over, and what is lost by carving
        sectors into blocks.
        """
        nbytes = 0
        for group in self.groups:
            idle, plan = max(0, group.free.num_free - group.outstanding), group.plan
            if self.sectors is not None:
                idle %= plan.per_sector
                nbytes += self.num_blocks(group) * (plan.row_nbytes - plan.layout.nbytes)
            nbytes += idle * plan.row_nbytes
        return nbytes
