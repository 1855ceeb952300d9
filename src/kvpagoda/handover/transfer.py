"""What moves bytes between the memories of processes, and how a sender's exported memory is divided.

    exported memory  | receipts: slot by slot, rank by rank | lease | free | lease | ..
    a lease          | header | checksum of each record | records of group 0 | records of group 1 | ..

Receivers read leases, and write receipts; nobody runs code for them on the sender's side. A receipt names its lease, so one
that comes too late is nobody's.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvpagoda.errors import BadInput, OutOfBlocks, shown
from kvpagoda.memory.pages import Bytes
from kvpagoda.units import align_up, format_bytes, instance_of, real_number

MOST_LEASES, MOST_RANKS = 256, 64
LEASE_NBYTES = 16
RECEIPTS_NBYTES = MOST_LEASES * MOST_RANKS * LEASE_NBYTES
HEADER_NBYTES, CHECKSUM_NBYTES, ALIGN = 64, 16, 64


class Transfer(Protocol):
    """Moves bytes between the memories of processes; one object in each process, on either side.

    Five methods. ``address`` returns plain data, which a ticket carries to the other side and its ``read`` takes. A fault
    of the other side or of the link is an OSError. Calls may block, but not for ever.
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


class Records(NamedTuple):
    """The records of one group in a lease: ``num_records`` of them, ``nbytes`` each, from byte ``offset`` of the lease on."""

    offset: int
    num_records: int
    nbytes: int

    def table(self, lease: Bytes) -> Bytes:
        """Return the records as uint8 ``[num_records, nbytes]``; a view of ``lease``."""
        end = self.offset + self.num_records * self.nbytes
        return lease[self.offset : end].reshape(self.num_records, self.nbytes)


def lease_layout(counts: Many[int], widths: Many[int]) -> tuple[list[Records], int]:
    """Return the records of each group of a lease with ``counts[i]`` records of ``widths[i]`` bytes, and its size."""
    at, records = align_up(HEADER_NBYTES + CHECKSUM_NBYTES * sum(counts), ALIGN), []
    for count, nbytes in zip(counts, widths):
        records.append(Records(at, count, nbytes))
        at = align_up(at + count * nbytes, ALIGN)
    return records, at


class Exported:
    """The exported ``memory`` of a sender, divided into leases: a slot for receipts, and a range of bytes, each.

    Ranges are taken first fit. O(free ranges)."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._free = [(RECEIPTS_NBYTES, len(memory))] if len(memory) > RECEIPTS_NBYTES else []
        self._slots = list(range(MOST_LEASES - 1, -1, -1))

    @property
    def free_nbytes(self) -> int:
        """Bytes that no lease has."""
        return sum(end - begin for begin, end in self._free)

    def take(self, nbytes: int) -> tuple[int, int]:
        """Return (slot, offset) of a new lease of ``nbytes`` bytes. Raises OutOfBlocks, taking nothing."""
        size = align_up(nbytes, ALIGN)
        place = next((i for i, (begin, end) in enumerate(self._free) if end - begin >= size), None)
        if place is None or not self._slots:
            text = (
                f"a hand-over needs {format_bytes(nbytes)} in one piece, {format_bytes(self.free_nbytes)} are free of "
                f"{format_bytes(len(self._memory))}, and {len(self._slots)} of {MOST_LEASES} leases"
            )
            hint = "wait until tickets are fetched or expire, or export more memory"
            raise OutOfBlocks.with_hint(text, hint, needed=nbytes, available=self.free_nbytes)
        self._receipts(self._slots[-1])[:] = 0
        begin, end = self._free[place]
        self._free[place : place + 1] = [(begin + size, end)] if begin + size < end else []
        return self._slots.pop(), begin

    def give(self, slot: int, offset: int, nbytes: int) -> None:
        """Free what ``take`` returned for ``nbytes``: from now on it is not readable as that lease."""
        self._memory[offset : offset + HEADER_NBYTES] = 0
        ranges = sorted([*self._free, (offset, offset + align_up(nbytes, ALIGN))])
        self._free = ranges[:1]
        for begin, end in ranges[1:]:
            if begin == self._free[-1][1]:
                self._free[-1] = (self._free[-1][0], end)
            else:
                self._free.append((begin, end))
        self._slots.append(slot)

    def is_fetched(self, slot: int, lease: bytes) -> bool:
        """Return whether every rank of a receiver wrote its receipt for ``lease``."""
        found = self._receipts(slot)
        ours = (found[:, :-1] == np.frombuffer(lease[: LEASE_NBYTES - 1], np.uint8)).all(axis=1)
        widths = found[ours, -1]
        return bool(len(widths)) and int(ours[: int(widths[0])].sum()) == int(widths[0])

    def _receipts(self, slot: int) -> Bytes:
        rows: Bytes = self._memory[:RECEIPTS_NBYTES].reshape(MOST_LEASES, MOST_RANKS, LEASE_NBYTES)[slot]
        return rows


def receipt_of(lease: bytes, num_ranks: int) -> bytes:
    """Return what each of ``num_ranks`` ranks of a receiver writes when it has the bytes of ``lease``."""
    return lease[: LEASE_NBYTES - 1] + bytes([num_ranks])


def receipt_offset(slot: int, rank: int) -> int:
    """Return where rank ``rank`` of a receiver writes its receipt for the lease in ``slot``."""
    return (slot * MOST_RANKS + rank) * LEASE_NBYTES


def header_of(lease: bytes, generation: int) -> bytes:
    """Return the header of a lease, ``HEADER_NBYTES`` bytes."""
    return (b"KVPAGODA" + lease + generation.to_bytes(8, "little")).ljust(HEADER_NBYTES, b"\0")


def checked(transfer: Transfer, key: bytes, clock: Callable[[], float]) -> None:
    """Raise BadInput unless these are a transfer, bytes, and a clock."""
    methods = ("address", "landing", "read", "write", "close")
    if isinstance(transfer, type) or not all(callable(getattr(transfer, name, None)) for name in methods):
        raise BadInput(f"a transfer has the methods {', '.join(methods)}, got {shown(transfer)}")
    instance_of(transfer.memory, np.ndarray, "the memory of a transfer, uint8 [n],")
    instance_of(key, bytes, "a key, bytes,")
    try:
        real_number(clock(), "the time by a clock, in seconds since 1970,")
    except TypeError as error:
        raise BadInput(f"a clock is called without arguments and returns seconds since 1970: {error}") from None
