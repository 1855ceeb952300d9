"""What a receiver reads of the leases of a ticket: whole leases at once, or the layers that are there, again and again.

Nothing is taken on trust. A lease begins with its name and generation; each record has a checksum, and a seal covers these.
What was freed, overwritten, damaged or cut off is a HandoverMiss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol

import numpy as np

from kvpagoda.abc import Transfer
from kvpagoda.errors import HandoverMiss, shown
from kvpagoda.handover.checksums import checksums_of
from kvpagoda.handover.lease import (
    ALIGN,
    HEADER_NBYTES,
    Section,
    checksums_in,
    front_nbytes,
    header_of,
    is_sealed,
    lease_layout,
    seal_in,
)
from kvpagoda.handover.ticket import RankLease, Ticket
from kvpagoda.pages import Bytes


class Given(Protocol):
    """Verified records of a ticket."""

    def records(self, group: int, givers: Many[int], begin: int, end: int) -> dict[int, Bytes]:
        """Return source rank -> records ``begin .. end - 1`` of ``group``, uint8 ``[n, bytes of a record]``, for ``givers``;
        valid until the next call. Raises HandoverMiss."""


class _Run(NamedTuple):
    """Records ``begin .. end - 1`` of a section."""

    section: Section
    begin: int
    end: int

    @property
    def span(self) -> tuple[int, int]:
        """Its first byte in the lease, and the one after the last."""
        size = self.section.nbytes
        return self.section.offset + self.begin * size, self.section.offset + self.end * size


class WholeLeases:
    """The leases of the source ranks ``givers``, which are written; read in parts, when they are asked for. Raises
    HandoverMiss unless they are sealed."""

    def __init__(self, ticket: Ticket, givers: Many[int], transfer: Transfer) -> None:
        self._ticket, self._transfer = ticket, transfer
        layout, _ = lease_layout(ticket.groups, ticket.counts, by_layer=False)
        self._sections = {section.group: section for section in layout}
        self._checksums = dict[int, Bytes]()
        count = sum(ticket.counts)
        for giver in givers:
            front = transfer.landing(front_nbytes(count))
            _read(ticket.ranks[giver], giver, 0, front, transfer)
            _check_header(ticket.ranks[giver], giver, front)
            self._checksums[giver] = checksums_in(front, count).copy()
            _check_seal(ticket, giver, front, self._checksums[giver], 0)

    def records(self, group: int, givers: Many[int], begin: int, end: int) -> dict[int, Bytes]:
        """See ``Given``."""
        section, found = self._sections[group], dict[int, Bytes]()
        size = (end - begin) * section.nbytes
        landing = self._transfer.landing(size * len(givers))
        for number, giver in enumerate(givers):
            memory = landing[number * size : (number + 1) * size]
            _read(self._ticket.ranks[giver], giver, section.offset + begin * section.nbytes, memory, self._transfer)
            found[giver] = memory.reshape(end - begin, section.nbytes)
            checksums = checksums_of([found[giver]], self._ticket.checksum)
            known = self._checksums[giver][section.first + begin : section.first + end]
            if wrong := int((checksums != known).any(axis=1).sum()):
                raise _damaged(giver, wrong, end - begin)
        return found


class Fetched:
    """The verified records of the leases of one ticket that is written layer by layer, of its ``groups`` and from the ranks
    ``givers``, as far as they were there when ``more`` was called. It is ``Given`` once no more are to come."""

    def __init__(self, ticket: Ticket, groups: Many[int], givers: Many[int]) -> None:
        self.expires, self._ticket, self._givers = ticket.expires, ticket, givers
        layout, _ = lease_layout(ticket.groups, ticket.counts, by_layer=True)
        self._layout = [section for section in layout if section.group in groups]
        self._num_checksums = sum(section.num_records for section in layout)
        self._is_wanted = np.zeros(self._num_checksums, np.bool_)
        for section in self._layout:
            self._is_wanted[section.first : section.first + section.num_records] = True
        self.num_records = int(self._is_wanted.sum())
        self._known = {giver: np.zeros((self._num_checksums, 16), np.uint8) for giver in givers}
        self._records = {
            giver: {at: np.zeros((ticket.counts[at], ticket.groups[at].nbytes), np.uint8) for at in groups}
            for giver in givers
        }

    def is_of(self, ticket: Ticket) -> bool:
        """Return whether ``ticket`` names the same records at the same places."""
        ours = self._ticket
        return (ours.groups, ours.firsts, ours.counts, ours.ranks) == (
            ticket.groups, ticket.firsts, ticket.counts, ticket.ranks
        )  # fmt: skip

    def more(self, transfer: Transfer) -> int:
        """Read what is there and was not read yet, or is not what it was. Return how many records and seals are still to
        come; 0: all are those of the ticket, which the seals prove. Raises HandoverMiss."""
        lacking = 0
        for giver in self._givers:
            lease, known = self._ticket.ranks[giver], self._known[giver]
            front = transfer.landing(front_nbytes(self._num_checksums))
            _read(lease, giver, 0, front, transfer)
            _check_header(lease, giver, front)
            front = front.copy()  # the landing memory is needed for the records
            theirs = checksums_in(front, self._num_checksums)
            is_new = (theirs != known).any(axis=1) & theirs.any(axis=1)
            for runs in _together(self._runs(is_new)):
                self._take(giver, runs, theirs, transfer)
            wrong = int(((theirs != known).any(axis=1) & self._is_wanted).sum())
            if seal_in(front).any():
                _check_seal(self._ticket, giver, front, theirs, wrong)
            else:
                lacking += 1 + max(wrong, self.num_records - int(known.any(axis=1).sum()))
        return lacking

    def records(self, group: int, givers: Many[int], begin: int, end: int) -> dict[int, Bytes]:
        """See ``Given``."""
        return {giver: self._records[giver][group][begin:end] for giver in givers}

    def _runs(self, is_new: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Iterator[_Run]:
        """Yield the records of each section that are new, in runs, in the order in which they lie in the lease."""
        for section in self._layout:
            part = is_new[section.first : section.first + section.num_records]
            edges = np.flatnonzero(np.diff(np.concatenate(([False], part, [False]))))
            for begin, end in edges.reshape(-1, 2).tolist():
                yield _Run(section, begin, end)

    def _take(self, giver: int, runs: list[_Run], theirs: Bytes, transfer: Transfer) -> None:
        """Read ``runs``, and keep the records whose checksums are ``theirs``; others may be there the next time."""
        first, stop = runs[0].span[0], runs[-1].span[1]
        landing = transfer.landing(stop - first)
        _read(self._ticket.ranks[giver], giver, first, landing, transfer)
        for run in runs:
            section, (begin, end) = run.section, run.span
            table = landing[begin - first : end - first].reshape(run.end - run.begin, section.nbytes)
            place = slice(section.first + run.begin, section.first + run.end)
            checksums = checksums_of([table], self._ticket.checksum)
            records = section.inside(self._records[giver][section.group][run.begin : run.end])
            records[...] = table.reshape(records.shape)
            is_right = (checksums == theirs[place]).all(axis=1)
            self._known[giver][place] = np.where(is_right[:, None], checksums, 0)


def _together(runs: Iterable[_Run]) -> Iterator[list[_Run]]:
    """Yield ``runs`` in lists of those with nothing but padding between them."""
    found: list[_Run] = []
    for run in runs:
        if found and run.span[0] - found[-1].span[1] >= ALIGN:
            yield found
            found = []
        found.append(run)
    if found:
        yield found


def _read(lease: RankLease, giver: int, first: int, into: Bytes, transfer: Transfer) -> None:
    try:
        transfer.read(dict(lease.address), lease.offset + first, into)
    except OSError as error:
        text = f"rank {giver} of the sender cannot be read ({shown(str(error))}); open the request instead"
        raise HandoverMiss(text) from error


def _header(lease: RankLease) -> bytes:
    return header_of(bytes.fromhex(lease.lease), lease.generation, (lease.rank, lease.num_ranks))


def _check_header(lease: RankLease, giver: int, memory: Bytes) -> None:
    """Raise HandoverMiss unless ``memory`` begins as ``lease`` does."""
    if memory[:HEADER_NBYTES].tobytes() != _header(lease):
        raise HandoverMiss(f"the lease of rank {giver} has ended at the sender; open the request instead", needed=giver)


def _check_seal(ticket: Ticket, giver: int, memory: Bytes, checksums: Bytes, wrong: int) -> None:
    """Raise HandoverMiss if records are ``wrong``, or ``memory`` has no seal of all ``checksums`` by the key of ``ticket``."""
    header = _header(ticket.ranks[giver])
    if wrong or not is_sealed(seal_in(memory).tobytes(), header, checksums, ticket.key):
        raise _damaged(giver, wrong or len(checksums), len(checksums))


def _damaged(giver: int, wrong: int, count: int) -> HandoverMiss:
    return HandoverMiss(
        f"{wrong} of {count} records of rank {giver} are not those of the ticket: they were freed or damaged while they were "
        f"read; open the request instead",
        needed=count, available=count - wrong,
    )  # fmt: skip
