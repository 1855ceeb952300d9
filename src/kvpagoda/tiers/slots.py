"""A driver over slots of one size: it maps keys to slots, evicts records and decides which records are admitted.

``host_driver`` keeps the slots in the memory of this process; ``disk`` keeps them in a file.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, islice
from threading import Lock
from time import monotonic
from typing import Protocol

import numpy as np

from kvpagoda.abc import DriverStats, Lease, Status
from kvpagoda.errors import BadInput, CheckFailed
from kvpagoda.pages import Bytes, pages
from kvpagoda.tiers.driver import Calls, watch_forks
from kvpagoda.tiers.records import RecordBuffer
from kvpagoda.units import format_bytes, parse_bytes


class Medium(Protocol):
    """``num_slots`` slots of ``slot_nbytes`` bytes each, enough for one record of the buffer it is made over."""

    num_slots: int
    slot_nbytes: int

    def scan(self) -> list[tuple[bytes, int]]:
        """Return (key, slot) of every record that the medium holds already, each key and each slot at most once."""

    def write(self, slot: int, row: int) -> bool:
        """Write record ``row`` to ``slot``; ``scan`` finds it only when all is written. True, or raises OSError."""

    def read(self, slot: int, row: int) -> bool:
        """Read ``slot`` into record ``row``; return False if the slot holds less than a record. Raises OSError."""

    def clear(self, slot: int) -> bool:
        """Make ``scan`` find nothing in ``slot`` from now on. Returns True, or raises OSError."""

    def close(self) -> None:
        """Free all resources."""


class SlotDriver:
    """A driver that keeps records in the slots of a ``Medium`` and evicts the least recently used first.

    Of the keys of one call, which come parents before children, the deepest is evicted first.

    A slot is free, being written, or valid; a slot that is being read or cleared is not handed out until that is over.
    A full driver with ``remember`` > 0 admits a record in place of another only when it is stored a second time; it
    remembers that many refused keys. One lock protects all state; no I/O is done under it. O(1) per key and O(open
    leases) per call; a full driver also skips the keys that are not evictable.
    """

    part_nbytes = 2 << 20  # so little that it is still in the processor's cache when its checksum is computed

    def __init__(self, medium: Medium, *, remember: int = 0) -> None:
        self._medium, self._remember = medium, remember
        self._lock = Lock()
        self._slots: OrderedDict[bytes, int] = OrderedDict(medium.scan())
        taken = set(self._slots.values())
        self._free = [slot for slot in range(medium.num_slots - 1, -1, -1) if slot not in taken]
        self._writing: dict[bytes, int] = {}
        self._busy: Counter[int] = Counter()  # slot -> number of calls that read or clear it
        self._dropped: set[int] = set()  # busy slots that become free when these calls are over
        self._refused: OrderedDict[bytes, None] = OrderedDict()  # keys that were not admitted lately
        self._leases: dict[int, tuple[float, list[bytes]]] = {}  # number of the lease -> its end and its keys
        self._numbers = count()
        self._evicted = self._rejected = 0
        self._calls = Calls(medium.close)  # the last call that uses the medium closes it
        self.on_drop: Callable[[bytes], None] | None = None  #: called under the lock with each key that is dropped
        watch_forks(self)

    def store(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """See ``Driver``. REJECTED: no slot is available, the record is not admitted, or it is being written
        already."""
        if not self._calls.begin():
            return [Status.UNAVAILABLE] * len(keys)
        with self._lock:
            given: list[int | Status] = self._reserve(keys) if monotonic() < deadline else [Status.TIMEOUT] * len(keys)
        write = self._medium.write
        statuses = [
            slot if isinstance(slot, Status) else self._try(write, slot, row, deadline)
            for slot, row in zip(given, rows)
        ]
        with self._lock:
            for key, slot, status in zip(keys, given, statuses):
                if isinstance(slot, int):
                    del self._writing[key]
                    if status is Status.OK:
                        self._slots[key] = slot
                    else:
                        self._free.append(slot)
            self._touch(keys)
        self._calls.done()
        return statuses

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
        """See ``Driver``."""
        now = monotonic()
        with self._lock:
            if self._calls.is_closed or now >= deadline:
                fault = Status.UNAVAILABLE if self._calls.is_closed else Status.TIMEOUT
                return Lease(tuple(keys), (fault,) * len(keys), now)
            found = [key for key in keys if key in self._slots]
            number = next(self._numbers)
            self._expire()
            if found:
                self._leases[number] = (now + hold, found)
                self._touch(keys)
            statuses = tuple(Status.OK if key in self._slots else Status.MISS for key in keys)
        return Lease(tuple(keys), statuses, now + hold, partial(self._release, number))

    def load(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """See ``Driver``."""
        if not self._calls.begin():
            return [Status.UNAVAILABLE] * len(keys)
        with self._lock:
            slots = [self._slots.get(key) for key in keys]
            held = [slot for slot in slots if slot is not None]
            self._busy.update(held)
        read = self._medium.read
        statuses = [
            Status.MISS if slot is None else self._try(read, slot, row, deadline) for slot, row in zip(slots, rows)
        ]
        with self._lock:
            for i, (key, slot) in enumerate(zip(keys, slots)):
                if slot is not None and self._slots.get(key) != slot:  # discarded meanwhile
                    statuses[i] = Status.MISS
            self._leave(held)
        self._calls.done()
        return statuses

    def discard(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        """See ``Driver``. A slot that could not be cleared becomes free too: the next write to it clears it first."""
        if not self._calls.begin():
            return [Status.UNAVAILABLE] * len(keys)
        with self._lock:
            slots = [self._slots.pop(key, None) for key in keys]
            for key in keys:
                self._tell(key)
            held = [slot for slot in slots if slot is not None]
            self._busy.update(held)
            self._dropped.update(held)
        for slot in held:
            self._try(lambda slot, _: self._medium.clear(slot), slot, 0, deadline)
        with self._lock:
            self._leave(held)
        self._calls.done()
        return [Status.MISS if slot is None else Status.OK for slot in slots]

    def while_kept(self, key: bytes, call: Callable[[], None]) -> None:
        """Call ``call`` if the record ``key`` is kept, before it can be dropped (``on_drop``)."""
        with self._lock:
            if key in self._slots:
                call()

    def stats(self) -> DriverStats:
        """See ``Driver``."""
        with self._lock:
            self._expire()
            size, used = self._medium.slot_nbytes, self._medium.num_slots - len(self._free)
            return DriverStats(
                len(self._slots), used * size, self._medium.num_slots * size,
                len(self._leases), self._evicted, self._rejected,
            )  # fmt: skip

    def close(self) -> None:
        """See ``Driver``. The last call that still uses the medium closes it."""
        self._calls.close()

    def after_fork(self) -> None:
        """See ``Forkable``: closes the medium in the child, because only one process may use it and hold its lock."""
        self._lock, self._calls = Lock(), Calls(self._medium.close)
        self._calls.close()

    def check(self) -> None:
        """Prove that every slot is free, valid, being written or dropped. Raises CheckFailed naming the slots."""
        with self._lock:
            places = [*self._free, *self._slots.values(), *self._writing.values(), *self._dropped]
            if sorted(places) != list(range(self._medium.num_slots)):
                times = Counter(places)
                odd = [slot for slot in range(self._medium.num_slots) if times[slot] != 1]
                raise CheckFailed(f"slots in no place, or in two: {odd[:16]}", available=odd[:16])
            if not self._dropped <= self._busy.keys() or not self._slots.keys().isdisjoint(self._writing):
                raise CheckFailed(
                    f"slots that no call will free: {sorted(self._dropped - self._busy.keys())[:16]}, or written twice"
                )

    # -- under the lock ------------------------------------------------------------------------------------------------

    def _leave(self, held: Sequence[int]) -> None:
        """End a call that kept the slots ``held`` busy; free those that were dropped meanwhile."""
        for slot in held:
            self._busy[slot] -= 1
            if not self._busy[slot]:
                del self._busy[slot]
                if slot in self._dropped:
                    self._dropped.remove(slot)
                    self._free.append(slot)

    def _reserve(self, keys: Sequence[bytes]) -> list[int | Status]:
        """Return a slot for each key that ``store`` has to write, and for each other key its status."""
        wanted = sum(key not in self._slots for key in keys) - len(self._free)
        victims = iter(self._victims(wanted, set(keys)) if wanted > 0 else ())
        given: list[int | Status] = []
        for key in keys:
            if key in self._slots:
                given.append(Status.OK)
            elif key not in self._writing and self._free:
                given.append(self._free.pop())
            elif key not in self._writing and self._is_admitted(key) and (victim := next(victims, None)) is not None:
                given.append(self._slots.pop(victim))
                self._evicted += 1
                self._tell(victim)
            else:
                given.append(Status.REJECTED)
                self._rejected += 1
            if isinstance(given[-1], int):
                self._writing[key] = given[-1]
        return given

    def _tell(self, key: bytes) -> None:
        if self.on_drop is not None:
            self.on_drop(key)

    def _victims(self, n: int, keep: set[bytes]) -> list[bytes]:
        """Return up to ``n`` evictable keys, none of ``keep``, first victim first. O(n + keys not evictable)."""
        self._expire()
        keep = keep.union(*(keys for _, keys in self._leases.values()))
        evictable = (key for key, slot in self._slots.items() if key not in keep and slot not in self._busy)
        return list(islice(evictable, n))

    def _is_admitted(self, key: bytes) -> bool:
        """Return whether a record may be evicted for ``key``: one that was refused before is likely to be used
        again."""
        if not self._remember or key in self._refused:
            self._refused.pop(key, None)
            return True
        self._refused[key] = None
        if len(self._refused) > self._remember:
            self._refused.popitem(last=False)
        return False

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Mark ``keys`` as used now, the last one first, so that it is evicted first of them."""
        for key in reversed(keys):
            if key in self._slots:
                self._slots.move_to_end(key)

    def _expire(self) -> None:
        """Drop the leases whose time is over."""
        now = monotonic()
        for number in [number for number, (until, _) in self._leases.items() if until <= now]:
            del self._leases[number]

    # -- not under the lock --------------------------------------------------------------------------------------------

    def _release(self, number: int) -> None:
        """End the lease ``number``, if it has not ended yet."""
        with self._lock:
            self._leases.pop(number, None)

    @staticmethod
    def _try(move: Callable[[int, int], bool], slot: int, row: int, deadline: float) -> Status:
        """Call ``move(slot, row)`` unless the deadline is over, and return its outcome as a status."""
        if monotonic() >= deadline:
            return Status.TIMEOUT
        try:
            return Status.OK if move(slot, row) else Status.CORRUPT
        except OSError:
            return Status.UNAVAILABLE


