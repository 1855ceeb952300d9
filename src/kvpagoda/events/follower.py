"""A router's view of one cache: it takes the cache's messages in any order, and says how much of a prompt is cached."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvpagoda.cache.event_log import TEXT
from kvpagoda.cache.namespace import Namespace, namespace_key
from kvpagoda.errors import BadInput
from kvpagoda.events.index import Block, PrefixIndex, Resumable
from kvpagoda.events.wire import MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, Name, decode
from kvpagoda.prefix.tokens import NO_TOKEN, TokenIds, as_tokens
from kvpagoda.tiers.keys import prefix_root

_MOST_WAITING = 4096
"""The most batches after a gap that are kept until the gap is closed."""


def namespace_name(namespace: Namespace | str | bytes | None = None, secret: bytes = b"") -> bytes:
    """Return the digest, 32 bytes, by which events name ``namespace``.

    Raises BadInput, also for a namespace with an epoch: events describe only the newest weights.
    """
    if isinstance(namespace, Namespace) and namespace.epoch is not None:
        raise BadInput(f"events describe only the newest weights; ask without epoch {namespace.epoch}")
    return prefix_root(namespace_key(namespace), secret)


class Follower:
    """Knows which blocks one cache has, from the messages of its publisher alone. ``secret``: that of its ``Identity``.

    Pass every message to ``feed``. While ``wanted`` is a number, messages are missing: ask the publisher to replay from
    that number, and pass its answers to ``feed``. Until then the answers here are those of the last complete state. A
    restart of the publisher is detected from its batches. Not for use from several threads at once.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret
        self._index: PrefixIndex | None = None
        self._instance: int | None = None
        self._next = 0  # number of the next batch to apply
        self._last = 0  # highest batch number seen
        self._waiting: dict[int, EventBatch] = {}  # batches after a gap, by number
        self.num_lost = 0  #: positions at which a text could be resumed, lost since the last snapshot

    @property
    def wanted(self) -> int | None:
        """The sequence number from which messages are missing; None if none are known to be missing."""
        return self._next if self._next <= self._last else None

    @property
    def num_blocks(self) -> int:
        """The number of blocks of texts that the cache has."""
        return 0 if self._index is None else len(self._index.blocks)

    def feed(self, sequence: int, payload: bytes) -> list[Name]:
        """Take batch number ``sequence``, live or replayed.

        Returns the names of the blocks after which no text can be resumed any more (``BlockRemoved.lost``). Raises
        BadInput, changing nothing, for bytes that are not a batch of kvpagoda.
        """
        batch = decode(payload)
        instance = batch.events[0].instance if batch.events else None
        if instance is None:
            raise BadInput("this batch does not name its publisher; it is not from kvpagoda, or without its own fields")
        is_snapshot = isinstance(batch.events[0], AllBlocksCleared)
        cleared = [event for event in batch.events if isinstance(event, AllBlocksCleared)]
        if any(event.cache is None for event in cleared):
            raise BadInput("this batch clears all blocks and does not describe the cache")
        if instance != self._instance:
            self._instance, self._next, self._last = instance, 0, 0
            self._waiting.clear()
        if is_snapshot and sequence > self._next:  # it replaces all batches before it
            self._next = sequence
            self._waiting = {number: later for number, later in self._waiting.items() if number > sequence}
        self._last = max(self._last, sequence)
        is_next = sequence == self._next
        if not _is_alive(batch) and (is_next or (sequence > self._next and len(self._waiting) < _MOST_WAITING)):
            self._waiting[sequence] = batch
        lost = list[Name]()
        while self._next in self._waiting:
            self._apply(self._waiting.pop(self._next).events, lost)
        return lost

    def resumable(
        self,
        token_ids: TokenIds,
        namespace: Namespace | str | bytes | None = None,
        *,
        media: Mapping[int, bytes] | None = None,
    ) -> Resumable:
        """Return how many tokens of this prompt are cached, and how many of these a new request need not compute.

        The numbers are those of ``KVCache.lookup``. O(n). Raises BadInput.
        """
        tokens, name = as_tokens(token_ids, None), namespace_name(namespace, self._secret)
        return Resumable(0, 0) if self._index is None else self._index.look_up(tokens, name, media or {})

    # -- batches -----------------------------------------------------------------------------------------------------

    def _apply(self, events: list[Event], lost: list[Name]) -> None:
        """Apply ``events``, those of the next batch; append lost positions to ``lost``."""
        self._next += 1
        for event in events:
            if isinstance(event, AllBlocksCleared):
                assert event.cache is not None
                self._index, self.num_lost = PrefixIndex(event.cache.followed()), 0
            elif (
                self._index is not None and event.medium == MEDIUM
            ):  # no index: the first batch, which clears, is missing
                if isinstance(event, BlockStored):
                    self._store(self._index, event)
                else:
                    lost += self._remove(self._index, event)

    def _remove(self, index: PrefixIndex, event: BlockRemoved) -> list[Name]:
        """Apply ``event`` to ``index``; return the blocks after which no text can be resumed any more."""
        blocks = [index.blocks[name] for name in event.block_hashes if name in index.blocks]
        if _is_text(index, event.group_idx):
            lost = [block.name for block in blocks if index.remove(block)]
        else:
            lost = index.set_flag(event.group_idx or 0, blocks, is_there=False)
        self.num_lost += len(lost)
        return lost

    @staticmethod
    def _store(index: PrefixIndex, event: BlockStored) -> None:
        """Apply ``event`` to ``index``."""
        if not _is_text(index, event.group_idx):
            blocks = [index.blocks[name] for name in event.block_hashes if name in index.blocks]
            index.set_flag(event.group_idx or 0, blocks, is_there=True)
            return
        size = event.block_size
        keys = np.full(size * len(event.block_hashes), NO_TOKEN, np.int32)
        keys[: len(event.token_ids)] = event.token_ids
        for number, extra in enumerate(event.extra_keys or ()):
            for place in extra or ():
                if not isinstance(place, str):  # the salt is in the namespace
                    keys[number * size + place[1]] = index.media_id(bytes.fromhex(place[0]))
        text, step = keys.tobytes(), 4 * size
        above = event.parent_block_hash
        block: Block = index.root(event.namespace) if above is None else index.blocks[above]
        for number, name in enumerate(event.block_hashes):
            block = index.add(block, name, text[number * step : (number + 1) * step])


def _is_text(index: PrefixIndex, group: int | None) -> bool:
    """Return whether ``group`` keeps all tokens, so that its blocks are the texts of the index."""
    return (TEXT if group is None else group) == index.followed.full


def _is_alive(batch: EventBatch) -> bool:
    """Return whether ``batch`` has no blocks, and only says that its publisher is alive."""
    return all(isinstance(event, BlockRemoved) and not event.block_hashes for event in batch.events)
