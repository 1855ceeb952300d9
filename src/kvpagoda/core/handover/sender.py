"""The sender's side: a request that is handed over becomes a lease, until it is fetched, given up, or expires.

    hand_over   copy its blocks to exported memory ──► seal the lease ──► fence it, and close its handle ──► ticket
    expire      receipts of all ranks, or the clock ──► free the exported memory ──► leave the fence, which closes it
    take_back   free the exported memory ──► leave the fence: it runs again here

    hand_over(upto=n) ──► ticket;  layer_done, layer by layer and chunk by chunk ──► complete ──► seal, fence, close

A lease is a closed request inside a fence: the cache keeps its slot and its blocks, as for a step in flight, and knows nothing
of hand-overs. Receivers read copies in exported memory, so what happens to blocks never changes what they read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from os import urandom
from typing import Any, SupportsIndex

import numpy as np

from kvpagoda.abc import Transfer, wrap_calls
from kvpagoda.arrays import Ids
from kvpagoda.core.cache.below import NoHandOvers
from kvpagoda.core.cache.guard import either_way, exclusive
from kvpagoda.core.cache.lifecycle import Lifecycle
from kvpagoda.core.cache.request import RequestState, State
from kvpagoda.core.handover.export import Export, Extent, export_of
from kvpagoda.errors import BadInput, StaleHandle
from kvpagoda.handover.checksums import algorithm
from kvpagoda.handover.content import content_of, places_of
from kvpagoda.handover.lease import HEADER_NBYTES, LEASE_NBYTES, Exported, header_of, lease_layout, rank_of
from kvpagoda.handover.ticket import RankLease, Ticket
from kvpagoda.handover.transfer import checked
from kvpagoda.schema import Schema
from kvpagoda.units import real_number, whole_number


@dataclass
class _Lease:
    """A request that is handed over at ``length`` tokens, of weights ``weights``: its place in exported memory, and until when
    it is kept, by the sender's clock. ``goes_on``: the request runs on here. ``tokens``: what is known of its text, int32;
    ``keys``: the same with media ids. ``export``: None until memory is taken."""

    request: RequestState
    length: int
    weights: bytes
    nbytes: int
    until: float
    goes_on: bool
    tokens: Ids
    keys: Ids
    slot: int = field(default=-1, init=False)
    offset: int = field(default=0, init=False)
    export: Export | None = field(default=None, init=False)
    fenced: list[RequestState] = field(default_factory=list, init=False)

    @property
    def is_sealed(self) -> bool:
        """Whether a receiver may take it."""
        return self.export is not None and self.export.is_sealed


class Sender(NoHandOvers):
    """Hands over requests of one cache. Made by ``KVCache.sender``; the cache has at most one.

    It keeps a lease ``skew`` seconds longer than its ticket says. Leases that ended are freed by ``expire``, by every
    ``KVCache.open``, and before each hand-over. ``fetched``, ``expired``, ``given_up``: leases that ended so. Like its
    cache, it is used by one thread at a time.
    """

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
        self._content, self._groups = content_of(schema, core.block_size), places_of(schema, core.plan)
        self._rank = rank_of(core.settings.identity)
        self._num_layers = len(schema.layers)
        self._exported, self._leases = Exported(transfer.memory), dict[str, _Lease]()
        self._generation = 0
        self.fetched = self.expired = self.given_up = 0
        self._end_observing = wrap_calls(core.parts, self._around, "a sender")
        core.hand_overs = self
        core.memory.page_lock(transfer.memory)

    @property
    def num_leases(self) -> int:
        """Requests that are handed over, and neither fetched nor expired, as of the last call."""
        return len(self._leases)

    # -- called by Sequence.hand_over ----------------------------------------------------------------------------------

    def hand_over(self, request: RequestState, ttl: float, after: int, goes_on: bool, upto: int | None) -> Ticket:
        """See ``Sequence.hand_over``.

        Args:
            request: see there.
            ttl: see there.
            after: see there.
            goes_on: see there.
            upto: see there.
        """
        seconds, core = real_number(ttl, "ttl, in seconds,"), self._core
        if request.rows is not None:
            request.detach()
        length = self._length(request, upto)
        first = whole_number(after, "after, in tokens,", below=length) // core.block_size
        self._expire()
        extent, weights = Extent(core, request, length, first), core.namespaces.name_of(request.epochs[0][1])
        _, nbytes = lease_layout(self._groups, extent.counts, by_layer=upto is not None)
        known = max(length, request.prompt_length)
        name, now = urandom(LEASE_NBYTES), self._clock()
        tokens, keys = request.tokens[:known].copy(), request.keys(0, known).copy()
        lease = _Lease(request, length, weights, nbytes, now + seconds + self._skew, goes_on, tokens, keys)
        try:
            lease.slot, lease.offset = self._exported.take(nbytes)
            self._generation += 1
            lease.export = export_of(
                core, extent, self._groups, self._transfer.memory, lease.offset,
                header_of(name, self._generation, self._rank), self._key, by_layer=upto is not None,
            )  # fmt: skip
            ticket = self._ticket(lease, name, extent, now + seconds, by_layer=upto is not None)
            self._leases[name.hex()] = lease  # before the fence: an interrupt then leaves a lease that expires
            if upto is None:
                self._complete(lease)
        except BaseException:
            self._reopen(lease)
            self._end(name.hex(), lease)
            raise
        return ticket

    def _length(self, request: RequestState, upto: int | None) -> int:
        """Return the length at which ``request`` is handed over: now, or when the first ``upto`` tokens are computed. Raises
        BadInput, and RetryLater inside a fence."""
        length = request.own_length
        if upto is None:
            self._lifecycle.ending.check_unfenced(request, "handed over")
        elif not (known := max(length, request.prompt_length)) >= upto >= max(1, length):
            raise BadInput.with_hint(
                f"a request with {length} tokens committed, of {known} known, cannot be handed over at {upto}",
                "name an end that is known and not passed, such as that of the prompt", needed=upto, available=known,
            )  # fmt: skip
        else:
            length = upto
        if not length:
            raise BadInput("a request of 0 tokens has nothing to hand over; commit one token at least", available=0)
        self._check_version(request)
        return length

    def _check_version(self, request: RequestState) -> None:
        """Raise BadInput if the tokens of ``request`` are of several versions of the weights, or of what its namespace stands
        for."""
        epochs, names = request.epochs, self._core.namespaces
        if len(epochs) > 1 or names.is_renewed(request.namespace, epochs[0][1]):
            what = "its namespace was invalidated" if len(epochs) == 1 else f"{len(epochs)} versions of the weights"
            text = f"a request of {request.own_length} tokens was computed while things changed: {what}"
            raise BadInput.with_hint(
                text, "hand over what is all of one version; let this request end here", needed=request.own_length
            )

    def _ticket(self, lease: _Lease, name: bytes, extent: Extent, expires: float, *, by_layer: bool) -> Ticket:
        request, known = lease.request, len(lease.tokens)
        place = RankLease(
            *self._rank, name.hex(), self._generation, lease.slot, lease.offset, lease.nbytes, self._transfer.address()
        )
        media = {at: self._core.media.digest(number).hex() for at, number in request.media_ids.items() if at < known}
        return Ticket(
            self._content, lease.weights.hex(), lease.tokens, lease.length, request.prompt_length, media, self._groups,
            tuple(extent.firsts), tuple(extent.counts), request.publishes, expires, algorithm(), by_layer, (place,), self._key,
        )  # fmt: skip

    # -- layer by layer --------------------------------------------------------------------------------------------------

    @exclusive
    def layer_done(self, ticket: Ticket, layer: int | None = None, upto: SupportsIndex | None = None) -> None:
        """Copy the rows of a layer, so that a receiver can read them while other layers are computed.

        Call it for each layer after each chunk, when the layer's rows are written, before or after the chunk is
        committed. What it was not called for is copied by ``complete``. A call takes back what was reported of tokens
        that are not committed: after a step that fails, call it without ``upto``. On a GPU it waits for the current
        stream.

        Args:
            ticket: which ``hand_over(upto=..)`` made.
            layer: its index; None: all of them.
            upto: for the first ``upto`` tokens; None: the committed ones.

        Raises:
            StaleHandle: the lease has ended, or the request does not run.
            BadInput: no such layer or number of tokens; or more tokens are committed than the ticket is for, or other
                ones.
        """
        lease, export = self._open_lease(ticket)
        request = lease.request
        request.check_running()
        number = None if layer is None else whole_number(layer, "a layer", below=self._num_layers)
        if request.rows is not None:
            request.rows.flush(request)
        self._check_text(lease, request.length)
        most = min(lease.length, request.capacity)
        end = min(most, request.length) if upto is None else whole_number(upto, "upto, in tokens,", below=most + 1)
        export.layer_done(number, end, request.length)

    @exclusive
    def complete(self, ticket: Ticket) -> None:
        """Say that all tokens of a ticket are committed: copy what is lacking, and seal the lease. May be called again.

        From now on it is as after ``hand_over`` without ``upto``: the handle is closed, unless it said ``goes_on``.

        Args:
            ticket: which ``hand_over(upto=..)`` made.

        Raises:
            StaleHandle: the lease has ended, or the request does not run.
            BadInput: the request has another length, other tokens or other weights than the ticket.
            RetryLater: it is fenced.
        """
        lease, _ = self._open_lease(ticket, sealed=True)
        request = lease.request
        if not lease.is_sealed:
            request.check_running()
            request.detach()
            self._lifecycle.ending.check_unfenced(request, "handed over")
            length, epochs = request.own_length, request.epochs
            self._check_text(lease, length)
            if length < lease.length:
                raise BadInput.with_hint(
                    f"the ticket is for {lease.length} tokens, {length} are committed", "commit the rest, or give it up",
                    needed=lease.length, available=length,
                )  # fmt: skip
            names = self._core.namespaces
            self._check_version(request)
            if names.name_of(epochs[0][1]) != lease.weights:
                text = "its tokens are of other weights than the ticket"
                raise BadInput.with_hint(text, "give the ticket up", needed=lease.weights)
        self._complete(lease)

    @staticmethod
    def _check_text(lease: _Lease, length: int) -> None:
        """Raise BadInput unless the ``length`` tokens that the request of ``lease`` has committed are the first of the
        ticket's, with the same media. Behind these, windows and states have gone on."""
        if length > lease.length or not np.array_equal(lease.request.keys(0, length), lease.keys[:length]):
            raise BadInput.with_hint(
                f"the ticket is for {lease.length} tokens, {length} are committed, or other ones",
                "commit these, or give the ticket up", needed=lease.length, available=length,
            )  # fmt: skip

    def _complete(self, lease: _Lease) -> None:
        """Copy what is lacking, close the request unless it goes on, and seal the lease. If that raises before it is sealed,
        the request runs on; what was copied is not copied again."""
        export, request = lease.export, lease.request
        assert export is not None
        if not export.is_sealed:
            if request.states.rounded_at == lease.length:
                export.states_changed()
            export.layer_done(None, lease.length, lease.length)
            try:
                if not lease.goes_on:
                    self._lifecycle.ending.enter_fence([request], lease.fenced)
                    self._lifecycle.ending.close(request)
                export.seal()
            except BaseException:
                if not export.is_sealed:
                    self._reopen(lease)
                raise

    def _reopen(self, lease: _Lease) -> None:
        """Let the request of ``lease`` run, if that closed it, and leave its fence."""
        if lease.request.state is State.CLOSING:
            lease.request.state = State.RUNNING
        if not self._guard.is_torn:
            self._lifecycle.ending.leave_fence(lease.fenced)

    def _open_lease(self, ticket: Ticket, *, sealed: bool = False) -> tuple[_Lease, Export]:
        """Return the lease that ``ticket`` names, and what it exports. Raises StaleHandle, and BadInput if it is sealed."""
        lease = next((self._leases[one.lease] for one in ticket.ranks if one.lease in self._leases), None)
        if lease is None or lease.export is None or self._clock() >= lease.until:
            raise _ended()
        if not sealed and lease.is_sealed:
            raise BadInput("all layers of this ticket are done: it is complete", needed="layer")
        return lease, lease.export

    # -- leases ----------------------------------------------------------------------------------------------------------

    @exclusive
    def expire(self) -> int:
        """Free what was fetched by all ranks of a receiver, and what expired; return how many leases that were. O(leases)."""
        return self._expire()

    @exclusive
    def take_back(self, ticket: Ticket) -> None:
        """End the lease of a ticket, which is worthless then: the sequence that was handed over runs again here, under the
        handle that it had.

        Args:
            ticket: which ``hand_over`` made.

        Raises:
            StaleHandle: the lease has ended.
        """
        lease = self._lease_of(ticket)
        self._reopen(lease)
        self._free(ticket, lease)

    @exclusive
    def give_up(self, ticket: Ticket) -> None:
        """End the lease of a ticket, which is worthless then.

        The request ends, unless its handle is still open: of a ticket that is not complete, or with ``goes_on``.

        Args:
            ticket: which ``hand_over`` made.

        Raises:
            StaleHandle: the lease has ended.
        """
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
            raise _ended()
        return found[0]

    def _free(self, ticket: Ticket, lease: _Lease) -> None:
        self._end(next(one.lease for one in ticket.ranks if self._leases.get(one.lease) is lease), lease)
        self.given_up += 1

    def _expire(self) -> int:
        now, ended = self._clock(), 0
        for name, lease in [*self._leases.items()]:
            is_fetched = lease.is_sealed and self._exported.is_fetched(lease.slot, bytes.fromhex(name))
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
        """Free what ended before each ``open``, which may need its slot and blocks. End the leases of a request that is
        suspended or closed before they are complete."""
        if name == "open":

            def opening(*given: Any, **named: Any) -> Any:
                if self._leases:
                    self._expire()
                return call(*given, **named)

            return opening
        if name not in ("suspend", "close"):
            return call

        def ending(request: RequestState, *given: Any) -> Any:
            result = call(request, *given)
            for lease_name, lease in [*self._leases.items()] if self._leases else ():
                if lease.request is request and not lease.is_sealed and not lease.fenced:
                    self._end(lease_name, lease)
                    self.given_up += 1
            return result

        return ending


def _ended() -> StaleHandle:
    return StaleHandle(
        "the lease of this ticket has ended: it was fetched, given up, or it expired, or its request stopped",
        needed="lease",
    )
