"""Numbered batches of events from the log of a cache, and their replay: no sockets, no threads.

EventLog ──take──► EventStream ──► batches 0, 1, 2 ..      the last ``keep`` batches can be replayed;
                                                           instead of older ones a snapshot is sent
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from itertools import groupby
from secrets import randbits
from time import time
from typing import Any, NamedTuple

import numpy as np

from kvpagoda.arrays import NO_TOKEN, AnyIds, Ids, are_media
from kvpagoda.events import wire
from kvpagoda.events.event_log import TEXT, CachedEvents, EventLog, Gone, Record, Renewed, Restart, SharedEvents
from kvpagoda.events.index import Block, PrefixIndex
from kvpagoda.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Encoding, Event, Name, replace
from kvpagoda.namespace import LEAST_MEDIA, fields_of, owner_of
from kvpagoda.tiers.keys import prefix_hashes, prefix_root
from kvpagoda.units import whole_number

Message = tuple[int, bytes]
"""Sequence number and payload."""
_MOST_GONE = 65_536
"""Blocks that left the cache and may still be on their way to a tier."""


class _InTier(NamedTuple):
    """A block that a tier keeps, or may be storing: the name of its namespace, and the event that it is stored."""

    namespace: Name
    event: BlockStored


class EventStream:
    """The events of one cache, from the first on.

    It keeps an index of all blocks of the cache, from which it makes snapshots. Use it from one thread, and make it
    between calls of the cache.

    Args:
        log: of the cache.
        keep: batches that can be replayed.
        rank: of data parallelism.
        encoding: how batches are written: "map", "array", or an ``Encoding``.

    Raises:
        BadInput: ``keep`` is below 1, ``rank`` below 0, an unknown ``encoding``, or a cache whose groups events cannot
            describe.
    """

    def __init__(self, log: EventLog, *, keep: int = 10_000, rank: int = 0, encoding: str | Encoding = "map") -> None:
        self.index, self._log, self._rank = PrefixIndex(log.followed), log, whole_number(rank, "the rank")
        self.encoding = encoding if isinstance(encoding, Encoding) else Encoding(encoding)
        self._info, self._instance = wire.CacheInfo.of(log.followed), randbits(wire.NAME_BITS)
        self._kinds = [
            wire.kind_of(growth, fields) for (_, growth), fields in zip(log.followed.groups, log.followed.fields)
        ]
        self._text_group = log.followed.full
        self._by_id: dict[int, dict[int, Block]] = {number: {} for number in range(TEXT, len(log.followed.groups))}
        self._media: dict[int, bytes] = {}  # media id of the cache -> digest
        self._most_media = LEAST_MEDIA
        self._gone: OrderedDict[bytes, _InTier] = OrderedDict()  # by digest: blocks that a tier may be storing
        self._kept: dict[str, dict[bytes, _InTier]] = {}  # medium -> digest -> a block that the tier keeps
        self._sent: deque[Message] = deque(maxlen=whole_number(keep, "keep, a number of batches,", at_least=1))
        self._is_lost = False  # whether events were lost: what comes before the next restart says too little
        self.num_events = 0  #: blocks stored or removed so far, counted once per group
        log.restart()
        self._number(self._taken() or [self._cleared()])

    @property
    def is_whole(self) -> bool:
        """Whether batches and snapshots have all that the log said; not after an error in ``drain``, until the next change."""
        return not self._is_lost

    @property
    def last(self) -> int:
        """The number of the last batch."""
        return self._sent[-1][0]

    def drain(self) -> Message | None:
        """Return the events since the last call as a batch; None if there are none. O(blocks of the batch).

        If it raises, as memory is lacking, its events are lost, and nothing more is told until the log starts again, with the
        next change of the cache."""
        try:
            events = self._taken()
            return self._number(events) if events else None
        except BaseException:
            self._is_lost = True
            self._log.lost()
            raise

    def alive(self) -> Message:
        """Return a message without blocks. Its number tells a follower whether it missed the last batch."""
        return self._message(self.last, [])

    def replay(self, start: int) -> list[Message]:
        """Return the batches from a number on, if all of them are kept; otherwise a snapshot.

        The snapshot has the number of the last batch, so that the next batch follows it.

        Args:
            start: the number.
        """
        if not self._sent[0][0] <= start <= self.last + 1:
            events: list[Event] = [self._cleared(), *self._all()]
            return [self._message(self.last, events)]
        return [message for message in self._sent if message[0] >= start]

    def _taken(self) -> list[Event]:
        """Return the events for all records that wait in the log."""
        events = list[Event]()
        for record in self._log.take():
            if isinstance(record, Restart):
                events.clear()
                self._is_lost = False
            if not self._is_lost:
                self._apply(record, events)
        return events

    def _number(self, events: list[Event]) -> Message:
        """Return ``events`` as the batch with the next number, and keep it for replays."""
        self._sent.append(self._message(self.last + 1 if self._sent else 0, events))
        return self._sent[-1]

    def _message(self, number: int, events: list[Event]) -> Message:
        events = events or [BlockRemoved([], wire.MEDIUM)]
        events[0].instance = self._instance
        return number, self.encoding.encode(wire.EventBatch(time(), events, self._rank))

    def _cleared(self) -> AllBlocksCleared:
        return AllBlocksCleared(cache=self._info)

    # -- records -----------------------------------------------------------------------------------------------------

    def _apply(self, record: Record, events: list[Event]) -> None:
        """Apply one record of the log to the index, and append its events to ``events``."""
        match record:
            case SharedEvents():
                self._share(record, events)
            case Gone(blocks):
                for group, ids in blocks:
                    self._remove(group, self._forget(group, ids), events)
            case Renewed(namespaces):
                self._drop({self._namespace(key) for key in namespaces}, events)
            case CachedEvents():
                self._keep(record, events)
            case Restart(shared):
                self.index.clear()
                self._gone.clear()
                self._kept.clear()
                for by_id in self._by_id.values():
                    by_id.clear()
                events.append(self._cleared())
                for text in shared:
                    self._share(text, events)

    def _share(self, shared: SharedEvents, events: list[Event]) -> None:
        """Add events for the cached blocks of ``shared`` that the index does not have yet."""
        known, numbers = self._by_id[self._text_group], shared.texts.tolist()
        if shared.media:
            if len(self._media) >= self._most_media:
                self._forget_media()
            self._media.update(shared.media)
        above = numbers.pop(0) if shared.first else 0
        parent = known.get(above)
        path = [known.get(number) for number in numbers]
        first_new = path.index(None) if None in path else len(path)
        if first_new:
            parent = path[first_new - 1]
        elif not shared.first:
            parent = self._root(shared.namespace)
        if parent is None:
            return  # its namespace was dropped
        new = self._add(parent, shared, first_new, len(numbers))
        for number, block in zip(numbers[first_new:], new):
            known[number] = block
        self._store(self._text_group, new, events)
        blocks = [*(block for block in path[:first_new] if block is not None), *new]
        for group, first, ids in shared.groups:
            by_id = self._by_id[group]
            pairs = zip(blocks[first - shared.first :], ids.tolist())
            fresh = [(block, block_id) for block, block_id in pairs if block_id and block_id not in by_id]
            by_id.update((block_id, block) for block, block_id in fresh)
            stored = [block for block, _ in fresh]
            if stored:
                self.index.set_flag(group, stored, is_there=True)
                self._store(group, stored, events)

    def _forget_media(self) -> None:
        """Forget the media of blocks that are not cached any more. O(tokens cached)."""
        keys = np.frombuffer(b"".join(block.key for block in self.index.blocks.values()), np.int32)
        live = {*keys[are_media(keys)].tolist()}
        self._media = {media_id: digest for media_id, digest in self._media.items() if media_id in live}
        self._most_media = 2 * len(self._media) + max(LEAST_MEDIA, len(self.index.blocks))

    def _add(self, parent: Block, shared: SharedEvents, first: int, end: int) -> list[Block]:
        """Add blocks ``first .. end - 1`` of ``shared`` to the index after ``parent``, and return them."""
        size, new = self.index.followed.block_size, list[Block]()
        keys = shared.keys[first * size : end * size]
        tokens, extras = keys, dict[int, bytes]()
        if shared.media:
            is_media = are_media(keys)
            tokens = np.where(is_media, 0, keys)
            for i in np.flatnonzero(is_media).tolist():
                extras[i // size] = extras.get(i // size, b"") + self._place(i % size, int(keys[i]))
        root = parent.digest if parent.depth else prefix_root(shared.namespace, self.index.followed.secret)
        text, step = keys.tobytes(), 4 * size
        for i, digest in enumerate(prefix_hashes(root, tokens, size, extras)):
            name = self.encoding.name(digest, self.index.blocks)
            parent = self.index.add(parent, name, text[i * step : (i + 1) * step])
            parent.digest = digest
            new.append(parent)
        return new

    def _place(self, offset: int, media_id: int) -> bytes:
        digest = self._media[media_id]
        return offset.to_bytes(8, "little") + len(digest).to_bytes(8, "little") + digest

    def _root(self, key: bytes) -> Block:
        """Return the root of the texts of the namespace with this ``key``."""
        root = self.index.root(self._namespace(key))
        root.digest = owner_of(key)
        return root

    def _namespace(self, key: bytes) -> bytes:
        return prefix_root(owner_of(key), self.index.followed.secret)

    def _forget(self, group: int, ids: AnyIds) -> list[Block]:
        """Remove ``ids`` of ``group`` from the map of ids, and return their blocks that the index still has."""
        known = self._by_id[group]
        blocks = [known.pop(block_id, None) for block_id in ids.tolist()]
        return [block for block in blocks if block is not None and block.parent is not None]

    def _drop(self, namespaces: Collection[bytes], events: list[Event]) -> None:
        """Remove all blocks of ``namespaces``, those that are still on their way to a tier included."""
        for namespace in namespaces:
            if namespace in self.index.roots:
                blocks = [block for run in _runs(self.index.roots[namespace]) for block in run]
                for group in range(len(self.index.followed.groups)):
                    if group != self._text_group:
                        self._remove(group, [block for block in blocks if block.groups >> group & 1], events)
                self._remove(self._text_group, blocks[::-1], events)
            for medium, kept in self._kept.items():
                lost = tuple(digest for digest, block in kept.items() if block.namespace == namespace)
                self._keep(CachedEvents(medium, lost, False), events)
        for digest in [digest for digest, block in self._gone.items() if block.namespace in namespaces]:
            del self._gone[digest]

    def _keep(self, record: CachedEvents, events: list[Event]) -> None:
        """Append events for what a tier keeps or dropped, of blocks that are cached or were lately."""
        kept = self._kept.setdefault(record.medium, {})
        for digest in record.hashes:
            if not record.is_there:
                if (block := kept.pop(digest, None)) is not None:
                    names = block.event.block_hashes
                    events.append(BlockRemoved(names, record.medium, block.event.group_idx))
            elif digest not in kept and (block := self._in_tier(digest)) is not None:
                kept[digest] = _InTier(block.namespace, replace(block.event, medium=record.medium, instance=None))
                events.append(replace(kept[digest].event))

    def _in_tier(self, digest: bytes) -> _InTier | None:
        """Return what to tell of the block with this ``digest``; None if it is not known."""
        block = self.index.blocks.get(self.encoding.name(digest, ()))
        if block is None or block.digest != digest:
            return self._gone.pop(digest, None)
        return _InTier(block.root.name, self._stored(self._text_group, [block]))

    # -- events ------------------------------------------------------------------------------------------------------

    def _store(self, group: int, blocks: list[Block], events: list[Event]) -> None:
        """Append an event for each run of consecutive blocks that ``group`` stored.

        ``blocks`` are blocks of one text, in its order.
        """
        self.num_events += len(blocks)
        for _, run in groupby(enumerate(blocks), lambda pair: pair[1].depth - pair[0]):
            events.append(self._stored(group, [block for _, block in run]))

    def _stored(self, group: int, run: list[Block]) -> BlockStored:
        """Return the event that consecutive blocks ``run`` are stored in ``group``."""
        size, parent, root = self.index.followed.block_size, run[0].parent, run[0].root
        assert parent is not None
        keys = np.frombuffer(b"".join(block.key for block in run), np.int32)
        number, name, kind, window = self._told(group)
        salt, adapter, weights = fields_of(root.digest)
        space = b"" if parent.depth else prefix_root(root.digest, self.index.followed.secret)
        salted = space.hex() if space and (salt is not None or weights is not None) else None
        return BlockStored(
            [block.name for block in run],
            parent.name if parent.depth else None,
            np.maximum(keys[keys != NO_TOKEN], 0).tolist(),
            size,
            lora_id=None,
            medium=wire.MEDIUM,
            lora_name=None if adapter is None else adapter.decode(errors="replace"),
            extra_keys=self._extra_keys(keys.reshape(-1, size), salted),
            group_idx=number,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            group_name=name,
            namespace=space,
            cache_salt=salted,
        )

    def _extra_keys(self, keys: Ids, salt: str | None) -> list[tuple[Any, ...] | None] | None:
        """Return the ``extra_keys`` of the blocks with tokens ``keys``, int32 ``[blocks, block size]``. ``salt``: of
        the first one."""
        found: list[tuple[Any, ...] | None] = [None] * len(keys)
        is_media = are_media(keys) if self._media else np.zeros(0, np.bool_)
        if salt is None and not is_media.any():
            return None
        for number in np.flatnonzero(is_media.any(axis=-1)).tolist():
            offsets = np.flatnonzero(is_media[number]).tolist()
            found[number] = tuple((self._media[int(keys[number, at])].hex(), at) for at in offsets)
        if salt is not None:
            found[0] = (*(found[0] or ()), salt)
        return found

    def _remove(self, group: int, blocks: list[Block], events: list[Event]) -> None:
        """Append an event that ``blocks`` are removed from ``group``; in the group of texts, the deepest come first."""
        if not blocks:
            return
        self.num_events += len(blocks)
        names = [block.name for block in blocks]
        if group == self._text_group:
            if self._log.is_watching:
                self._remember(blocks)
            lost = [name for block, name in zip(blocks, names) if self.index.remove(block)]
        else:
            lost = self.index.set_flag(group, blocks, is_there=False)
        number, name, kind, _ = self._told(group)
        events.append(BlockRemoved(names, wire.MEDIUM, number, group_name=name, group_kind=kind, lost=lost))

    def _remember(self, blocks: list[Block]) -> None:
        """Remember ``blocks``, which are being removed: a tier may report them later."""
        for block in blocks:
            self._gone[block.digest] = _InTier(block.root.name, self._stored(self._text_group, [block]))
        while len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)

    def _told(self, group: int) -> tuple[int | None, str | None, str | None, int | None]:
        """Return number, name, kind and window of ``group`` as events have them; None each for ``TEXT``."""
        if group == TEXT:
            return None, None, None, None
        name, growth = self.index.followed.groups[group]
        return group, name, self._kinds[group], growth.window

    def _all(self) -> Iterable[Event]:
        """Return events that store all blocks of the index, parents before their children."""
        events, counted = list[Event](), self.num_events
        for root in self.index.roots.values():
            for run in _runs(root):
                self._store(self._text_group, run, events)
                for group in range(len(self.index.followed.groups)):
                    if group != self._text_group:
                        self._store(group, [block for block in run if block.groups >> group & 1], events)
        self.num_events = counted
        for kept in self._kept.values():
            events += [replace(block.event) for block in kept.values()]
        return events


def _runs(root: Block) -> Iterable[list[Block]]:
    """Yield the blocks below ``root`` in runs along texts, parents before their children."""
    waiting = [*root.children.values()]
    while waiting:
        run = [waiting.pop()]
        while len(run[-1].children) == 1:
            run.extend(run[-1].children.values())
        waiting.extend(run[-1].children.values())
        yield run
