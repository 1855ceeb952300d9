"""The log of changes of the prefix cache, for followers outside: records in a bounded queue, as arrays.

The log observes a cache: it appends a record for each change, with the cache's own ids of blocks. A publisher takes the
records out, possibly in another thread, and gives blocks names that other processes know too (``kvpagoda.events``). A full
log drops what waits in it and starts again with a record of everything that is cached. So it takes bounded memory, and a
follower never misses a change."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import RLock
from typing import NamedTuple

from kvpagoda.abc import BlockIds, CachedText, CacheObserver, CacheView, RequestView
from kvpagoda.arrays import AnyIds, Ids
from kvpagoda.errors import BadInput
from kvpagoda.schema import Growth, Plan
from kvpagoda.tiers.driver import watch_forks

TEXT = -1
"""The group number of blocks of texts, where no group keeps all tokens."""


class SharedEvents(NamedTuple):
    """Blocks ``first ..`` of a text are cached: some are new, others may have been cached before."""

    namespace: bytes
    first: int
    keys: Ids
    """int32: their tokens as texts are compared: with media ids below 0, and ``NO_TOKEN`` after the end of a closed
    text."""
    texts: AnyIds
    """The id of each block in the full group, or in ``TEXT``. Where ``first`` is not 0 the id of the block
    before comes first, so there is one id more."""
    groups: _Groups
    """(group, first block, ids): which of the blocks are cached in groups that keep windows, chunks and states; id 0:
    not cached."""
    media: dict[int, bytes]
    """Media id -> digest, for the media ids in ``keys``."""


class Gone(NamedTuple):
    """Blocks are no longer cached: (group, ids). Those of the full group or ``TEXT`` come last, the deepest of a text
    first."""

    blocks: tuple[tuple[int, AnyIds], ...]


class Renewed(NamedTuple):
    """Nothing that was cached in ``namespaces`` can be found any more."""

    namespaces: frozenset[bytes]


class Restart(NamedTuple):
    """Forget all earlier records: ``shared`` is everything that is cached now, parents before their children."""

    shared: tuple[SharedEvents, ...]


class CachedEvents(NamedTuple):
    """A tier stored blocks of the full group, or dropped them (``is_there``): their hashes. ``medium``: "CPU" or "STORAGE"."""

    medium: str
    hashes: tuple[bytes, ...]
    is_there: bool


Record = SharedEvents | Gone | Renewed | Restart | CachedEvents
_Groups = tuple[tuple[int, int, AnyIds], ...]
_Raw = tuple[RequestView, int, int, AnyIds, _Groups]
"""What ``take`` turns into a ``SharedEvents``: request, first block, end block, texts, groups. It must be cheap: a step of an
engine has a microsecond for it."""


@dataclass(frozen=True)
class Followed:
    """What a follower must know of a cache to tell from its blocks where a text can be resumed.

    ``hit_grid``: hits end at multiples of this many tokens. ``groups``: name and growth of each group without which a text
    cannot be resumed: not the optional ones of a draft, nor running states whose checkpoints are another group. ``full``:
    the index there of the group that keeps all tokens, or ``TEXT``. Publishers alone need: ``secret``, see ``Identity``;
    ``fields``, the names of the arrays in a block of each group; ``numbers``, name of a group, and ``""`` -> its index in
    ``groups``."""

    block_size: int
    hit_grid: int
    groups: tuple[tuple[str, Growth], ...]
    full: int
    secret: bytes = b""
    fields: tuple[tuple[str, ...], ...] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, hit_grid: int, secret: bytes, wanted: Collection[str]) -> Followed:
        """Return what a follower must know of a cache with this ``plan``. ``wanted``: the groups that a hit needs."""
        told = [group for group in plan.groups if group.name in wanted]
        numbers = {group.name: number for number, group in enumerate(told)} | {"": TEXT}
        full = next((numbers[group.name] for group in told if not group.growth.is_bounded), TEXT)
        fields = tuple(tuple(place.field.name for place in group.layout.places) for group in told)
        groups = tuple((group.name, group.growth) for group in told)
        return cls(plan.block_size, hit_grid, groups, full, secret, fields, numbers)


class EventLog(CacheObserver):
    """The changes of one cache, ``KVCache(events=EventLog())``, until ``take`` removes them. One thread may use the
    cache while another calls ``take``.

    Args:
        capacity: the most records that wait: of the cache and of tiers together, give or take one that a tier tells just then.

    Raises:
        BadInput: a ``capacity`` out of range.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        if type(capacity) is not int or capacity < 1:
            text = f"the capacity of a log is a number of records, at least 1, got {capacity!r}"
            raise BadInput(text, needed=capacity, available=1)
        self.capacity = capacity
        self.num_restarts = 0  #: how often the log restarted: it was full, or out of memory
        self._records: deque[Record | tuple[BlockIds, ...] | _Raw] = deque()
        self._of_tiers: deque[CachedEvents] = deque()
        self._telling = RLock()  # a restart forgets all that tiers told before it, and nothing that they tell after it
        self._followed: Followed | None = None
        self._view: CacheView
        self._is_broken = self._is_due = False
        self.is_watching = False  #: whether tiers tell what they keep
        watch_forks(self)

    def attach(self, view: CacheView, followed: Followed) -> None:
        """Make this the log of a cache in which nothing is cached yet.

        Args:
            view: of the cache.
            followed: what of it events describe.

        Raises:
            BadInput: it is the log of a cache already.
        """
        if self._followed is not None:
            raise BadInput("this log belongs to a cache already; make a new EventLog for each cache", needed="log")
        self._view, self._followed = view, followed

    @property
    def followed(self) -> Followed:
        """What a follower must know of the cache.

        Raises:
            BadInput: the log has no cache yet.
        """
        if self._followed is None:
            raise BadInput("this log has no cache yet; make one first: KVCache(..., events=log)", needed="cache")
        return self._followed

    def take(self) -> list[Record]:
        """Remove the waiting records from the log, and return them, oldest first."""
        # What tiers have told so far is about blocks whose records are here by now, unless the cache has yet to tell of them.
        taken, of_tiers = list[Record](), self._of_tiers
        num_told = len(of_tiers)
        is_whole = self._followed is None or not self._view.num_waiting
        with suppress(IndexError):  # the thread of the cache may clear the log meanwhile
            while True:
                record = self._records.popleft()
                if isinstance(record, Record):
                    taken.append(record)
                elif isinstance(record[0], BlockIds):
                    taken.append(self._gone(record))
                else:
                    taken.append(self._finished(record))
        with self._telling:
            if is_whole and of_tiers is self._of_tiers:
                taken += [of_tiers.popleft() for _ in range(num_told)]
        return taken

    def _finished(self, raw: _Raw) -> SharedEvents:
        request, low, end, texts, groups = raw
        size = self.followed.block_size
        keys = request.keys(low * size, end * size)
        media = {one: request.media[one] for one in {*keys[keys < 0].tolist()} & request.media.keys()}
        return SharedEvents(request.namespace, low, keys, texts, groups, media)

    def _gone(self, freed: tuple[BlockIds, ...]) -> Gone:
        full, numbers = self.followed.full, self.followed.numbers
        blocks: list[tuple[int, AnyIds]] = [(numbers[one.group], one.ids) for one in freed if one.group in numbers]
        blocks.sort(key=lambda item: item[0] in (full, TEXT))
        return Gone(tuple(blocks))

    def told(self, record: CachedEvents) -> None:
        """Append a record of a tier, from any thread. If the log is full the cache's next record starts it again.

        Args:
            record: of the tier.
        """
        with self._telling:
            if len(self._records) + len(self._of_tiers) < self.capacity:
                self._of_tiers.append(record)
            else:
                self._is_broken = True

    def lost(self) -> None:
        """Note that records that were taken are lost: the cache's next record starts the log again. From any thread."""
        with self._telling:
            self._is_broken = True

    def after_fork(self) -> None:
        """See ``Forkable``: a thread of the parent may hold the lock."""
        self._telling = RLock()

    # -- called by the cache, after it has changed -------------------------------------------------------------------

    def on_cached(self, request: RequestView, blocks: tuple[BlockIds, ...], first: int) -> None:
        """See ``CacheObserver``."""
        if request.is_findable:
            try:
                self._put(self._raw(request, blocks, first))
            except MemoryError:
                self._is_broken = True
        elif self._is_due:
            self._restart_last()

    def on_evicted(self, blocks: tuple[BlockIds, ...], reason: str, namespaces: frozenset[bytes]) -> None:
        """See ``CacheObserver``."""
        if blocks:
            self._put(blocks)
        elif namespaces:
            self._put(Renewed(namespaces))
        else:  # back to earlier weights: a namespace that was invalid may be found again
            self._restart_last()

    def restart(self) -> None:
        """Drop what waits, and record everything that can be found now. O(blocks)."""
        self._is_due, self._is_broken = False, True  # until there is memory for all records
        self._records.clear()
        with suppress(MemoryError):
            everything = Restart(tuple(map(self._cached, self._view.texts())))
            with self._telling:
                self._of_tiers = deque()
                self._records.append(everything)
                self._is_broken = False

    # -- records -----------------------------------------------------------------------------------------------------

    def _put(self, record: Record | tuple[BlockIds, ...] | _Raw) -> None:
        if not self._is_due:
            if len(self._records) + len(self._of_tiers) < self.capacity and not self._is_broken:
                try:
                    self._records.append(record)
                except MemoryError:
                    self._is_broken = True
                return
            self.num_restarts += 1
        self._restart_last()

    def _restart_last(self) -> None:
        """Restart once all that happened is told: what can be found now is what that led to."""
        self._is_due = True
        self._records.clear()
        if self._view.num_waiting <= 1:
            self.restart()

    def _raw(self, request: RequestView, blocks: tuple[BlockIds, ...], first: int) -> _Raw:
        """Return the record that ``blocks`` of ``request`` are shared, from block ``first`` on."""
        numbers, (texts, *others) = self.followed.numbers, blocks
        groups: _Groups = ()
        for group, ids, begin in others:
            if group in numbers:  # what nobody needs for a hit, no router needs to know
                groups += ((numbers[group], begin, ids),)
                first = min(first, begin)
        above = first - 1 if first else 0
        return request, first, texts.first + len(texts.ids), texts.ids[above - texts.first :], groups

    def _cached(self, text: CachedText) -> SharedEvents:
        numbers, (texts, *others) = self.followed.numbers, text.blocks
        groups = tuple((numbers[group], begin, ids) for group, ids, begin in others if group in numbers)
        return SharedEvents(text.namespace, text.first, text.keys, texts.ids, groups, dict(text.media))