class HostMemory:
    """The medium of ``host_driver``: slots of ordinary memory. The system provides a page when it is first written.

    A slot is a place of the buffer, and nothing is copied: a record that is written leaves its place to the slot, and one that
    is read shows the slot's place. Where the buffer has memory that was given to it, slots have memory of their own."""

    def __init__(self, buffer: RecordBuffer, nbytes: int) -> None:
        self.slot_nbytes = buffer.record_nbytes
        self.num_slots = nbytes // self.slot_nbytes
        if self.num_slots < 1:
            text = f"{format_bytes(nbytes)} holds no record of {format_bytes(self.slot_nbytes)}; give it more"
            raise BadInput(text, needed=self.slot_nbytes, available=nbytes)
        self._buffer, self._places = buffer, dict[int, int]()  # slot -> its place
        self._slots: list[Bytes] = []
        if not buffer.extend(self.num_slots):
            self._slots = [*pages(self.num_slots * self.slot_nbytes).reshape(self.num_slots, self.slot_nbytes)]

    def scan(self) -> list[tuple[bytes, int]]:
        return []

    def write(self, slot: int, row: int) -> bool:
        if self._slots:
            np.copyto(self._slots[slot], self._buffer.rows[row])
        else:
            self._places[slot] = self._buffer.exchange(row, self._places.get(slot))
        return True

    def read(self, slot: int, row: int) -> bool:
        if self._slots:
            np.copyto(self._buffer.rows[row], self._slots[slot])
        else:
            self._buffer.show(row, self._places[slot])
        return True

    def clear(self, slot: int) -> bool:
        return True

    def close(self) -> None:
        self._slots.clear()


def host_driver(buffer: RecordBuffer, nbytes: int | str) -> SlotDriver:
    """Return a driver that keeps records in host memory and evicts the least recently used first.

    Args:
        buffer: the records.
        nbytes: the most bytes, as a number or as text.

    Raises:
        BadInput: not even one record fits.
    """
    return SlotDriver(HostMemory(buffer, parse_bytes(nbytes)))
