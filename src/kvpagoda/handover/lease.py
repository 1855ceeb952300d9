"""Leases: how a sender's exported memory is divided, and what proves that bytes are those of one request.

    exported memory  | receipts: slot by slot, rank by rank | lease | free | lease | ..
    a lease          | header | seal | checksum of each record | section 0 | section 1 | ..
    a section        | bytes begin .. end of record 0 | of record 1 | ..            of one group

A section has whole records, or, in a lease that is written layer by layer, the part of each record that one layer has. Its
records are there when their checksums are not zero, and all that was promised is there when the seal is. Receivers read
leases and write receipts; nobody runs code for them on the sender's side. A receipt names its lease, so one that comes too
late is nobody's.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence as Many
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from kvpagoda import Identity
from kvpagoda.errors import OutOfBlocks
from kvpagoda.handover.content import FieldPlace, GroupPlace
from kvpagoda.pages import Bytes
from kvpagoda.units import align_up, format_bytes, whole_number

MOST_LEASES, MOST_RANKS = 256, 64
LEASE_NBYTES = 16
RECEIPTS_NBYTES = MOST_LEASES * MOST_RANKS * LEASE_NBYTES
HEADER_NBYTES, SEAL_NBYTES, CHECKSUM_NBYTES, ALIGN = 64, 64, 16, 64
_FRONT = HEADER_NBYTES + SEAL_NBYTES


def rank_of(identity: Identity) -> tuple[int, int]:
    """Return the rank, and the number of ranks. Raises BadInput for more ranks than have receipts."""
    whole_number(identity.num_ranks, "num_ranks of a hand-over", 1, below=MOST_RANKS + 1)
    return identity.rank, identity.num_ranks


class Section(NamedTuple):
    """Bytes ``begin .. end - 1`` of each of the ``pages`` of the records of a group, in which are the rows of ``layers`` and
    of no others; (): of all layers. ``num_records`` of them, from byte ``offset`` of the lease on. ``first``: the number of
    the first of their checksums."""

    group: int
    layers: tuple[int, ...]
    begin: int
    end: int
    pages: int
    num_records: int
    offset: int
    first: int

    @property
    def nbytes(self) -> int:
        """Bytes of each record that are in the section."""
        return (self.end - self.begin) * self.pages

    def table(self, lease: Bytes) -> Bytes:
        """Return the section as uint8 ``[num_records, nbytes]``; a view of ``lease``."""
        end = self.offset + self.num_records * self.nbytes
        return lease[self.offset : end].reshape(self.num_records, self.nbytes)

    def inside(self, records: Bytes) -> Bytes:
        """Return its part of whole records, uint8 ``[n, bytes of a record]``: a view ``[n, pages, end - begin]``."""
        return records.reshape(len(records), self.pages, -1)[:, :, self.begin : self.end]


def lease_layout(groups: Many[GroupPlace], counts: Many[int], *, by_layer: bool) -> tuple[list[Section], int]:
    """Return the sections of a lease with ``counts[i]`` records of group i, in the order of their layers, and its size."""
    parts = []
    for index, (group, count) in enumerate(zip(groups, counts)):
        page = group.nbytes // group.pages
        found = _of_layers(group) if by_layer else [((), 0, page)]
        parts += [
            (min(layers, default=0), index, layers, begin, end, group.pages, count) for layers, begin, end in found
        ]
    parts.sort()
    at, first, sections = align_up(front_nbytes(sum(part[-1] for part in parts)), ALIGN), 0, []
    for _, index, layers, begin, end, pages, count in parts:
        sections.append(Section(index, layers, begin, end, pages, count, at, first))
        at, first = align_up(at + count * sections[-1].nbytes, ALIGN), first + count
    return sections, at


def _of_layers(group: GroupPlace) -> list[tuple[tuple[int, ...], int, int]]:
    """Return (layers, begin, end) of the byte ranges of a page that have the fields of one layer each; of several layers
    where their bytes are interleaved."""
    found: list[tuple[tuple[int, ...], int, int]] = []
    spans = sorted((*_span(field, rows), field.layer) for rows, field in zip(group.rows, group.fields))
    ends: dict[int, int] = {}
    for _, end, layer in spans:
        ends[layer] = max(end, ends.get(layer, 0))
    for begin, _, layer in spans:
        if found and (layer in found[-1][0] or begin < found[-1][2]):
            layers, first, end = found[-1]
            found[-1] = tuple(sorted({*layers, layer})), first, max(end, ends[layer])
        else:
            found.append(((layer,), begin, ends[layer]))
    return found


def _span(field: FieldPlace, rows: int) -> tuple[int, int]:
    """Return the first byte of ``rows`` rows of a field in a page, and the one after the last."""
    last = sum((size - 1) * step for size, step in zip((rows, *field.shape), field.strides))
    return field.offset, field.offset + last + field.itemsize


# -- what proves it ------------------------------------------------------------------------------------------------------


def front_nbytes(num_checksums: int) -> int:
    """Return the bytes of a lease before its sections."""
    return _FRONT + CHECKSUM_NBYTES * num_checksums


def checksums_in(lease: Bytes, num_checksums: int) -> Bytes:
    """Return the checksums in a lease, or in its front: uint8 ``[num_checksums, 16]``; a view."""
    return lease[_FRONT : front_nbytes(num_checksums)].reshape(num_checksums, CHECKSUM_NBYTES)


def seal_in(lease: Bytes) -> Bytes:
    """Return the seal in a lease, uint8 ``[64]``; zeros until all of it is written. A view."""
    return lease[HEADER_NBYTES:_FRONT]


def seal_of(header: bytes, checksums: Bytes, key: bytes) -> bytes:
    """Return BLAKE2b-256 over the header and ``checksums``, and its HMAC-SHA256 with ``key``."""
    root = blake2b(header + checksums.tobytes(), digest_size=32).digest()
    return root + hmac.digest(key, root, "sha256")


def is_sealed(seal: bytes, header: bytes, checksums: Bytes, key: bytes) -> bool:
    """Return whether ``seal`` is that of these; without ``key``, whoever made it."""
    ours = seal_of(header, checksums, key)
    return hmac.compare_digest(ours, seal) if key else ours[:32] == seal[:32]


def header_of(lease: bytes, generation: int, rank: tuple[int, int]) -> bytes:
    """Return the header of a lease of source rank ``rank[0]`` of ``rank[1]``, ``HEADER_NBYTES`` bytes."""
    numbers = generation.to_bytes(8, "little"), *(number.to_bytes(2, "little") for number in rank)
    return b"".join((b"KVPAGODA", lease, *numbers)).ljust(HEADER_NBYTES, b"\0")


# -- exported memory -----------------------------------------------------------------------------------------------------


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
        return bool(len(widths)) and 0 < int(widths[0]) == int(ours[: int(widths[0])].sum())

    def _receipts(self, slot: int) -> Bytes:
        rows: Bytes = self._memory[:RECEIPTS_NBYTES].reshape(MOST_LEASES, MOST_RANKS, LEASE_NBYTES)[slot]
        return rows


def receipt_of(lease: bytes, num_ranks: int) -> bytes:
    """Return what each of ``num_ranks`` ranks of a receiver writes when it has the bytes of ``lease``."""
    return lease[: LEASE_NBYTES - 1] + bytes([num_ranks])


def receipt_offset(slot: int, rank: int) -> int:
    """Return where rank ``rank`` of a receiver writes its receipt for the lease in ``slot``."""
    return (slot * MOST_RANKS + rank) * LEASE_NBYTES
