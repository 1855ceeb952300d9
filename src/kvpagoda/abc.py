"""The contracts that you, or a part of this library beside the core, implement.

    EvictionPolicy    KVCache(policy=..)          which cached blocks are evicted next
    Driver            KVCache(tiers=[..])         a store of records below the device
    Transfer          KVCache.sender, .receive    moves bytes between the memories of processes
    Backing           KVCache(memory=..)          provides the memory, and takes it back while the cache sleeps

``kvpagoda.PreemptionPolicy`` is the one of a queue of jobs. ``kvpagoda.testing`` has tests for drivers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

from kvpagoda.arrays import Ids
from kvpagoda.pages import Bytes

if TYPE_CHECKING:
    import torch

__all__ = ["Backing", "Driver", "DriverStats", "EvictionPolicy", "Lease", "Status", "Transfer"]

# -- eviction ----------------------------------------------------------------------------------------------------------

Keys = Ids
Forgotten = Ids | list[int]


class EvictionPolicy(Protocol):
    """Chooses which cached blocks are evicted next. The tree asks; the policy keeps the data that it needs to answer.

    A policy knows each block by its *key*: a small whole number, from 0 on, that the tree assigns. ``Keys`` are int32
    vectors. Only a **leaf** can be evicted: an unpinned block with nothing below it. The tree tells the policy which
    blocks are leaves. A policy may remember evicted blocks (ghosts). Their keys stay assigned until ``remove`` returns
    them as forgotten, and a block that is cached again before that gets the same key.

    An object serves one tree. It may read the vectors that it is given, not write them. A method that raises MemoryError
    must not have changed anything: the caller of the tree gets the error, and may call again. After any other error, and
    after an answer that cannot be, the tree never calls the object again: it logs the error, and evicts the
    oldest leaves first from then on. No request is lost, and no caller gets the error.

    >>> class Oldest:  # first added, first evicted; a policy for texts that never grow
    ...     def __init__(self): self.leaves = {}
    ...     def add(self, keys, priority): pass
    ...     def touch(self, keys, priority): pass
    ...     def set_leaf(self, key, is_leaf): self.leaves.update({key: 1}) if is_leaf else self.leaves.pop(key)
    ...     def choose(self, chain): return chain(next(iter(self.leaves)))
    ...     def remove(self, keys, *, evicted): return keys
    ...     def check(self, keys, leaves): assert set(self.leaves) == leaves
    >>> from kvpagoda.prefix import PrefixTree
    >>> tree = PrefixTree(block_size=1, policy=Oldest())
    """

    def add(self, keys: Keys, priority: int) -> None:
        """Called when the blocks ``keys``, nearest to the root first, were cached.

        The deepest block counts as added, and used, first. ``priority``: from the call that inserted the blocks.
        """

    def touch(self, keys: Keys, priority: int) -> None:
        """Called when the blocks ``keys``, nearest to the root first, were used once.

        The deepest block counts as used first. ``priority``: from the call that used the blocks.
        """

    def set_leaf(self, key: int, is_leaf: bool) -> None:
        """Called when the block ``key`` becomes a leaf, or is no leaf any more. Must not raise, not even MemoryError."""

    def choose(self, chain: Callable[[int], Keys]) -> Keys:
        """Return the blocks to evict next: one leaf, followed by those of its ancestors to evict before any other leaf.

        ``chain(leaf)`` returns the leaf and its ancestors, deepest first, as far as they can be evicted; the result is
        a leading part of it. There is at least one leaf. The tree evicts all blocks returned. If it cannot, it calls
        ``set_leaf`` for the first one with False and then with True.
        """

    def remove(self, keys: Keys, *, evicted: bool) -> Forgotten:
        """Called when the blocks ``keys``, deepest first, are no longer cached; return the keys that are forgotten.

        These may be of removed blocks or of ghosts, as a vector or a list. If not ``evicted``, the blocks were removed
        for good, and there is no need to remember them.
        """

    def check(self, keys: Keys, leaves: set[int]) -> None:
        """Prove that the policy knows exactly the cached ``keys`` and these ``leaves``. Raises CheckFailed."""


# -- tiers -------------------------------------------------------------------------------------------------------------


class Status(Enum):
    """The outcome for one key of a call. Any status except OK means that the block must be computed again."""

    OK = "ok"
    MISS = "miss"
    CORRUPT = "corrupt"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    REJECTED = "rejected"


@dataclass(frozen=True)
class Lease:
    """The result of a lookup: ``statuses[i]`` is OK if the driver has the record of ``keys[i]``.

    The driver does not evict these records until the time ``until`` (of ``time.monotonic``) or ``release``. That is a
    hint: only the status of a load says whether a record could be read.
    """

    keys: tuple[bytes, ...]
    statuses: tuple[Status, ...]
    until: float
    release: Callable[[], None] = lambda: None

    @property
    def num_found(self) -> int:
        """The number of keys before the first one that was not found."""
        return len(list(takewhile(lambda status: status is Status.OK, self.statuses)))


@dataclass(frozen=True)
class DriverStats:
    """What a driver holds. ``nbytes`` includes records that are being written and never exceeds ``capacity_nbytes``."""

    num_records: int
    nbytes: int
    capacity_nbytes: int
    num_leases: int = 0
    evicted: int = 0
    rejected: int = 0


class Driver(Protocol):
    """Stores whole records under opaque keys of 32 bytes. Its calls are synchronous, batched and thread-safe.

    A driver is made over a ``RecordBuffer``, which it may register with a device or an engine. ``rows`` are the numbers
    of records in that buffer; a driver touches them only during the call. Every call returns one status per key, in the
    order of ``keys``, and raises nothing for I/O errors. ``deadline`` is a time of ``time.monotonic``: work not begun
    by then is TIMEOUT.

    A record is written once: storing a key that the driver already has returns OK and changes nothing. A record is
    invisible until it is complete. A driver whose records outlive the process finds the complete ones again.
    ``kvpagoda.testing`` tests all of this.

    A tier passes all records of a request in one call, so that it costs one round trip. A driver that prefers smaller
    calls has an attribute ``part_nbytes``: the bytes per call.

    A driver whose store has shards, parts that can fail one by one, has a method ``shard_of(key)`` that returns the
    name of the shard that has ``key``, without I/O and without waiting for a lock. A tier then leaves alone only the
    shard that fails. A call that asks several shards returns before the deadline what the working ones answered.
    """

    def store(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """Store the records ``rows`` under ``keys``, parents before children. OK does not promise that they stay."""

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
        """Find which ``keys`` have records; these are not evicted for ``hold`` seconds, or until ``Lease.release``."""

    def load(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """Read the records of ``keys`` into ``rows``. The content of a row whose status is not OK is undefined.

        So is that of a record that is discarded during the call: the caller must verify the checksum of what was read.
        """

    def discard(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        """Delete the records of ``keys``, leased or not: OK, or MISS for a key without a record."""

    def stats(self) -> DriverStats:
        """Return the counts, without I/O."""

    def close(self) -> None:
        """Free all resources. Later calls return UNAVAILABLE; a second ``close`` does nothing."""


# -- hand-over ---------------------------------------------------------------------------------------------------------


class Transfer(Protocol):
    """Moves bytes between the memories of processes; one object in each process, on either side.

    Five methods. ``address`` returns plain data, which a ticket carries to the other side and its ``read`` takes. A fault
    of the other side or of the link is an OSError; what is no address of this kind is TicketRefused. Calls may block, but not
    for ever.
    """

    memory: Bytes
    """The exported memory, uint8 ``[n]``: all others read and write it at any time. Empty on a side that only receives."""

    def address(self) -> dict[str, Any]:
        """Return how others reach ``memory``, as JSON can hold it."""

    def landing(self, nbytes: int) -> Bytes:
        """Return memory to ``read`` into, uint8 ``[nbytes]``; it is the caller's until the next ``landing``."""

    def read(self, address: dict[str, Any], offset: int, into: Bytes) -> None:
        """Copy the bytes from ``offset`` on of the memory at ``address`` to ``into``, a part of ``landing``."""

    def write(self, address: dict[str, Any], offset: int, data: Bytes) -> None:
        """Copy ``data``, a part of ``landing``, to ``offset`` in the memory at ``address``."""

    def close(self) -> None:
        """End it: others cannot read ``memory`` any more. Idempotent."""


# -- memory ------------------------------------------------------------------------------------------------------------


class Backing(Protocol):
    """Three calls. Give an object of your own as ``KVCache(memory=...)``, for one cache.

    Where virtual memory is managed by you (the driver's calls on a GPU, an allocator of the engine), ``give_back`` unmaps
    and ``get_again`` maps. With a plain buffer of yours, ``give_back`` does nothing and returns 0, and ``get_again`` fills it
    with zeros: what you do with it in between is your affair, since nothing reads it then.
    """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return zeroed memory, uint8 ``[nbytes]``, contiguous, on the cache's device. Called when the cache is made,
        once for each arena; the addresses must stay the same as long as the tensor lives."""

    def give_back(self) -> int:
        """Give the physical memory of all that was allocated back, and return how many bytes that are. Nothing reads or
        writes there until ``get_again`` has returned."""

    def get_again(self) -> None:
        """Provide memory at the same addresses, which reads as zero. Also called after a ``give_back`` or ``get_again``
        that raised or was interrupted. Raises whatever says that there is none: the cache then sleeps on."""
