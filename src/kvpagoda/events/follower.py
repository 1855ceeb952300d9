"""What a router knows of one cache: fed with messages in whatever order they come, asked how much of a text it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvpagoda.cache.event_log import TEXT
from kvpagoda.cache.namespace import Namespace, namespace_key
from kvpagoda.errors import BadInput
from kvpagoda.events.index import Block, PrefixIndex, Resumable
from kvpagoda.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, CacheInfo, Event, EventBatch, decode
from kvpagoda.prefix.tokens import NO_TOKEN, as_tokens
from kvpagoda.tiers.keys import prefix_root

_MOST_WAITING = 4096
"""Batches behind a gap that are kept until the gap is closed."""


def namespace_name(namespace: Namespace | str | bytes | None = None, secret: bytes = b"") -> bytes:
    """The digest by which events call a namespace, 32 bytes. Raises BadInput, also for one that names an epoch: events tell of
    the newest alone."""
    if isinstance(namespace, Namespace) and namespace.epoch is not None:
        raise BadInput(f"events tell of the newest weights alone; ask without epoch {namespace.epoch}")
    return prefix_root(namespace_key(namespace), secret)


class Follower:
    """Knows what one cache has, from the messages of its publisher alone. ``secret``: of the cache's ``Identity``.

    ``feed`` takes messages; while ``wanted`` is a number, messages are missing: ask the publisher to replay from there, and
    feed what it answers. It says what it knew last until then. A publisher that began again is seen by its batches. Not for
    use from several threads at once.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret
        self._index: PrefixIndex | None = None
        self._info: CacheInfo | None = None
        self._next = 0  # the number of the batch that comes next
        self._last = 0  # the highest number that is known of
        self._waiting: dict[int, EventBatch] = {}
        self.num_lost = 0  #: places where a text could be resumed that were lost since the last time all was told

    @property
    def wanted(self) -> int | None:
        """From which sequence number on messages are missing; None: none are, as far as anybody knows."""
        return self._next if self._next <= self._last else None

    @property
    def num_blocks(self) -> int:
        """Blocks of texts that the cache has."""
        return 0 if self._index is None else len(self._index.blocks)

    def feed(self, sequence: int, payload: bytes) -> list[bytes]:
        """The batch number ``sequence`` came, live or replayed. Returns the names of the blocks behind which nothing can be
        resumed any more (``BlockRemoved.lost``). Raises BadInput, changing nothing, for bytes that are no batch of kvpagoda.
        """
        batch = decode(payload)
        if batch.cache is None:
            raise BadInput("this batch does not say of which cache it tells; it is not from kvpagoda")
        if self._info is None or batch.cache.instance != self._info.instance:
            self._info, self._next, self._last = batch.cache, 0, 0
            self._waiting.clear()
        says_all = bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)
        if says_all and sequence > self._next:  # whatever came before
            self._next = sequence
            self._waiting = {number: one for number, one in self._waiting.items() if number > sequence}
        self._last = max(self._last, sequence)
        is_next = sequence == self._next
        if batch.events and (is_next or (sequence > self._next and len(self._waiting) < _MOST_WAITING)):
            self._waiting[sequence] = batch
        lost = list[bytes]()
        while self._next in self._waiting:
            self._apply(self._waiting.pop(self._next).events, lost)
        return lost

    def resumable(
        self,
        token_ids: Any,
        namespace: Namespace | str | bytes | None = None,
        *,
        media: Mapping[int, bytes] | None = None,
    ) -> Resumable:
        """How many tokens a new request with this prompt would find there, and how many it would not compute: what
        ``KVCache.lookup`` says. O(n). Raises BadInput."""
        tokens, name = as_tokens(token_ids, None), namespace_name(namespace, self._secret)
        return Resumable(0, 0) if self._index is None else self._index.look_up(tokens, name, media or {})

    # -- batches -----------------------------------------------------------------------------------------------------

    def _apply(self, events: list[Event], lost: list[bytes]) -> None:
        """``events`` are those of the next batch."""
        self._next += 1
        for event in events:
            if isinstance(event, AllBlocksCleared):
                assert self._info is not None
                self._index, self.num_lost = PrefixIndex(self._info.followed()), 0
            elif self._index is not None:  # the first batch of a publisher clears
                if isinstance(event, BlockStored):
                    self._store(self._index, event)
                else:
                    lost += self._remove(self._index, event)

    def _remove(self, index: PrefixIndex, event: BlockRemoved) -> list[bytes]:
        blocks = [index.blocks[name] for name in event.block_hashes]
        if _is_text(index, event.group_idx):
            lost = [block.name for block in blocks if index.remove(block)]
        else:
            lost = index.set_flag(event.group_idx or 0, blocks, is_there=False)
        self.num_lost += len(lost)
        return lost

    @staticmethod
    def _store(index: PrefixIndex, event: BlockStored) -> None:
        if not _is_text(index, event.group_idx):
            index.set_flag(event.group_idx or 0, [index.blocks[name] for name in event.block_hashes], is_there=True)
            return
        size = event.block_size
        keys = np.full(size * len(event.block_hashes), NO_TOKEN, np.int32)
        keys[: len(event.token_ids)] = event.token_ids
        for number, extra in enumerate(event.extra_keys or ()):
            for digest, offset in zip(extra[::2], extra[1::2]) if extra else ():
                keys[number * size + offset] = index.media_id(digest)
        text, step = keys.tobytes(), 4 * size
        above = event.parent_block_hash
        block: Block = index.root(event.namespace) if above is None else index.blocks[above]
        for at, name in enumerate(event.block_hashes):
            block = index.add(block, name, text[at * step : (at + 1) * step])


def _is_text(index: PrefixIndex, group: int | None) -> bool:
    """Whether blocks of ``group`` are the texts themselves."""
    return (TEXT if group is None else group) == index.followed.full
