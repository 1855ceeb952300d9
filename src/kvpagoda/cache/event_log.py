"""What changes of the prefix cache, for those who follow it from outside: records in a bounded log, as arrays.

The cache appends a record for each change, with the numbers that it uses itself; whoever publishes takes them out, in another
thread if need be, and gives blocks names that other processes know (``kvpagoda.events``). A log that is full forgets what
waits in it and begins again with all that is cached, so that it takes bounded memory and never misses a change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.cache.checkpoints import Evicted
from kvpagoda.cache.namespace import Media, Namespaces
from kvpagoda.cache.prefix_cache import PrefixCache
from kvpagoda.cache.request import Request
from kvpagoda.errors import BadInput
from kvpagoda.prefix.tokens import are_media
from kvpagoda.schema.fields import Growth

TEXT = -1
"""The group whose ids number blocks of texts where no group keeps all tokens."""


class Shared(NamedTuple):
    """Blocks ``first ..`` of a text are cached: some since now, some for long."""

    namespace: bytes
    first: int
    keys: Ids
    """Their tokens as texts are compared: with media ids below 0, and ``NO_TOKEN`` behind the end of a closed text."""
    texts: Ids
    """By which number each is known: its id in the full group, or in ``TEXT``. Where ``first`` is not 0 one more, in front:
    that of the block before."""
    groups: _Groups
    """(group, first block, ids): what is cached of them in groups that keep windows, chunks and states; 0: nothing."""
    media: dict[int, bytes]
    """Media id -> digest, of those in ``keys``."""


class Gone(NamedTuple):
    """Blocks are cached no more: (group, ids), those of texts last, the deepest of a text first."""

    blocks: tuple[tuple[int, Ids], ...]


class Moved(NamedTuple):
    """Blocks ``sources`` of ``group`` are blocks ``targets`` from now on, which were free."""

    group: int
    sources: Ids
    targets: Ids


class Renewed(NamedTuple):
    """Nothing of ``namespaces`` is found any more."""

    namespaces: frozenset[bytes]


class Restart(NamedTuple):
    """Forget what was said; this is all that is cached, parents before their children."""

    shared: tuple[Shared, ...]


Record = Shared | Gone | Moved | Renewed | Restart
_Groups = tuple[tuple[int, int, Ids], ...]
_Raw = tuple[bytes, int, int, Ids, int, Ids, _Groups, dict[int, bytes]]
"""What becomes a ``Shared`` when it is taken: namespace, first and last block, tokens, which of the text's is the first of
them, texts, groups, media. A step of an engine has a microsecond for it."""
_NO_MEDIA: dict[int, bytes] = {}


@dataclass(frozen=True)
class Followed:
    """What one must know of a cache to tell from its blocks where a text can be resumed.

    ``hit_grid``: hits end at multiples of so many tokens. ``groups``: name and growth of each. ``full``: the one that keeps
    all tokens, or ``TEXT``. ``secret``: see ``Identity``.
    """

    block_size: int
    hit_grid: int
    groups: tuple[tuple[str, Growth], ...]
    full: int
    secret: bytes = b""


class EventLog:
    """The changes of one cache, ``KVCache(events=EventLog())``, until somebody takes them.

    ``capacity``: records that wait at most. One thread uses the cache, another may ``take``.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        if type(capacity) is not int or capacity < 1:
            raise BadInput(f"the capacity of a log is a number of records, at least 1, got {capacity!r}")
        self.capacity = capacity
        self.num_restarts = 0  #: how often it was full, or memory lacked for a record
        self._records: deque[Record | Evicted | _Raw] = deque()
        self._followed: Followed | None = None
        self._is_broken = False

    def attach(self, prefix: PrefixCache, namespaces: Namespaces, media: Media, followed: Followed) -> None:
        """It is the log of ``prefix``, in which nothing is cached yet. Raises BadInput for a second cache."""
        if self._followed is not None:
            raise BadInput("this log belongs to a cache already; give each cache one of its own")
        self._prefix, self._namespaces, self._media, self._followed = prefix, namespaces, media, followed

    @property
    def followed(self) -> Followed:
        """What its cache keeps. Raises BadInput before there is one."""
        if self._followed is None:
            raise BadInput("this log has no cache yet; make one first: KVCache(..., events=log)")
        return self._followed

    def take(self) -> list[Record]:
        """What waits, oldest first; it is in the log no more."""
        taken = list[Record]()
        with suppress(IndexError):  # the thread of the cache may begin anew meanwhile
            while True:
                record = self._records.popleft()
                if isinstance(record, Evicted):
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

    def _gone(self, evicted: Evicted) -> Gone:
        full, texts = self.followed.full, evicted.texts
        gone = [(group.index, ids) for group, ids in evicted.blocks if len(ids)]
        gone.sort(key=lambda one: one[0] == full)
        if texts is not None and len(texts):
            gone.append((TEXT, texts))
        return Gone(tuple(gone))

    # -- what the cache says, after it has changed -------------------------------------------------------------------

    def published(self, request: Request, begin: int) -> None:
        """The blocks of ``request`` from ``begin`` on are shared."""
        prefix, end = self._prefix, request.lease.num_blocks
        try:
            low, groups = begin, list[tuple[int, int, Ids]]()
            for window in prefix.windows:
                group, first = window.group, window.group.first[request.slot]
                groups.append((group.index, first, group.table.cells[request.slot, first:end].copy()))
                low = min(low, first)
            self._put(self._raw(request, low, end, tuple(groups)))
        except MemoryError:
            self._is_broken = True

    def kept(self, request: Request, num_blocks: int, states: BlockGroup, copy: Ids) -> None:
        """Behind the first ``num_blocks`` blocks of ``request`` there is a checkpoint, block ``copy`` of ``states``."""
        try:
            groups = ((states.index, num_blocks - 1, copy),)
            self._put(self._raw(request, num_blocks - 1, num_blocks, groups))
        except MemoryError:
            self._is_broken = True

    def evicted(self, evicted: Evicted) -> None:
        """The prefix cache gave up ``evicted``."""
        if evicted.blocks or evicted.texts is not None:
            self._put(evicted)

    def moved(self, group: BlockGroup, sources: Ids, targets: Ids) -> None:
        """Blocks ``sources`` of ``group`` are blocks ``targets`` now."""
        self._put(Moved(group.index, sources, targets))

    def renewed(self, namespaces: Collection[bytes]) -> None:
        """Nothing of ``namespaces`` is found any more."""
        self._put(Renewed(frozenset(namespaces)))

    def restart(self) -> None:
        """Forget what waits, and say all that is found now. O(blocks)."""
        self._is_broken = True  # until there is memory for all of it
        self._records.clear()
        with suppress(MemoryError):
            self._records.append(Restart(tuple(self._all())))
            self._is_broken = False

    # -- records -----------------------------------------------------------------------------------------------------

    def _put(self, record: Record | Evicted | _Raw) -> None:
        if len(self._records) < self.capacity and not self._is_broken:
            try:
                self._records.append(record)
            except MemoryError:
                self._is_broken = True
            return
        self.num_restarts += 1
        self.restart()

    def _raw(self, request: Request, low: int, end: int, groups: _Groups) -> _Raw:
        """Blocks ``low .. end - 1`` of ``request`` are shared."""
        prefix, above = self._prefix, low - 1 if low else 0
        if prefix.full is not None:
            texts = prefix.full.table.cells[request.slot, above:end].copy()
        else:
            texts = prefix.tree.ids_between(request.lease, above, end)[-1]
        start, stop = low * prefix.block_size, end * prefix.block_size
        if not request.media_ids and stop <= request.own_length:
            return request.namespace, low, end, request.tokens, 0, texts, groups, _NO_MEDIA
        keys = request.committed_keys(start, stop)
        digests = self._digests(keys) if request.media_ids else _NO_MEDIA
        return request.namespace, low, end, keys, start, texts, groups, digests

    def _digests(self, keys: Ids) -> dict[int, bytes]:
        return {one: self._media.digest(one) for one in np.unique(keys[are_media(keys)]).tolist()}

    def _all(self) -> Iterator[Shared]:
        """All that is cached. O(blocks)."""
        prefix = self._prefix
        row = 0 if prefix.full is not None else prefix.tree.num_groups - 1
        states, namespace = prefix.states, b""
        for node in prefix.tree.nodes():
            namespace = namespace if node.root is None else node.root[1]
            if not node.num_blocks or not self._namespaces.is_current(namespace):
                continue
            assert node.parent is not None
            above = node.parent.ids[row, -1:] if node.start else node.ids[row, :0]
            groups = list[tuple[int, int, Ids]]()
            for window in prefix.windows:
                cells = window.cells_of(node.ids)
                ids = window.blocks.ids(cells[0]) * window.blocks.are_there(cells)
                groups.append((window.group.index, node.start, ids))
            if states is not None:
                for one in node.checkpoints.all if node.checkpoints is not None else ():
                    groups.append((states.index, one.depth - 1, prefix.kept[one.state_id].states))
            texts = np.concatenate((above, node.ids[row]))
            keys = node.tokens.copy()
            yield Shared(namespace, node.start, keys, texts, tuple(groups), self._digests(keys))
