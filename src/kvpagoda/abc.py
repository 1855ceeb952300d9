"""The contracts that you, or a part of this library beside the core, implement.

    EvictionPolicy    KVCache(policy=..)          which cached blocks are evicted next
    Driver            KVCache(tiers=[..])         a store of records below the device
    Transfer          KVCache.sender, .receive    moves bytes between the memories of processes
    CacheObserver     KVCache(observers=[..])     is told what happens
    Backing           KVCache(memory=..)          provides the memory, and takes it back while the cache sleeps

``kvpagoda.PreemptionPolicy`` is the one of a queue of jobs. ``kvpagoda.testing`` has tests for drivers. What a request starts
from is a contract between parts of the core alone: ``StartSource`` in ``core/cache/admission.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy.typing as npt

from kvpagoda.arrays import Ids
from kvpagoda.errors import BadInput
from kvpagoda.pages import Bytes

if TYPE_CHECKING:
    import torch

__all__ = [
    "Backing", "BlockIds", "CacheObserver", "CacheView", "CachedText", "Driver", "DriverStats", "EvictionPolicy", "Lease",
    "RequestView", "Status", "Transfer", "wrap_calls",
]  # fmt: skip

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

    Examples:
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
        """Called when blocks were cached. The deepest block counts as added, and used, first.

        Args:
            keys: the blocks, nearest to the root first.
            priority: from the call that inserted them.
        """

    def touch(self, keys: Keys, priority: int) -> None:
        """Called when blocks were used once. The deepest block counts as used first.

        Args:
            keys: the blocks, nearest to the root first.
            priority: from the call that used them.
        """

    def set_leaf(self, key: int, is_leaf: bool) -> None:
        """Called when a block becomes a leaf, or is no leaf any more. Must not raise, not even MemoryError.

        Args:
            key: the block.
            is_leaf: whether it is one now.
        """

    def choose(self, chain: Callable[[int], Keys]) -> Keys:
        """Return the blocks to evict next: one leaf, followed by those of its ancestors to evict before any other leaf.

        There is at least one leaf. The tree evicts all blocks returned. If it cannot, it calls ``set_leaf`` for the
        first one with False and then with True.

        Args:
            chain: ``chain(leaf)`` returns the leaf and its ancestors, deepest first, as far as they can be evicted.

        Returns:
            A leading part of what ``chain`` returned.
        """

    def remove(self, keys: Keys, *, evicted: bool) -> Forgotten:
        """Called when blocks are no longer cached.

        Args:
            keys: the blocks, deepest first.
            evicted: if False, they were removed for good, and there is no need to remember them.

        Returns:
            The keys that are forgotten, of removed blocks or of ghosts, as a vector or a list.
        """

    def check(self, keys: Keys, leaves: set[int]) -> None:
        """Prove that the policy knows exactly the cached blocks and leaves.

        Args:
            keys: the cached blocks.
            leaves: those that are leaves.

        Raises:
            CheckFailed: it knows others.
        """


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
    """The result of a lookup: which records the driver has, and until when it keeps them.

    The driver does not evict these records until the time ``until`` or ``release``. That is a hint: only the status of
    a load says whether a record could be read.

    Args:
        keys: that were looked up.
        statuses: of each key; OK if the driver has its record.
        until: of ``time.monotonic``.
        release: ends the lease; it may be called again.
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
    """What a driver holds.

    Args:
        num_records: records.
        nbytes: their bytes, with those that are being written; never more than ``capacity_nbytes``.
        capacity_nbytes: the most bytes.
        num_leases: leases that are open.
        evicted: records evicted so far.
        rejected: records that were not taken so far.
    """

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
        """Store records, parents before children. OK does not promise that they stay.

        Args:
            keys: of the records.
            rows: of the buffer, one for each key.
            deadline: see the class.

        Returns:
            A status for each key.
        """

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
        """Find which keys have records.

        Args:
            keys: of the records.
            deadline: see the class.
            hold: seconds for which what was found is not evicted, unless ``Lease.release`` ends that.

        Returns:
            The lease of what was found.
        """

    def load(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """Read records into rows. The content of a row whose status is not OK is undefined.

        So is that of a record that is discarded during the call: the caller must verify the checksum of what was read.

        Args:
            keys: of the records.
            rows: of the buffer, one for each key.
            deadline: see the class.

        Returns:
            A status for each key.
        """

    def discard(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        """Delete records, leased or not.

        Args:
            keys: of the records.
            deadline: see the class.

        Returns:
            A status for each key: OK, or MISS for a key without a record.
        """

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
        """Return memory to ``read`` into.

        Args:
            nbytes: bytes.

        Returns:
            uint8 ``[nbytes]``; it is the caller's until the next ``landing``.
        """

    def read(self, address: dict[str, Any], offset: int, into: Bytes) -> None:
        """Copy bytes of the memory of another side.

        Args:
            address: what ``address`` returned there.
            offset: the first byte.
            into: a part of ``landing``.
        """

    def write(self, address: dict[str, Any], offset: int, data: Bytes) -> None:
        """Copy bytes to the memory of another side.

        Args:
            address: what ``address`` returned there.
            offset: the first byte.
            data: a part of ``landing``.
        """

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
        """Return zeroed memory on the cache's device. Called when the cache is made, once for each arena.

        Args:
            nbytes: bytes.

        Returns:
            uint8 ``[nbytes]``, contiguous; the addresses must stay the same as long as the tensor lives.
        """

    def give_back(self) -> int:
        """Give the physical memory of all that was allocated back, and return how many bytes that are. Nothing reads or
        writes there until ``get_again`` has returned."""

    def get_again(self) -> None:
        """Provide memory at the same addresses, which reads as zero. Also called after a ``give_back`` or ``get_again``
        that raised or was interrupted. Raises whatever says that there is none: the cache then sleeps on."""


# -- observers -------------------------------------------------------------------------------------------------------


class BlockIds(NamedTuple):
    """Blocks of one group."""

    group: str
    """Its name, as in ``cache.plan.groups``; ``""`` for blocks of texts where no group keeps all tokens."""
    ids: npt.NDArray[Any]
    """Block ids ``[n]``, int32 or intp; yours to keep. A block keeps its id as long as it is cached, also where its bytes
    move."""
    first: int = -1
    """Where the blocks are consecutive blocks of one text: which block of it ``ids[0]`` is; else -1."""


class RequestView(Protocol):
    """What a request was when something happened to it, read only. Two views of one request are equal, and have one hash."""

    @property
    def namespace(self) -> bytes:
        """The key of its namespace; equal for requests that may share blocks."""

    @property
    def prompt_length(self) -> int:
        """Tokens in its prompt."""

    @property
    def length(self) -> int:
        """Committed tokens: those whose rows are written."""

    @property
    def cached_tokens(self) -> int:
        """Tokens that it need not compute: it started, or was resumed, after them."""

    @property
    def loaded_tokens(self) -> int:
        """Those of ``cached_tokens`` that came from tiers or from another cache."""

    @property
    def slot(self) -> int:
        """Its row in block tables; -1 if it has none."""

    @property
    def priority(self) -> int:
        """As ``open`` was given it."""

    @property
    def is_findable(self) -> bool:
        """Whether others can find what it shares; False once its namespace was invalidated."""

    @property
    def token_ids(self) -> npt.NDArray[Any]:
        """Its committed tokens, int32 ``[length]``, read only."""

    @property
    def media(self) -> Mapping[int, bytes]:
        """Media id -> digest of the images in its text."""

    def keys(self, first: int, end: int) -> npt.NDArray[Any]:
        """Return tokens as texts are compared.

        Args:
            first: the first token.
            end: the token behind the last.

        Returns:
            int32 ``[end - first]``: a media id, below 0, where an image begins, and ``NO_TOKEN`` behind the committed
            ones.
        """


class CacheObserver:
    """Is told what happens in a cache: ``KVCache(observers=[..])``. Override the methods that you want; the others cost
    nothing.

    They are called at the end of the call of the cache in which something happened, in the order in which it happened: all
    of it is done and cannot be undone. A cache tells one observer after another, in the order in which they were given;
    its own tiers hear of an eviction before them, while memory still holds the bytes. One may ask ``stats`` and ``lookup``,
    and other calls of the cache raise BadInput. If a method raises an Exception, that is logged, and the observer is called
    no more: the cache is as it would be without it.

    What is cached is what ``on_cached`` told of and ``on_evicted`` did not. An interrupt may let a change be told twice.
    """

    def on_start(self, request: RequestView) -> None:
        """``request`` got a slot: it was opened, forked, received from another cache, or resumed.

        Args:
            request: that begins.
        """

    def on_hit(self, request: RequestView, blocks: tuple[BlockIds, ...]) -> None:
        """``request`` starts with cached blocks, which it shares. Told after ``on_start``, if there are any.

        Args:
            request: that begins.
            blocks: what was found, or its parent's.
        """

    def on_cached(self, request: RequestView, blocks: tuple[BlockIds, ...], first: int) -> None:
        """Blocks of ``request`` can be shared from now on.

        Told when whole blocks are published: some time after their tokens are committed, at the latest before anybody
        could find them. A block with a copy of states is told when a checkpoint is kept.

        Args:
            request: that computed them.
            blocks: those of its text from block ``first`` on, the one before, and what windows hold of earlier ones.
            first: the number of a block of the text.
        """

    def on_evicted(self, blocks: tuple[BlockIds, ...], reason: str, namespaces: frozenset[bytes]) -> None:
        """Blocks are not cached any more.

        - ``evicted``: to make room, or because a hint, ``sleep`` or a limit asked for it.
        - ``dropped``: nobody can find them, or they are replaced.
        - ``invalidated``: nothing that was cached in ``namespaces`` (none: in any) can be found from now on; told without
          blocks, which are told as ``dropped`` when no request uses them.
        - ``reset``: everything is forgotten, requests too, without an ``on_end``; told without blocks.
        - ``lost``: memory lacked to note what happened, and some was not told; without blocks.

        Args:
            blocks: those of texts come deepest first.
            reason: one of the above.
            namespaces: those of an invalidation, else empty.
        """

    def on_freed(self, blocks: tuple[BlockIds, ...]) -> None:
        """Blocks, cached or not, have no owner any more; others may get them.

        Args:
            blocks: that are free.
        """

    def on_end(self, request: RequestView) -> None:
        """``request`` ended. What it shared stays cached.

        Args:
            request: that ended.
        """


class CachedText(NamedTuple):
    """Cached blocks of one text, from block ``first`` on."""

    namespace: bytes
    """The key of its namespace."""
    first: int
    """The number of its first block here."""
    keys: npt.NDArray[Any]
    """int32: their tokens, as ``RequestView.keys``."""
    media: Mapping[int, bytes]
    """Media id -> digest, for the media ids in ``keys``."""
    blocks: tuple[BlockIds, ...]
    """As ``on_cached`` tells them; in groups of windows, id 0 is a block that is not cached."""


class CacheView(Protocol):
    """What an observer that must know all that is cached can ask, at any time between two calls of the cache or while it is
    told of one: ``EventLog``."""

    @property
    def num_waiting(self) -> int:
        """Changes of what is cached that are not told yet, the one that is being told included. Any thread may ask."""

    def texts(self) -> list[CachedText]:
        """Return everything that is cached and can be found, parents before their children. O(blocks)."""


# -- calls that can be wrapped ---------------------------------------------------------------------------------------

Call = Callable[..., Any]
Around = Callable[[str, Call], Call]
C = TypeVar("C", bound=Call)


def observable(method: C) -> C:
    """Mark ``method``, of a class whose objects are among the parts of a cache, and return it. A mark costs nothing."""
    method.__dict__["is_observable"] = True
    return method


def wrap_calls(parts: Iterable[object], around: Around, kind: str = "an observer") -> Callable[[], None]:
    """Replace the marked methods of ``parts``, ``cache.core.parts``, by ``around(name, call)``, and return a function that
    undoes this: for spans, a profiler, a test that makes one fail. An observer hears what happened; this measures how long
    it took.

        open      Admission.open        admit a request
        fork      Admission.fork        start a request beside a running one
        receive   Admission.receive     start a request that another cache handed over
        resume    Admission.resume      run a suspended request again, from its copy or from the start
        suspend   Lifecycle.suspend     copy a request to host memory
        close     Ending.close          end a request, or mark it as closing while a fence is around it
        find      TierReader.find       look in tiers for what the device lacks, and read the checkpoint
        load      TierReader.load       read records into blocks
        store     Offloader.store       copy blocks to staging memory, and begin to store them in a tier
        forget    Capacity.forget       remove entries of the prefix cache; ``is_evicted=True`` where that makes room
        vacate    Capacity.vacate       move blocks out of sectors that another group takes; None where none can be taken

    Args:
        parts: the objects that have these methods.
        around: gets the name of a method and the bound method, or what an earlier caller of another ``kind`` made of it.
            Returns that, or a function that calls it and returns its result. Is called again when an earlier one ends.
        kind: what this is, for the error; there is one of each kind.

    Returns: what undoes it; twice does no harm.

    Raises:
        BadInput: there is one of this kind already. It, and what ``around`` raises, leave everything as it was.
    """
    places = [
        (part, name)
        for part in parts
        for name, method in vars(type(part)).items()
        if getattr(method, "is_observable", False)
    ]
    if any(kind in vars(part).get("wrappers", ()) for part, _ in places):
        raise BadInput(f"the calls of this cache are wrapped by {kind} already; end that first", needed=kind)
    for (part, name), call in [(place, around(place[1], getattr(*place))) for place in places]:
        vars(part).setdefault("wrappers", {})[kind] = around
        setattr(part, name, call)

    def end() -> None:
        for part, name in places:
            others: dict[str, Around] = vars(part).get("wrappers", {})
            if others.get(kind) is around:
                del others[kind]
            vars(part).pop(name, None)
            if not others:
                vars(part).pop("wrappers", None)
            for other in others.values():
                setattr(part, name, other(name, getattr(part, name)))

    return end
