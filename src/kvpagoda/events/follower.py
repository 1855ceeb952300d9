"""A router's view of one cache: it takes the cache's messages in any order, and says how much of a prompt is cached."""

from __future__ import annotations

from collections.abc import Mapping

from kvpagoda.arrays import TokenIds, as_tokens
from kvpagoda.errors import BadInput, unknown_name
from kvpagoda.events.index import Block, PrefixIndex, Resumable
from kvpagoda.events.trial import EventTrial, group_of
from kvpagoda.events.wire import (
    MEDIUM,
    MEDIUMS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Name,
    decode,
)
from kvpagoda.namespace import Namespace, checked_media, namespace_key
from kvpagoda.tiers.keys import prefix_root
from kvpagoda.units import whole_number

_MOST_WAITING = 4096
"""The most batches after a gap that are kept until the gap is closed."""


def namespace_name(namespace: Namespace | str | bytes | None = None, secret: bytes = b"") -> bytes:
    """Return the digest, 32 bytes, by which events name a namespace.

    Args:
        namespace: text or bytes alone are a salt.
        secret: of the cache's ``Identity``.

    Raises:
        BadInput: a namespace with an epoch: events describe only the newest weights.
    """
    if isinstance(namespace, Namespace) and namespace.epoch is not None:
        text = f"events describe only the newest weights; ask without epoch {namespace.epoch}"
        raise BadInput(text, needed=namespace.epoch)
    return prefix_root(namespace_key(namespace), secret)


