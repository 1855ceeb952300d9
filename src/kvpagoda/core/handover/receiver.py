"""The receiver's side: checks tickets, reads what they name, and starts the request.

    check the ticket ──► make room, as for any request ──► read leases, verify, copy into its own blocks ──► it runs

Leases that are written layer by layer are read before there is room: each call reads what is new. A fault, an expired
lease, or a checksum that does not match is a HandoverMiss, and the request holds nothing then.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import suppress
from typing import SupportsIndex

import numpy as np

from kvpagoda.abc import Transfer
from kvpagoda.arrays import as_tokens
from kvpagoda.core.blocks.group import BlockGroup
from kvpagoda.core.cache.lifecycle import Lifecycle
from kvpagoda.core.cache.lookup import AnyNamespace
from kvpagoda.core.cache.request import RequestState, buffer_of
from kvpagoda.core.cache.sequence import Sequence
from kvpagoda.core.handover.received import Received, Taken
from kvpagoda.core.prefix import Match
from kvpagoda.errors import BadInput, HandoverMiss, RetryLater, TicketRefused
from kvpagoda.handover.content import GroupPlace, content_of, places_of
from kvpagoda.handover.fetched import Fetched, Given, WholeLeases
from kvpagoda.handover.lease import LEASE_NBYTES, lease_layout, rank_of, receipt_of, receipt_offset
from kvpagoda.handover.recut import givers_of
from kvpagoda.handover.ticket import Ticket
from kvpagoda.handover.transfer import checked
from kvpagoda.namespace import Namespace
from kvpagoda.schema import Schema
from kvpagoda.units import ceil_div, format_bytes, whole_number

_PADDING, _LEAST_MOST = 4, 64 << 20
"""What fits in the memory of all ranks here takes at most so many times as many bytes in a lease, and these: of padding, of
blocks that are larger at the sender, and of checksums."""


class Receiver:
    """Takes tickets for one cache. ``KVCache.receive`` makes one when it is first called.

    It remembers the leases that it took until they expire, so that none is taken twice; and what it has of tickets that are
    written layer by layer."""

    def __init__(self, lifecycle: Lifecycle, schema: Schema) -> None:
        core = lifecycle.core
        if not core.memory.has_memory:
            raise BadInput("this cache has no memory to receive bytes into; let each of its ranks receive the ticket")
        self._lifecycle, self._core, self._content = lifecycle, core, content_of(schema, core.block_size)
        self._groups = places_of(schema, core.plan)
        self._rank = rank_of(core.settings.identity)
        self._most_nbytes = _PADDING * core.plan.nbytes * self._rank[1] + _LEAST_MOST
        self._taken, self._fetched = dict[str, float](), dict[str, Fetched]()

    def receive(
        self,
        given: Ticket | str | bytes,
        transfer: Transfer,
        namespace: AnyNamespace,
        priority: SupportsIndex,
        reserve: SupportsIndex | None,
        key: bytes,
        clock: Callable[[], float],
    ) -> Sequence:
        """See ``KVCache.receive``."""
        core = self._core
        checked(transfer, key, clock)
        ticket = given if isinstance(given, Ticket) else Ticket.from_json(given, key)
        length, prompt = ticket.length, max(ticket.length, ticket.prompt_length)
        most = max(prompt, 0 if reserve is None else whole_number(reserve, "reserve"))
        namespace_key = core.namespaces.key(namespace)
        try:
            tokens = as_tokens(ticket.tokens, core.vocab_size)
            media = {at: bytes.fromhex(digest) for at, digest in ticket.media.items()}
            media_ids = core.media.ids(media, len(tokens))
        except BadInput as error:
            raise TicketRefused(f"the text of the ticket is none of this model: {error}") from None
        request = RequestState(
            buffer_of(tokens, most, core.block_size), prompt, namespace_key,
            whole_number(priority, "priority", -(2**63), below=2**63), media_ids, publishes=ticket.publishes,
        )  # fmt: skip
        core.set_epoch(request, namespace.epoch if isinstance(namespace, Namespace) else None)
        groups = self.check(ticket, core.namespaces.name_of(request.epochs[0][1]), clock())
        sequence = Sequence(self._lifecycle, request)  # made first: if this fails, nothing is allocated yet
        read = self._reading(ticket, groups, transfer)
        self._lifecycle.admission.receive(
            request, length, most, lambda match: self._source(match, ticket, groups, read)
        )
        try:
            self._took(ticket, transfer)
        except BaseException:
            if not core.guard.is_torn:  # the caller gets no handle
                self._lifecycle.ending.close(request)
            raise
        return sequence

    def check(self, ticket: Ticket, weights: bytes, now: float) -> list[Taken]:
        """Return for each group what of it is in ``ticket``. Raises TicketRefused unless that is for this model and these
        ``weights``, and was not taken before; HandoverMiss if it expired. Changes nothing but that it forgets what expired."""
        self._taken = {lease: until for lease, until in self._taken.items() if until > now}
        self._fetched = {lease: one for lease, one in self._fetched.items() if one.expires > now}
        if ticket.content != self._content:
            raise TicketRefused(
                "the ticket is for another model, other dtypes or formats of rows, or with an encoder other blocks",
                needed=ticket.content, available=self._content,
            )  # fmt: skip
        if ticket.weights != weights.hex():
            raise TicketRefused(
                "the ticket is for other weights than the newest here; give both sides the same Identity.weights",
                needed=ticket.weights, available=weights.hex(),
            )  # fmt: skip
        ticket.check_ranks()
        groups = self._groups_of(ticket)
        if used := [one.lease for one in ticket.ranks if one.lease in self._taken]:
            raise TicketRefused(f"the ticket was taken here before (lease {used[0]})", available=used)
        if now >= ticket.expires:
            raise HandoverMiss(
                f"the ticket expired {now - ticket.expires:.1f} s ago; open the request instead",
                needed=now, available=ticket.expires,
            )  # fmt: skip
        return groups

    def _groups_of(self, ticket: Ticket) -> list[Taken]:
        """Return for each group here what of it is in ``ticket``. Raises TicketRefused unless that is all that this cache
        keeps of its tokens, less what is optional."""
        numbers = {(group.name, group.content): number for number, group in enumerate(ticket.groups)}
        found, ranks = list[Taken](), (len(ticket.ranks), self._rank[1])
        for group, ours in zip(self._core.groups, self._groups):
            number = numbers.get((ours.name, ours.content))
            try:
                theirs = _checked(ticket, group, ours, number)
                givers = givers_of(theirs, ours, ranks, self._rank[0])
            except TicketRefused:
                if not group.growth.is_optional:
                    raise
                number, givers = None, set()
            found.append(Taken(ours, number, sorted(givers) if number is not None and ticket.counts[number] else []))
        _, nbytes = lease_layout(ticket.groups, ticket.counts, by_layer=ticket.by_layer)
        if wrong := [lease.nbytes for lease in ticket.ranks if lease.nbytes != nbytes]:
            text = f"the ticket has a lease of {format_bytes(wrong[0])}, but its blocks take {format_bytes(nbytes)}"
            raise TicketRefused(text, needed=nbytes, available=wrong[0])
        whole = sum(group.nbytes * count for group, count in zip(ticket.groups, ticket.counts))
        if (most := max(nbytes, whole)) > self._most_nbytes:
            text = f"records of {format_bytes(most)} in the ticket; requests here have up to {format_bytes(self._most_nbytes)}"
            raise TicketRefused(text, needed=most, available=self._most_nbytes)
        return found

    def _reading(self, ticket: Ticket, groups: Many[Taken], transfer: Transfer) -> Callable[[], Given]:
        """Return a function that returns the verified records of ``ticket``. Where they arrive layer by layer, read those
        that are there first. Raises RetryLater as long as more are to come, and HandoverMiss."""
        givers = sorted({giver for one in groups for giver in one.givers})
        numbers = [one.number for one in groups if one.givers and one.number is not None]
        if not ticket.by_layer:
            return lambda: WholeLeases(ticket, givers, transfer)
        name = ticket.ranks[0].lease
        fetched = self._fetched.get(name)
        if fetched is None or not fetched.is_of(ticket):
            fetched = self._fetched[name] = Fetched(ticket, numbers, givers)
        try:
            lacking = fetched.more(transfer)
        except HandoverMiss:
            del self._fetched[name]
            raise
        if lacking:
            count = (1 + fetched.num_records) * len(givers)
            text = f"{count - lacking} of {count} parts of this request are here; its sender computes the rest"
            raise RetryLater.with_hint(
                text, "receive the ticket again later, before it expires", needed=count, available=count - lacking
            )
        return lambda: fetched

    def _source(self, match: Match, ticket: Ticket, groups: Many[Taken], read: Callable[[], Given]) -> Received:
        """Return what ``ticket`` names, beyond what is cached of its text, in ``match``. Raises HandoverMiss if the ticket
        begins behind what is cached."""
        core = self._core
        number = None if core.full is None else groups[core.full.index].number
        begin = 0 if number is None else ticket.firsts[number] * ticket.groups[number].tokens
        if begin > match.num_blocks * core.block_size:
            cached = match.num_blocks * core.block_size
            raise HandoverMiss(
                f"the ticket begins after {begin} tokens, of which {cached} are cached here; open the request instead",
                needed=begin, available=cached,
            )  # fmt: skip
        return Received(core, match, ticket, groups, self._rank, read)

    def _took(self, ticket: Ticket, transfer: Transfer) -> None:
        """Write receipts to all source ranks of ``ticket``, and remember that it was taken; a sender that cannot be reached
        any more keeps its lease until that expires."""
        rank, many = self._rank
        data = transfer.landing(LEASE_NBYTES)
        for one in ticket.ranks:
            data[:] = np.frombuffer(receipt_of(bytes.fromhex(one.lease), many), np.uint8)
            with suppress(OSError, TicketRefused):
                transfer.write(dict(one.address), receipt_offset(one.slot, rank), data)
        self._taken.update((one.lease, ticket.expires) for one in ticket.ranks)
        self._fetched.pop(ticket.ranks[0].lease, None)


def _checked(ticket: Ticket, group: BlockGroup, ours: GroupPlace, number: int | None) -> GroupPlace:
    """Return group ``number`` of ``ticket``. Raises TicketRefused unless its records can become ``ours``, those of ``group``,
    and are the ones that the next token reads; of an optional group these, or the first of them."""
    why = "it is not there" if number is None else ours.differs_from(ticket.groups[number])
    if number is None or why:
        raise TicketRefused(f"group {ours.name!r} of the ticket cannot become blocks of this cache: {why}")
    first, needed, last, growth = ticket.firsts[number], 0, 1, group.growth
    end, tokens = first + ticket.counts[number], ticket.groups[number].tokens
    if not growth.is_state:
        last = ceil_div(ticket.length, tokens)
        needed = (ticket.length if growth.span is None else growth.first_needed(ticket.length)) // tokens
    if first > needed or end > max(first, last) or (end < max(first, last) and not growth.is_optional):
        raise TicketRefused(
            f"group {ours.name!r}: the ticket has blocks {first}..{end} of {ticket.length} tokens, needed are "
            f"{needed}..{last}", needed=last, available=end,
        )  # fmt: skip
    return ticket.groups[number]
