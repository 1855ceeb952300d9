"""The sender's side: a request that is handed over becomes a lease, until it is fetched, given up, or expires.

    hand_over   copy its blocks to exported memory ──► fence it, and close its handle ──► ticket
    expire      receipts of all ranks, or the clock ──► free the exported memory ──► leave the fence, which closes it
    take_back   free the exported memory ──► leave the fence: it runs again here

A lease is a closed request inside a fence: the cache keeps its slot and its blocks, as for a step in flight, and knows nothing
of hand-overs. Receivers read copies in exported memory, so what happens to blocks never changes what they read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from os import urandom
from typing import Any

import numpy as np

from kvpagoda.cache.below import NoHandOvers
from kvpagoda.cache.guard import either_way, exclusive
from kvpagoda.cache.lifecycle import Lifecycle
from kvpagoda.cache.observing import observe
from kvpagoda.cache.request import Request, State
from kvpagoda.errors import BadInput, StaleHandle
from kvpagoda.handover.checksums import algorithm, checksums_of, root_of
from kvpagoda.handover.content import content_of, places_of
from kvpagoda.handover.ticket import RankLease, Ticket
from kvpagoda.handover.transfer import (
    CHECKSUM_NBYTES,
    HEADER_NBYTES,
    Exported,
    Transfer,
    checked,
    header_of,
    lease_layout,
)
from kvpagoda.schema import Schema
from kvpagoda.units import ceil_div, real_number, whole_number


@dataclass
class _Lease:
    """A request that was handed over: its place in exported memory, and until when it is kept, by the sender's clock."""

    request: Request
    slot: int
    offset: int
    nbytes: int
    until: float
    fenced: list[Request] = field(default_factory=list)


