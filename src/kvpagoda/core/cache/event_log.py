"""The log of changes of the prefix cache, for followers outside: records in a bounded queue, as arrays.

The cache appends a record for each change, with its own names for blocks. A publisher takes the records out, possibly
in another thread, and gives blocks names that other processes know too (``kvpagoda.events``). A full log drops what
waits in it and starts again with a record of everything that is cached. So it takes bounded memory, and a follower never
misses a change."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvpagoda.arrays import AnyIds, Ids, are_media
from kvpagoda.core.blocks.places import BlockNames
from kvpagoda.core.cache.prefix_cache import PrefixCache
from kvpagoda.core.cache.request import Request
from kvpagoda.core.prefix.hybrid import Freed
from kvpagoda.errors import BadInput
from kvpagoda.namespace import Media, Namespaces
from kvpagoda.schema.fields import Growth

TEXT = -1
"""The group number of blocks of texts, where no group keeps all tokens."""


class Shared(NamedTuple):
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

    shared: tuple[Shared, ...]


class Kept(NamedTuple):
    """A tier stored blocks of the full group, or dropped them (``is_there``): their hashes. ``medium``: "CPU" or "STORAGE"."""

    medium: str
    hashes: tuple[bytes, ...]
    is_there: bool


Record = Shared | Gone | Renewed | Restart | Kept
_Groups = tuple[tuple[int, int, AnyIds], ...]
_Raw = tuple[bytes, int, int, Ids, int, AnyIds, _Groups, dict[int, bytes]]
"""What ``take`` turns into a ``Shared``: namespace, first block, end block, tokens, the position in the text of the
first of these, texts, groups, media. It must be cheap: a step of an engine has a microsecond for it."""
_NO_MEDIA: dict[int, bytes] = {}


@dataclass(frozen=True)
class Followed:
    """What a follower must know of a cache to tell from its blocks where a text can be resumed.

    ``hit_grid``: hits end at multiples of this many tokens. ``groups``: name and growth of each group without which a text
    cannot be resumed: not the optional ones of a draft, nor running states whose checkpoints are another group. ``full``:
    the index there of the group that keeps all tokens, or ``TEXT``. Publishers alone need: ``secret``, see ``Identity``;
    ``fields``, the names of the arrays in a block of each group; ``numbers``, group of the cache -> its index in
    ``groups``."""

    block_size: int
    hit_grid: int
    groups: tuple[tuple[str, Growth], ...]
    full: int
    secret: bytes = b""
    fields: tuple[tuple[str, ...], ...] = ()
    numbers: Mapping[int, int] = field(default_factory=dict)


class NoEvents:
    """The log of a cache whose changes nobody follows."""

    is_followed = False

    def published(self, request: Request, begin: int) -> None:
        """Record that the blocks of ``request`` from ``begin`` on are shared."""

    def kept(self, request: Request, num_blocks: int, copy: BlockNames) -> None:
        """Record a checkpoint after the first ``num_blocks`` blocks of ``request``, with its states in block ``copy``:
        ``[1]``, ``[0]`` without states."""

    def evicted(self, freed: Freed) -> None:
        """Record what the prefix cache evicted."""

    def renewed(self, namespaces: Collection[bytes]) -> None:
        """Record that nothing that was cached in ``namespaces`` can be found any more."""

    def restart(self) -> None:
        """Drop what waits, and record everything that can be found now. O(blocks)."""


class EventLog(NoEvents):
    """The changes of one cache, ``KVCache(events=EventLog())``, until ``take`` removes them.

    ``capacity``: the most records that wait. One thread may use the cache while another calls ``take``. Raises
    BadInput."""

    is_followed = True

    def __init__(self, capacity: int = 65_536) -> None:
        if type(capacity) is not int or capacity < 1:
            text = f"the capacity of a log is a number of records, at least 1, got {capacity!r}"
            raise BadInput(text, needed=capacity, available=1)
        self.capacity = capacity
        self.num_restarts = 0  #: how often the log restarted: it was full, or out of memory
        self._records: deque[Record | Freed | _Raw] = deque()
        self._followed: Followed | None = None
        self._is_broken = False
        self.is_watching = False  #: whether tiers tell what they keep

    def attach(self, prefix: PrefixCache, namespaces: Namespaces, media: Media, followed: Followed) -> None:
        """Make this the log of ``prefix``, in which nothing is cached yet. Raises BadInput if it is the log of a cache
        already."""
        if self._followed is not None:
            raise BadInput("this log belongs to a cache already; make a new EventLog for each cache", needed="log")
        self._prefix, self._namespaces, self._media, self._followed = prefix, namespaces, media, followed

    @property
    def followed(self) -> Followed:
        """What a follower must know of the cache. Raises BadInput if the log has no cache yet."""
        if self._followed is None:
            raise BadInput("this log has no cache yet; make one first: KVCache(..., events=log)", needed="cache")
        return self._followed

    def take(self) -> list[Record]:
        """Remove the waiting records from the log, and return them, oldest first."""
        taken = list[Record]()
        with suppress(IndexError):  # the thread of the cache may clear the log meanwhile
            while True:
                record = self._records.popleft()
                if isinstance(record, Freed):
                    taken.append(self._gone(record))
                elif isinstance(record, Record):
                    taken.append(record)
                else:
                    taken.append(self._finished(record))
        return taken

    def _finished(self, raw: _Raw) -> Shared:
        namespace, low, end, tokens, start, texts, groups, media = raw
        size = self.followed.block_size
        return Shared(namespace, low, tokens[low * size - start : end * size - start], texts, groups, media)

    def _gone(self, freed: Freed) -> Gone:
        full, numbers = self.followed.full, self.followed.numbers
        blocks: list[tuple[int, AnyIds]] = [
            (numbers[group], names) for group, names in freed.blocks if len(names) and group in numbers
        ]
        blocks.sort(key=lambda item: item[0] == full)
        if freed.numbers is not None and len(freed.numbers):
            blocks.append((TEXT, freed.numbers))
        return Gone(tuple(blocks))

    def told(self, record: Kept) -> None:
        """Append ``record`` of a tier, from any thread. If the log is full the cache's next record starts it again."""
        if len(self._records) < self.capacity:
            self._records.append(record)
        else:
            self._is_broken = True

    # -- called by the cache, after it has changed -------------------------------------------------------------------

    def published(self, request: Request, begin: int) -> None:
        prefix, numbers, end = self._prefix, self.followed.numbers, request.lease.num_blocks
        try:
            low, groups = begin, list[tuple[int, int, AnyIds]]()
            for group, _ in prefix.windows:
                if group.index not in numbers:
                    continue  # what nobody needs for a hit, no router needs to know
                first = group.first[request.slot]
                groups.append((numbers[group.index], first, group.names_between(request.slot, first, end)))
                low = min(low, first)
            self._put(self._raw(request, low, end, tuple(groups)))
        except MemoryError:
            self._is_broken = True

    def kept(self, request: Request, num_blocks: int, copy: BlockNames) -> None:
        states = self._prefix.states
        if states is None:
            return
        try:
            groups = ((self.followed.numbers[states.index], num_blocks - 1, copy),)
            self._put(self._raw(request, num_blocks - 1, num_blocks, groups))
        except MemoryError:
            self._is_broken = True

    def evicted(self, freed: Freed) -> None:
        if freed.blocks or freed.numbers is not None:
            self._put(freed)

    def renewed(self, namespaces: Collection[bytes]) -> None:
        self._put(Renewed(frozenset(namespaces)))

    def restart(self) -> None:
        self._is_broken = True  # until there is memory for all records
        self._records.clear()
        with suppress(MemoryError):
            self._records.append(Restart(tuple(self._all())))
            self._is_broken = False

    # -- records -----------------------------------------------------------------------------------------------------

    def _put(self, record: Record | Freed | _Raw) -> None:
        if len(self._records) < self.capacity and not self._is_broken:
            try:
                self._records.append(record)
            except MemoryError:
                self._is_broken = True
            return
        self.num_restarts += 1
        self.restart()

    def _raw(self, request: Request, low: int, end: int, groups: _Groups) -> _Raw:
        """Return the record that blocks ``low .. end - 1`` of ``request`` are shared."""
        prefix, above = self._prefix, low - 1 if low else 0
        texts: AnyIds
        if prefix.full is not None:
            texts = prefix.full.names_between(request.slot, above, end)
        else:
            texts = prefix.tree.ids_between(request.lease, above, end)[-1]
        start, stop = low * prefix.block_size, end * prefix.block_size
        if not request.media_ids and stop <= request.own_length:
            return request.namespace, low, end, request.tokens, 0, texts, groups, _NO_MEDIA
        keys = request.committed_keys(start, stop)
        digests = self._digests(keys) if request.media_ids else _NO_MEDIA
        return request.namespace, low, end, keys, start, texts, groups, digests

    def _digests(self, keys: Ids) -> dict[int, bytes]:
        return {media_id: self._media.digest(media_id) for media_id in np.unique(keys[are_media(keys)]).tolist()}

    def _all(self) -> Iterator[Shared]:
        """Yield everything that is cached and can be found. O(blocks)."""
        prefix, numbers = self._prefix, self.followed.numbers
        row = 0 if prefix.full is not None else prefix.tree.num_groups - 1
        states, namespace = prefix.states, b""
        for node in prefix.tree.nodes():
            namespace = namespace if node.root is None else node.root[1]
            if not node.num_blocks or not self._namespaces.is_current(namespace):
                continue
            assert node.parent is not None
            above = node.parent.ids[row, -1:] if node.start else node.ids[row, :0]
            groups = list[tuple[int, int, AnyIds]]()
            for group, window in prefix.windows:
                if group.index not in numbers:
                    continue
                cells = window.cells_of(node.ids)
                groups.append((numbers[group.index], node.start, cells[0] * window.are_there(cells)))
            if states is not None:
                for found in node.checkpoints.all if node.checkpoints is not None else ():
                    groups.append((numbers[states.index], found.depth - 1, prefix.kept[found.state_id].states))
            texts = np.concatenate((above, node.ids[row]))
            keys = node.tokens.copy()
            yield Shared(namespace, node.start, keys, texts, tuple(groups), self._digests(keys))
