"""The receiver's side: what a ticket names, as a source from which a request starts.

    check the ticket ──► make room, as for any request ──► read leases, verify, copy into its own blocks ──► it runs

A fault, an expired lease, or a checksum that does not match is a HandoverMiss, and the request holds nothing then.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvpagoda.blocks.places import BlockPlaces
from kvpagoda.cache.core import Core
from kvpagoda.cache.prefix_cache import PrefixMatch
from kvpagoda.cache.sources import Cached
from kvpagoda.errors import BadInput, HandoverMiss, TicketRefused, shown
from kvpagoda.handover.checksums import checksums_of, root_of
from kvpagoda.handover.content import GroupPlace, content_of, places_of
from kvpagoda.handover.recut import givers_of, is_same, recut
from kvpagoda.handover.ticket import RankLease, Ticket
from kvpagoda.handover.transfer import (
    CHECKSUM_NBYTES,
    HEADER_NBYTES,
    LEASE_NBYTES,
    Records,
    Transfer,
    header_of,
    lease_layout,
    receipt_of,
    receipt_offset,
)
from kvpagoda.memory.pages import Bytes
from kvpagoda.prefix import Match
from kvpagoda.prefix.hybrid import Holding
from kvpagoda.schema import Schema
from kvpagoda.units import ceil_div, format_bytes


class Receiver:
    """Takes tickets for one cache. ``KVCache.receive`` makes one when it is first called.

    It remembers the leases that it took until they expire, so that none is taken twice."""

    def __init__(self, core: Core, schema: Schema) -> None:
        if not core.memory.has_memory:
            raise BadInput("this cache has no memory to receive bytes into; let each of its ranks receive the ticket")
        self._core, self._content, self._groups = core, content_of(schema), places_of(schema, core.plan)
        identity = core.settings.identity
        self._rank = (identity.rank, identity.num_ranks)
        self._taken: dict[str, float] = {}

    def check(self, ticket: Ticket, weights: bytes, clock: Callable[[], float]) -> None:
        """Raise TicketRefused unless ``ticket`` is for this model and these ``weights``, and was not taken before;
        HandoverMiss if it expired. Changes nothing."""
        now = clock()
        self._taken = {lease: until for lease, until in self._taken.items() if until > now}
        if ticket.content != self._content:
            raise TicketRefused(
                "the ticket is for another model, or other dtypes or formats of rows",
                needed=ticket.content, available=self._content,
            )  # fmt: skip
        if ticket.weights != weights.hex():
            raise TicketRefused(
                "the ticket is for other weights than the newest here; give both sides the same Identity.weights",
                needed=ticket.weights, available=weights.hex(),
            )  # fmt: skip
        self._check_groups(ticket)
        if used := [one.lease for one in ticket.ranks if one.lease in self._taken]:
            raise TicketRefused(f"the ticket was taken here before (lease {used[0]})", available=used)
        if now >= ticket.expires:
            raise HandoverMiss(
                f"the ticket expired {now - ticket.expires:.1f} s ago; open the request instead",
                needed=now, available=ticket.expires,
            )  # fmt: skip

    def _check_groups(self, ticket: Ticket) -> None:
        """Raise TicketRefused unless ``ticket`` names all that this cache keeps of its tokens."""
        if len(ticket.groups) != len(self._groups):
            raise TicketRefused(f"the ticket has {len(ticket.groups)} groups, this cache {len(self._groups)}")
        for index, (group, theirs, ours) in enumerate(zip(self._core.groups, ticket.groups, self._groups)):
            if why := ours.differs_from(theirs):
                raise TicketRefused(f"group {ours.name!r} of the ticket cannot become blocks of this cache: {why}")
            givers_of(theirs, ours, (len(ticket.ranks), self._rank[1]), self._rank[0])
            first, end, last = ticket.firsts[index], ticket.firsts[index] + ticket.counts[index], 1
            needed = 0
            if not group.growth.is_state:
                last = ceil_div(ticket.length, theirs.tokens)
                needed = ticket.length if group is self._core.full else group.growth.first_needed(ticket.length)
                needed //= theirs.tokens
            if first > needed or end != max(first, last):
                raise TicketRefused(
                    f"group {ours.name!r}: the ticket has blocks {first}..{end} of {ticket.length} tokens, needed are "
                    f"{needed}..{last}", needed=last, available=end,
                )  # fmt: skip

        _, nbytes = lease_layout(ticket.counts, [group.nbytes for group in ticket.groups])
        if wrong := [lease.nbytes for lease in ticket.ranks if lease.nbytes != nbytes]:
            text = f"the ticket has a lease of {format_bytes(wrong[0])}, but its blocks take {format_bytes(nbytes)}"
            raise TicketRefused(text, needed=nbytes, available=wrong[0])

    def source(self, match: Match, ticket: Ticket, transfer: Transfer) -> Received:
        """Return what ``ticket`` names, beyond what is cached of its text, in ``match``. Raises HandoverMiss if the ticket
        begins behind what is cached."""
        core = self._core
        begin = 0 if core.full is None else ticket.firsts[core.full.index] * ticket.groups[core.full.index].tokens
        if core.full is not None and begin > match.num_blocks * core.block_size:
            cached = match.num_blocks * core.block_size
            raise HandoverMiss(
                f"the ticket begins after {begin} tokens, of which {cached} are cached here; open the request instead",
                needed=begin, available=cached,
            )  # fmt: skip
        return Received(core, match, ticket, self._groups, self._rank, transfer)

    def took(self, ticket: Ticket, transfer: Transfer) -> None:
        """Write receipts to all source ranks of ``ticket``, and remember that it was taken; a sender that cannot be reached
        any more keeps its lease until that expires."""
        rank, many = self._rank
        data = transfer.landing(LEASE_NBYTES)
        for one in ticket.ranks:
            data[:] = np.frombuffer(receipt_of(bytes.fromhex(one.lease), many), np.uint8)
            try:
                transfer.write(dict(one.address), receipt_offset(one.slot, rank), data)
            except OSError:
                continue
        self._taken.update((one.lease, ticket.expires) for one in ticket.ranks)


class Received(Cached):
    """What a ``ticket`` names, beyond what is cached of its text, in ``match``."""

    def __init__(
        self,
        core: Core,
        match: Match,
        ticket: Ticket,
        groups: tuple[GroupPlace, ...],
        rank: tuple[int, int],
        transfer: Transfer,
    ) -> None:
        self._ticket, self._groups, self._rank, self._transfer = ticket, groups, rank, transfer
        super().__init__(core, match, PrefixMatch(match.num_tokens, match.num_blocks * core.block_size, "nothing"))

    def _columns(self, num_tokens: int) -> list[range]:
        core, length, num_blocks = self._core, self._ticket.length, num_tokens // self._core.block_size
        firsts = [
            0 if one.growth.is_state else one.growth.first_needed(length) // one.block_size for one in core.groups
        ]
        return [
            range(num_blocks) if group is core.full else range(first, first)
            for group, first in zip(core.groups, firsts)
        ]

    def fill(self, holding: Holding, own: list[BlockPlaces]) -> PrefixMatch | None:
        core, ticket = self._core, self._ticket
        ranks = len(ticket.ranks), self._rank[1]
        wanted = [
            givers_of(theirs, ours, ranks, self._rank[0]) if count else set()
            for theirs, ours, count in zip(ticket.groups, self._groups, ticket.counts)
        ]
        targets = core.states.begin_at(ticket.length, own)
        given = self._read(sorted(set().union(*wanted)))
        for index, (group, places, givers) in enumerate(zip(core.groups, targets, wanted)):
            begin = self.shared[index].stop
            end = 1 if group.growth.is_state else ceil_div(ticket.length, group.block_size)
            if begin < end and givers:
                tables = {giver: given[giver][index] for giver in givers}
                core.memory.from_host(index, places[: end - begin], *self._table(index, tables, begin, end, ranks))
        shared = 0 if core.full is None else self.shared[core.full.index].stop * core.block_size
        return PrefixMatch(ticket.length, ticket.length, "nothing", {}, None, ticket.length - shared)

    def _table(
        self, index: int, tables: dict[int, Bytes], begin: int, end: int, ranks: tuple[int, int]
    ) -> tuple[Bytes, range]:
        """Return the records of group ``index`` for columns ``begin .. end - 1`` here, as a table and its rows."""
        theirs, ours, first = self._ticket.groups[index], self._groups[index], self._ticket.firsts[index]
        if is_same(theirs, ours, ranks):
            return next(iter(tables.values())), range(begin - first, end - first)
        into = np.zeros((end - begin, ours.nbytes), np.uint8)
        tokens = range(max(begin * ours.tokens, first * theirs.tokens), self._ticket.length)
        recut(theirs, ours, ranks, self._rank[0], tables, into, (first * theirs.tokens, begin * ours.tokens), tokens)
        return into, range(end - begin)

    # -- reading ---------------------------------------------------------------------------------------------------------

    def _read(self, givers: list[int]) -> dict[int, list[Bytes]]:
        """Return the verified records of each of ``givers``, by group. Raises HandoverMiss."""
        ticket = self._ticket
        records, nbytes = lease_layout(ticket.counts, [group.nbytes for group in ticket.groups])
        landing = self._transfer.landing(nbytes * len(givers))
        found = {}
        for number, giver in enumerate(givers):
            lease, memory = ticket.ranks[giver], landing[number * nbytes : (number + 1) * nbytes]
            try:
                self._transfer.read(dict(lease.address), lease.offset, memory)
            except OSError as error:
                text = f"rank {giver} of the sender cannot be read ({shown(str(error))}); open the request instead"
                raise HandoverMiss(text) from error
            found[giver] = self._verified(giver, lease, records, memory)
        return found

    def _verified(self, giver: int, lease: RankLease, records: list[Records], memory: Bytes) -> list[Bytes]:
        """Return the records in ``memory``, as ``lease`` has them. Raises HandoverMiss unless all are those of the ticket."""
        header = header_of(bytes.fromhex(lease.lease), lease.generation)
        if memory[:HEADER_NBYTES].tobytes() != header:
            raise HandoverMiss(f"the lease of rank {giver} has ended at the sender; open the request instead")
        tables = [one.table(memory) for one in records]
        count = sum(self._ticket.counts)
        known = memory[HEADER_NBYTES : HEADER_NBYTES + CHECKSUM_NBYTES * count].reshape(count, CHECKSUM_NBYTES)
        checksums = checksums_of(tables, self._ticket.checksum)
        wrong = int((checksums != known).any(axis=1).sum())
        if wrong or root_of(checksums) != lease.root:
            raise HandoverMiss(
                f"{wrong or count} of {count} records of rank {giver} are not those of the ticket: they were freed or "
                f"damaged while they were read; open the request instead",
                needed=count, available=count - wrong,
            )  # fmt: skip
        return tables