class Sender(NoHandOvers):
    """Hands over requests of one cache through ``transfer``. ``KVCache.sender`` makes it; the cache has at most one.

    ``key``: signs tickets; b"": they are not signed. ``clock``: seconds since 1970, the same clock on all machines as far
    as ``skew`` seconds: the sender keeps a lease so much longer than its ticket says. Leases that ended are freed by
    ``expire``, by every ``KVCache.open``, and before each hand-over. ``fetched``, ``expired``, ``given_up``: leases that
    ended so. Like its cache, it is used by one thread at a time."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        schema: Schema,
        transfer: Transfer,
        *,
        key: bytes = b"",
        clock: Callable[[], float] = time.time,
        skew: float = 2.0,
    ) -> None:
        core = lifecycle.core
        checked(transfer, key, clock)
        if not core.memory.has_memory:
            raise BadInput("this cache has no memory, so it has no bytes to hand over; join the tickets of its ranks")
        self._lifecycle, self._core, self._guard, self._transfer = lifecycle, core, core.guard, transfer
        self._key, self._clock, self._skew = key, clock, real_number(skew, "skew, in seconds,")
        self._content, self._groups = content_of(schema), places_of(schema, core.plan)
        self._exported, self._leases = Exported(transfer.memory), dict[str, _Lease]()
        self._generation = 0
        self.fetched = self.expired = self.given_up = 0
        self._end_observing = observe(core.parts, self._around, "a sender")
        core.hand_overs = self

    @property
    def num_leases(self) -> int:
        """Requests that are handed over, and neither fetched nor expired, as of the last call."""
        return len(self._leases)

    # -- called by Sequence.hand_over ----------------------------------------------------------------------------------

    def hand_over(self, request: Request, ttl: float, after: int, goes_on: bool) -> Ticket:
        """See ``Sequence.hand_over``."""
        seconds, core = real_number(ttl, "ttl, in seconds,"), self._core
        if core.prefix.index.optional:
            text = "the draft of this cache has groups of its own, whose rows are not handed over"
            raise BadInput.with_hint(
                text, "hand over from a cache without it, or with a draft in the model's own blocks"
            )
        first = whole_number(after, "after, in tokens,", below=max(1, request.length)) // core.block_size
        if request.rows is not None:
            request.detach()
        self._lifecycle.ending.check_unfenced(request, "handed over")
        if not request.own_length or len(request.epochs) > 1:
            text = (
                f"a request of {request.own_length} tokens, computed with {len(request.epochs)} versions of the weights"
            )
            raise BadInput.with_hint(
                text, "hand over at least one token, all of one version", available=request.own_length
            )
        self._expire()
        firsts, ids = self._columns(request, first)
        counts = [len(names) for names in ids]
        records, nbytes = lease_layout(counts, [group.nbytes for group in self._groups])
        name, lease = urandom(16), _Lease(request, -1, 0, nbytes, self._clock() + seconds + self._skew)
        try:
            lease.slot, lease.offset = slot, offset = self._exported.take(nbytes)
            memory = self._transfer.memory[offset : offset + nbytes]
            tables = [one.table(memory) for one in records]
            for index, (names, table) in enumerate(zip(ids, tables)):
                if len(names):
                    core.memory.to_host(index, names, table, range(len(names)))
            checksums = checksums_of(tables, algorithm())
            memory[HEADER_NBYTES : HEADER_NBYTES + CHECKSUM_NBYTES * len(checksums)] = checksums.reshape(-1)
            self._generation += 1
            memory[:HEADER_NBYTES] = np.frombuffer(header_of(name, self._generation), np.uint8)
            place = RankLease(
                name.hex(), self._generation, slot, offset, nbytes, root_of(checksums), self._transfer.address()
            )
            ticket = self._ticket(request, place, firsts, counts, lease.until - self._skew)
            self._leases[place.lease] = lease  # before the fence: an interrupt then leaves a lease that expires
            if not goes_on:
                self._lifecycle.ending.enter_fence([request], lease.fenced)
                self._lifecycle.ending.close(request)
        except BaseException:
            if request.state is State.CLOSING:
                request.state = State.RUNNING
            self._end(name.hex(), lease)
            raise
        return ticket

    def _columns(self, request: Request, after: int) -> tuple[list[int], list[Any]]:
        """Return for each group the first column that a receiver needs, and the places from there on: what the next token
        reads, less the first ``after`` columns of texts; of states the newest."""
        firsts, ids, length, slot = list[int](), [], request.own_length, request.slot
        for group in self._core.groups[: len(self._groups)]:
            if group.growth.is_state:
                firsts.append(0)
                column = length % group.places
                ids.append(group.places_between(slot, column, column + 1))
                continue
            bounded = group.growth.is_bounded
            first = group.growth.first_needed(length) // group.block_size if bounded else after
            assert first >= group.first[slot], "a request has what its next token reads"
            firsts.append(first)
            ids.append(group.places_between(slot, first, max(first, ceil_div(length, group.block_size))))
        return firsts, ids

    def _ticket(
        self, request: Request, place: RankLease, firsts: list[int], counts: list[int], expires: float
    ) -> Ticket:
        core, length = self._core, request.own_length
        known = max(length, request.prompt_length)
        media = {at: core.media.digest(number).hex() for at, number in _media(request, known)}
        return Ticket(
            self._content, core.namespaces.name_of(request.epochs[0][1]).hex(), request.tokens[:known].copy(), length,
            request.prompt_length, media, self._groups, tuple(firsts), tuple(counts), expires, algorithm(), (place,),
            self._key,
        )  # fmt: skip

    # -- leases ----------------------------------------------------------------------------------------------------------

    @exclusive
    def expire(self) -> int:
        """Free what was fetched by all ranks of a receiver, and what expired; return how many leases that were. O(leases)."""
        return self._expire()

    @exclusive
    def take_back(self, ticket: Ticket) -> None:
        """End the lease of ``ticket``: the sequence that was handed over runs again here, under the handle that it had, and
        the ticket is worthless. Raises StaleHandle if the lease has ended."""
        lease = self._lease_of(ticket)
        if lease.request.state is State.CLOSING:
            lease.request.state = State.RUNNING
        self._free(ticket, lease)

    @exclusive
    def give_up(self, ticket: Ticket) -> None:
        """End the lease of ``ticket``: the request ends here, and the ticket is worthless. Raises StaleHandle if the lease
        has ended."""
        self._free(ticket, self._lease_of(ticket))

    @either_way
    def close(self) -> None:
        """Give up all leases, and detach from the cache. The transfer stays the caller's. Idempotent."""
        for name, lease in [*self._leases.items()]:
            self._end(name, lease)
            self.given_up += 1
        self._end_observing()
        if self._core.hand_overs is self:
            self._core.hand_overs = NoHandOvers()

    def _lease_of(self, ticket: Ticket) -> _Lease:
        """Return the lease of this sender that ``ticket`` names. Raises StaleHandle."""
        self._expire()
        found = [self._leases[one.lease] for one in ticket.ranks if one.lease in self._leases]
        if not found:
            raise StaleHandle("the lease of this ticket has ended: it was fetched, given up, or it expired")
        return found[0]

    def _free(self, ticket: Ticket, lease: _Lease) -> None:
        self._end(next(one.lease for one in ticket.ranks if self._leases.get(one.lease) is lease), lease)
        self.given_up += 1

    def _expire(self) -> int:
        now, ended = self._clock(), 0
        for name, lease in [*self._leases.items()]:
            is_fetched = self._exported.is_fetched(lease.slot, bytes.fromhex(name))
            if is_fetched or now >= lease.until:
                self._end(name, lease)
                self.fetched += is_fetched
                self.expired += not is_fetched
                ended += 1
        return ended

    def _end(self, name: str, lease: _Lease) -> None:
        """Free the memory of ``lease``, and leave its fence. If that raises, the next call does the rest."""
        if lease.slot >= 0:
            self._transfer.memory[lease.offset : lease.offset + HEADER_NBYTES] = 0  # first: nobody takes it from now on
        if not self._guard.is_torn:
            self._lifecycle.ending.leave_fence(lease.fenced)
        self._leases.pop(name, None)
        if lease.slot >= 0:
            self._exported.give(lease.slot, lease.offset, lease.nbytes)

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Free what ended before each ``open``, which may need its slot and blocks."""
        if name != "open":
            return call

        def opening(*given: Any, **named: Any) -> Any:
            if self._leases:
                self._expire()
            return call(*given, **named)

        return opening


def _media(request: Request, known: int) -> list[tuple[int, int]]:
    """Return (offset, media id) of the media in the first ``known`` tokens."""
    return [(at, number) for at, number in request.media_ids.items() if at < known]
