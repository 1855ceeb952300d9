"""Records of tiers, each with a header that identifies it, and the buffer in which drivers read and write them.

A record is a header of 128 bytes and a payload: one or more blocks, or (part of) a checkpoint. Little-endian:

    0        8         12        16               24         32    64            96                  112       128
    | magic  | version | 0       | payload nbytes | 0        | key | fingerprint | xxh3-128 payload  | xxh3-128 of 0..112 |
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import numpy as np

from kvpagoda.errors import BadInput, CheckFailed, MissingExtra, NotOwned
from kvpagoda.free_list import FreeStack
from kvpagoda.pages import PAGE, Bytes, pages
from kvpagoda.tiers.driver import watch_forks
from kvpagoda.tiers.keys import KEY_NBYTES
from kvpagoda.units import align_up, whole_number

try:
    import xxhash
except ImportError:
    xxhash = None  # type: ignore[assignment]

HEADER_NBYTES = 128
_MAGIC = b"KVPAGODA"
_VERSION = 1
_FIELDS = struct.Struct("<8sIIQQ32s32s16s")
_SEALED = _FIELDS.size
_UNCHECKED = bytes(16)
assert _SEALED == HEADER_NBYTES - 16


def xxh3_128(data: Any) -> bytes:
    """Return the checksum of ``data``, any bytes, as 16 bytes. Raises MissingExtra without the package xxhash.

    It detects faults; it does not protect against attackers.
    """
    if xxhash is None:
        raise MissingExtra("tiers need the package xxhash; pip install 'kvpagoda[disk]'", name="xxhash")
    return xxhash.xxh3_128_digest(data)


def pack_record(
    record: Bytes, key: bytes, fingerprint: bytes, nbytes: int | None = None, *, checksum: bool = True
) -> None:
    """Write the header of ``record``, uint8 ``[n]``, for the payload that it holds already.

    ``nbytes``: length of the payload; default: all of it. Sets the bytes after the payload to 0. A record without
    ``checksum`` verifies only with ``checksum=False``. One pass over the payload. Raises BadInput.
    """
    nbytes = len(record) - HEADER_NBYTES if nbytes is None else nbytes
    end = HEADER_NBYTES + nbytes
    if not HEADER_NBYTES <= end <= len(record):
        text = f"a payload of {nbytes} bytes does not fit in a record of {len(record)} bytes"
        raise BadInput(text, needed=nbytes, available=len(record))
    if len(key) != KEY_NBYTES or len(fingerprint) != KEY_NBYTES:
        text = f"a key and a fingerprint have {KEY_NBYTES} bytes, got {len(key)} and {len(fingerprint)}"
        raise BadInput(text, needed=KEY_NBYTES, available=(len(key), len(fingerprint)))
    if end < len(record):
        record[end:] = 0
    digest = xxh3_128(record[HEADER_NBYTES:end].data) if checksum else _UNCHECKED
    fields = _FIELDS.pack(_MAGIC, _VERSION, 0, nbytes, 0, key, fingerprint, digest)
    record.data[:HEADER_NBYTES] = fields + xxh3_128(fields)


def read_header(header: bytes) -> tuple[bytes, int] | None:
    """Return (key, payload nbytes) from ``header``, the first 128 bytes of a record; None if it is not valid."""
    fields = _fields(header)
    return None if fields is None else (fields[5], fields[3])


def verify_record(record: Bytes, key: bytes, fingerprint: bytes, *, checksum: bool = True) -> int | None:
    """Return the number of payload bytes if ``record`` is intact and has ``key`` and ``fingerprint``; otherwise None.

    Reads the payload once, or not at all without ``checksum``.
    """
    fields = _fields(record[:HEADER_NBYTES].tobytes())
    if fields is None or fields[5:7] != (key, fingerprint) or fields[3] > len(record) - HEADER_NBYTES:
        return None
    nbytes: int = fields[3]
    if checksum and xxh3_128(record[HEADER_NBYTES : HEADER_NBYTES + nbytes].data) != fields[7]:
        return None
    return nbytes


def _fields(header: bytes) -> tuple[Any, ...] | None:
    if len(header) != HEADER_NBYTES or xxh3_128(header[:_SEALED]) != header[_SEALED:]:
        return None
    fields = _FIELDS.unpack_from(header)
    return fields if fields[:3] == (_MAGIC, _VERSION, 0) else None


class RecordBuffer:
    """Records, each on pages of its own, that drivers read and write. Thread-safe.

    ``acquire`` takes records and ``release`` returns them, at any time: a record that a driver still uses is handed out
    again only after the driver has finished with it.

    A record lies at a *place* of ``records``, at first the place of its number. A driver that keeps records in memory
    of this process has the buffer ``extend`` by as many places as it keeps, and then copies none: it keeps the place of
    a record that is stored (``exchange``), and shows the one of a record that is loaded (``show``).

        places   | 0 .. n - 1: records at first | n ..: idle at first |      each has as many users as rows and slots show it

    Args:
        num_records: how many.
        payload_nbytes: bytes of a record without its header.
        memory: uint8, page-aligned, of at least ``nbytes_for(num_records, payload_nbytes)``, page-locked for example;
            or a function that returns so many bytes; None: allocated here.
    """

    def __init__(
        self, num_records: int, payload_nbytes: int, memory: Bytes | Callable[[int], Bytes] | None = None
    ) -> None:
        if num_records < 1 or payload_nbytes < 1:
            text = f"a buffer has at least one record of one byte, got {num_records} of {payload_nbytes} bytes"
            raise BadInput(text, needed=(num_records, payload_nbytes))
        self.num_records, self.payload_nbytes = num_records, payload_nbytes
        self.record_nbytes = self.nbytes_for(1, payload_nbytes)
        self._allocate = memory if callable(memory) else None
        self._lay_out(pages(self.nbytes) if memory is None else memory(self.nbytes) if callable(memory) else memory, 0)
        self._lock = Lock()
        self._free = FreeStack(num_records, what="records")
        self._owners: dict[int, object] = {}  # acquired record -> its owner
        self._in_use = bytearray(num_records)  # whether an operation works on the record
        watch_forks(self)

    def _lay_out(self, memory: Bytes, more: int) -> None:
        """Let ``memory`` have the records, and ``more`` idle places."""
        count = self.num_records + more
        nbytes = count * self.record_nbytes
        if memory.dtype != np.uint8 or memory.ndim != 1 or len(memory) < nbytes or memory.ctypes.data % PAGE:
            text = f"memory must be uint8 [{nbytes}] on a page of {PAGE}, got {memory.dtype} {list(memory.shape)}"
            raise BadInput(text, needed=nbytes, available=list(memory.shape))
        self.records: Bytes = memory[:nbytes].reshape(count, self.record_nbytes)
        """The bytes at each place."""
        self.payloads: Bytes = self.records[:, HEADER_NBYTES : HEADER_NBYTES + self.payload_nbytes]
        self.rows = list(self.records[: self.num_records])
        """The bytes of each record, where it lies now."""
        self._places = list(range(self.num_records))  # of each record
        self._users = array("i", [1] * self.num_records + [0] * more) if more else array("i")
        self._idle = list(range(count - 1, self.num_records - 1, -1))
        self._touched = bytearray(count)

    @staticmethod
    def nbytes_for(num_records: int, payload_nbytes: int) -> int:
        """Return the bytes that records take.

        Args:
            num_records: how many.
            payload_nbytes: bytes of each without its header.
        """
        return num_records * align_up(HEADER_NBYTES + payload_nbytes, PAGE)

    @property
    def nbytes(self) -> int:
        """Bytes of the records, without places that a driver added."""
        return self.num_records * self.record_nbytes

    @property
    def num_free(self) -> int:
        """The number of records that ``acquire`` can hand out now."""
        return self._free.num_free

    # -- places --------------------------------------------------------------------------------------------------------

    def places_of(self, rows: Sequence[int]) -> list[int]:
        """Return the place of each record in ``records`` and ``payloads``. O(n).

        It stays the same while the caller has the record and no operation of a driver works on it.

        Args:
            rows: the records.
        """
        places = self._places
        return [places[row] for row in rows]

    def extend(self, more: int) -> bool:
        """Add places for a driver that keeps records in them. For its constructor: no record may have been acquired.

        Args:
            more: how many.

        Returns:
            Whether that was possible: not where memory was given.
        """
        if self._allocate is None or self._idle or self._owners or not more:
            return False
        self._lay_out(self._allocate(self.nbytes + more * self.record_nbytes), more)
        return True

    def exchange(self, row: int, place: int | None) -> int:
        """Keep the place of a record, with its bytes, and return it; the record gets an idle one. O(1), but for the first
        use of a place.

        Args:
            row: the record.
            place: the one that was kept until now, idle when no record shows it any more; None: there was none.
        """
        with self._lock:
            kept = self._places[row]
            if self._users[kept] > 1:  # shown, not its own: kept elsewhere
                own = self._idle.pop()
                np.copyto(self.records[own], self.records[kept])
                self._users[kept] -= 1
                self._users[own] = 1
                kept = own
            if place is not None:
                self._leave(place)
            self._move(row, self._idle.pop())
            self._touched[kept] = 1
            fresh = self._places[row]
        if not self._touched[fresh]:  # the system provides its pages here, not where the next record is copied to it
            self.records[fresh, ::PAGE] = 0
            self._touched[fresh] = 1
        return kept

    def show(self, row: int, place: int) -> None:
        """Let a record be the one at a place, until it is free again. O(1).

        Args:
            row: the record.
            place: which was kept.
        """
        with self._lock:
            self._leave(self._places[row])
            self._move(row, place)

    def _move(self, row: int, place: int) -> None:
        self._users[place] += 1
        self._places[row], self.rows[row] = place, self.records[place]

    def _leave(self, place: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            self._idle.append(place)

    def _give(self, rows: Sequence[int]) -> None:
        """Free ``rows``; those that show another place get one of their own."""
        for row in rows if self._users else ():
            place = self._places[row]
            if self._users[place] > 1:
                self._users[place] -= 1
                self._move(row, self._idle.pop())
        self._free.give(np.array(rows, np.int32))

    # -- records -------------------------------------------------------------------------------------------------------

    def acquire(self, n: int, owner: object = "the caller") -> list[int]:
        """Take records. O(n).

        Args:
            n: how many.
            owner: see ``owners``.

        Raises:
            OutOfBlocks: fewer are free; none is taken.
            BadInput: ``n`` is out of range; none is taken.
        """
        count = whole_number(n, "the number of records to take")
        with self._lock:
            rows: list[int] = self._free.acquire(count).tolist()
            self._owners.update(dict.fromkeys(rows, owner))
        return rows

    def owners(self) -> dict[int, object]:
        """Return the owner of each acquired record. O(acquired records)."""
        with self._lock:
            return dict(self._owners)

    def after_fork(self) -> None:
        """See ``Forkable``: replaces the lock, which another thread of the parent may have held."""
        self._lock = Lock()

    def release(self, rows: Sequence[int]) -> None:
        """Return records. O(n).

        Args:
            rows: the records.

        Raises:
            NotOwned: one is not acquired or is named twice; then none is returned.
        """
        with self._lock:
            self._prove_out(rows)
            self._release(rows)

    def give_to(self, owner: object, rows: Sequence[int]) -> None:
        """Let records be those of another owner. O(n).

        Args:
            owner: the new one.
            rows: the records.

        Raises:
            NotOwned: one is not acquired or is named twice; then nothing changes.
        """
        with self._lock:
            self._prove_out(rows)
            self._owners.update(dict.fromkeys(rows, owner))

    def release_all(self, owner: object) -> None:
        """Return all records of an owner. O(acquired records).

        Args:
            owner: that took them.
        """
        with self._lock:
            self._release([row for row, holder in self._owners.items() if holder is owner])

    def _release(self, rows: Sequence[int]) -> None:
        self._give([row for row in rows if not self._in_use[row]])
        for row in rows:
            del self._owners[row]

    def hold(self, rows: Sequence[int]) -> bool:
        """Mark records as in use by an operation, until ``drop``.

        Args:
            rows: the records.

        Returns:
            False, and marks none, if another operation still uses one of them.

        Raises:
            NotOwned: a record that is not acquired.
        """
        with self._lock:
            self._prove_out(rows)
            is_free = not any(self._in_use[row] for row in rows)
            if is_free:
                for row in rows:
                    self._in_use[row] = True
            return is_free

    def drop(self, rows: Sequence[int]) -> None:
        """Note that an operation no longer uses records; free those that were released meanwhile.

        Args:
            rows: the records that it held.
        """
        with self._lock:
            self._give([row for row in rows if row not in self._owners])
            for row in rows:
                self._in_use[row] = False

    def check(self) -> None:
        """Prove that each record is free, acquired, or released and still in use.

        Raises:
            CheckFailed: a record is none of these.
        """
        with self._lock:
            self._free.check()
            held = set(self._free.held_ids().tolist())
            known = {row for row in range(self.num_records) if row in self._owners or self._in_use[row]}
            if held != known:
                text = f"records in use but free, or neither free nor in use: {sorted(held ^ known)[:16]}"
                raise CheckFailed(text, available=sorted(held ^ known)[:16])
            shown = np.bincount(self._places, minlength=len(self.records))
            odd = np.flatnonzero(shown > np.array(self._users)) if self._users else np.flatnonzero(shown > 1)
            if len(odd) or any(self._users[place] for place in self._idle):
                raise CheckFailed(
                    f"places that more records show than are counted, or idle ones in use: {odd[:16].tolist()}"
                )

    def _prove_out(self, rows: Sequence[int]) -> None:
        """Raise NotOwned unless all ``rows`` are acquired, and each is named once."""
        bad = [row for row in rows if row not in self._owners]
        if bad or len(set(rows)) < len(rows):
            raise NotOwned(
                f"name acquired records of 0..{self.num_records - 1}, each once; got {bad[:16] or list(rows)[:16]}"
            )