class Follower:
    """Knows which blocks one cache has, from the messages of its publisher alone.

    Pass every message to ``feed``. While ``wanted`` is a number, messages are missing: ask the publisher to replay from
    that number, and pass its answers to ``feed``. Until then the answers here are those of the last complete state. A
    restart of the publisher is detected from its batches. Not for use from several threads at once.

    Args:
        secret: that of its ``Identity``, at most 64 bytes.

    Raises:
        BadInput: a longer ``secret``.
    """

    has_heartbeat = True  #: its publisher sends something every second

    def __init__(self, secret: bytes = b"") -> None:
        prefix_root(b"", secret)
        self._secret = secret
        self._index: PrefixIndex | None = None
        self._instance: int | None = None
        self._next = 0  # number of the next batch to apply
        self._last = 0  # highest batch number seen
        self._refused: int | None = None  # number of the batch that was refused last
        self._waiting: dict[int, EventBatch] = {}  # batches after a gap, by number
        self.num_lost = 0  #: positions at which a text could be resumed, lost since the last snapshot

    @property
    def wanted(self) -> int | None:
        """The sequence number from which messages are missing; None if none are known to be missing."""
        return self._next if self._next <= self._last else None

    @property
    def is_complete(self) -> bool:
        """Whether no message is known to be missing."""
        return self.wanted is None

    @property
    def num_blocks(self) -> int:
        """The number of blocks of texts that the cache has."""
        return 0 if self._index is None else len(self._index.blocks)

    def feed(self, sequence: int, payload: bytes) -> list[Name]:
        """Take a batch, live or replayed.

        Of a batch that is refused nothing is applied, and ``wanted`` asks for it again; if it is refused once more, for
        all batches from the first on.

        Args:
            sequence: its number.
            payload: its bytes.

        Returns:
            the names of the blocks after which no text can be resumed any more (``BlockRemoved.lost``).

        Raises:
            BadInput: bytes that are not a batch of kvpagoda or a batch that contradicts those before it, of which the
                last may have come before.
        """
        number = whole_number(sequence, "the number of a batch")
        try:
            batch = _read(payload)
        except BadInput:
            self._last = max(self._last, number)
            raise
        first = batch.events[0]
        if first.instance != self._instance:
            self._instance, self._next, self._last, self._refused = first.instance, 0, 0, None
            self._waiting.clear()
        is_alive, wanted = _is_alive(batch), self._next
        self._last = number if is_alive else max(self._last, number)  # its publisher says which is the last
        if isinstance(first, AllBlocksCleared) and number > self._next:  # it replaces all batches before it
            self._next = number
            self._waiting = {at: later for at, later in self._waiting.items() if at > number}
        is_next = number == self._next
        if not is_alive and (is_next or (number > self._next and len(self._waiting) < _MOST_WAITING)):
            self._waiting[number] = batch
        lost = list[Name]()
        while (batch_number := self._next) in self._waiting:
            try:
                self._apply(self._waiting.pop(batch_number).events, lost)
            except BadInput as error:
                self._next = 0 if self._refused == batch_number else wanted
                self._refused, self._last = batch_number, max(self._last, batch_number)
                text = f"batch {batch_number} does not follow those before it: {error}"
                raise BadInput(text, needed=batch_number, available=wanted) from None
            wanted = self._next = batch_number + 1
            self._refused = None
        return lost

    def replay_ended(self, start: int) -> None:
        """Do nothing: a replay has all that is missing, or a snapshot.

        Args:
            start: the number from which on was replayed.
        """

    def resumable(
        self,
        token_ids: TokenIds,
        namespace: Namespace | str | bytes | None = None,
        *,
        media: Mapping[int, bytes] | None = None,
    ) -> Resumable:
        """Return how many tokens of this prompt are cached, and how many of these a new request need not compute.

        The numbers are those of ``KVCache.lookup``. O(n).

        Args:
            token_ids: see ``KVCache.open``.
            namespace: see ``KVCache.open``.
            media: see ``KVCache.open``.

        Raises:
            BadInput: ``token_ids`` are no vector of integers, the namespace has an epoch, ``media`` are outside of the
                text, or no batch described the cache yet.
        """
        tokens, name = as_tokens(token_ids), namespace_name(namespace, self._secret)
        places = checked_media(media, len(tokens))
        return Resumable(0, 0) if self._index is None else self._index.look_up(tokens, name, places)

    # -- batches -----------------------------------------------------------------------------------------------------

    def _apply(self, events: list[Event], lost: list[Name]) -> None:
        """Apply ``events``, those of the next batch; append lost positions to ``lost``. Raises BadInput, changing nothing."""
        first, index = events[0], self._index
        if isinstance(first, AllBlocksCleared):
            assert first.cache is not None
            index = PrefixIndex(first.cache.followed())
        if index is None:
            raise BadInput("it does not describe the cache, and no batch did yet")
        index.forget_media()
        trial = EventTrial(index)
        changes = [event for event in events if not isinstance(event, AllBlocksCleared) and event.medium == MEDIUM]
        keys = [trial.keys(event) for event in changes]
        if index is not self._index:
            self._index, self.num_lost = index, 0
        for event, keys_of_event in zip(changes, keys):
            if isinstance(event, BlockRemoved):
                lost += self._remove(index, event)
            else:
                self._store(index, event, keys_of_event)

    def _remove(self, index: PrefixIndex, event: BlockRemoved) -> list[Name]:
        """Apply ``event`` to ``index``; return the blocks after which no text can be resumed any more."""
        blocks, group = [index.blocks[name] for name in event.block_hashes], group_of(index, event)
        if group == index.followed.full:
            lost = [block.name for block in blocks if index.remove(block)]
        else:
            lost = index.set_flag(group, blocks, is_there=False)
        self.num_lost += len(lost)
        return lost

    @staticmethod
    def _store(index: PrefixIndex, event: BlockStored, keys: list[bytes]) -> None:
        """Apply ``event`` to ``index``. ``keys``: of its blocks."""
        group, above = group_of(index, event), event.parent_block_hash
        if group != index.followed.full:
            index.set_flag(group, [index.blocks[name] for name in event.block_hashes], is_there=True)
            return
        block: Block = index.root(event.namespace) if above is None else index.blocks[above]
        for name, key in zip(event.block_hashes, keys):
            block = index.add(block, name, key)


def _read(payload: bytes) -> EventBatch:
    """Return the batch in ``payload``. Raises BadInput if it is none of kvpagoda."""
    batch = decode(payload)
    if not batch.events or batch.events[0].instance is None:
        text = (
            "this batch does not name its publisher; it is not from kvpagoda, or without its own fields. A "
            "VllmFollower (kvpagoda router --engine vllm) reads vLLM's own"
        )
        raise BadInput(text, needed="publisher")
    for number, event in enumerate(batch.events):
        if isinstance(event, AllBlocksCleared):
            if number or event.cache is None:
                raise BadInput(f"event {number} clears all blocks; only the first may, and describes the cache")
            event.cache.followed()
        elif event.medium not in MEDIUMS:
            raise unknown_name("medium", event.medium, MEDIUMS)
        elif not event.block_hashes and not _is_alive(batch):
            raise BadInput(f"event {number} has no blocks")
    return batch


def _is_alive(batch: EventBatch) -> bool:
    """Return whether ``batch`` has no blocks, and only says that its publisher is alive."""
    return all(isinstance(event, BlockRemoved) and not event.block_hashes for event in batch.events)
