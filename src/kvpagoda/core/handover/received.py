"""What a ticket names, as a source from which a request starts: its records, cut to the blocks of this cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from kvpagoda.core.blocks.group import BlockPlaces
from kvpagoda.core.cache.admission import Cached
from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.prefix_cache import PrefixMatch
from kvpagoda.core.groups.base import Holding
from kvpagoda.core.prefix import Match
from kvpagoda.handover.content import GroupPlace
from kvpagoda.handover.fetched import Given
from kvpagoda.handover.recut import Recut, is_same
from kvpagoda.handover.ticket import Ticket
from kvpagoda.units import ceil_div

_PART = 4 << 20
"""Bytes of records that are read, verified, recut and copied at once: few enough to stay in a core's caches."""


class Taken(NamedTuple):
    """The records of one group here, ``ours``, and group ``number`` of a ticket, of which they are made; None: the ticket has
    none, or none that can become such records. ``givers``: the source ranks that have what this rank keeps."""

    ours: GroupPlace
    number: int | None
    givers: list[int]


class Received(Cached):
    """What a ``ticket`` names, beyond what is cached of its text, in ``match``. ``taken``: for each group here its records in
    the ticket. ``read``: returns the records of the source ranks, verified."""

    def __init__(
        self,
        core: Core,
        match: Match,
        ticket: Ticket,
        taken: Many[Taken],
        rank: tuple[int, int],
        read: Callable[[], Given],
    ) -> None:
        self._ticket, self._taken, self._rank, self._read = ticket, taken, rank, read
        super().__init__(core, match, PrefixMatch(match.num_tokens, match.num_blocks * core.block_size, "nothing"))

    def _columns(self, num_tokens: int) -> list[range]:
        core, length, num_blocks = self._core, self._ticket.length, num_tokens // self._core.block_size
        cached, columns = core.prefix.columns(self._match, length), list[range]()
        for group, span in zip(core.groups, cached):
            first = 0 if group.growth.is_state else group.growth.first_needed(length) // group.block_size
            if group is core.full:
                columns.append(range(num_blocks))
            else:
                columns.append(span if group.growth.is_optional else range(first, first))
        return columns

    def _sent(self, index: int) -> range:
        """Return which columns of group ``index`` the ticket fills, behind those that are shared: all that are whole there and
        follow these, or what the next token reads."""
        group, ticket, begin = self._core.groups[index], self._ticket, self.shared[index].stop
        ours, number, givers = self._taken[index]
        if number is None or not givers:
            return range(begin, begin)
        if group.growth.is_state:
            return range(1)
        tokens, first = ticket.groups[number].tokens, ticket.firsts[number]
        stop = min(ticket.length, (first + ticket.counts[number]) * tokens)
        if first * tokens > max(begin * ours.tokens, group.growth.first_needed(ticket.length)):
            return range(begin, begin)
        return range(begin, max(begin, ceil_div(stop, ours.tokens) if stop == ticket.length else stop // ours.tokens))

    def fill(self, holding: Holding, own: list[BlockPlaces]) -> PrefixMatch | None:
        core, length = self._core, self._ticket.length
        targets, given = own if core.states is None else core.states.begin_at(length, own), self._read()
        columns = [self._sent(index) for index in range(len(self._taken))]
        for index, (places, wanted) in enumerate(zip(targets, columns)):
            if wanted:
                self._fill(index, given, wanted, BlockPlaces(places[: len(wanted)]))
        shared = 0 if core.full is None else self.shared[core.full.index].stop * core.block_size
        lacking = core.prefix.lacking_from(columns, length)
        return PrefixMatch(length, length, "nothing", {}, None, length - shared, lacking)

    def _fill(self, index: int, given: Given, columns: range, places: BlockPlaces) -> None:
        """Copy the records of group ``index`` for ``columns`` to ``places``; where they are recut, in parts that caches of a
        core hold, and straight to where they stay if that is memory of the host."""
        ours, number, givers = self._taken[index]
        assert number is not None, "the ticket has what it fills"
        theirs, first, memory = self._ticket.groups[number], self._ticket.firsts[number], self._core.memory
        ranks = len(self._ticket.ranks), self._rank[1]
        if is_same(theirs, ours, ranks):
            (table,) = given.records(number, givers, columns.start - first, columns.stop - first).values()
            memory.page_lock(table)
            memory.from_host(index, places, table, range(len(columns)))
            memory.wait_for_copies()  # the landing memory is read into again
            return
        recut, length = Recut(theirs, ours, ranks, self._rank[0]), self._ticket.length
        unit = recut.unit // ours.tokens if recut.unit else 1
        count = unit * max(1, _PART // (ours.nbytes * unit))
        scratch = np.zeros((min(count, len(columns)), ours.nbytes), np.uint8)
        if not recut.unit:  # a state
            recut.copy(given.records(number, givers, 0, 1), scratch, (0, 0), range(length))
            memory.from_host(index, places, scratch, range(1))
            memory.wait_for_copies()
            return
        for begin, end in _parts(columns, count):
            into_places = places[begin - columns.start : end - columns.start]
            run = memory.run_of(index, into_places)
            into = scratch if run is None else run
            tokens = range(max(begin * ours.tokens, first * theirs.tokens), min(length, end * ours.tokens))
            source = tokens.start // theirs.tokens
            if len(tokens) < (end - begin) * ours.tokens:
                into[:] = 0  # what is behind the text, or before a window
            records = given.records(number, givers, source - first, ceil_div(tokens.stop, theirs.tokens) - first)
            recut.copy(records, into, (source * theirs.tokens, begin * ours.tokens), tokens)
            if run is None:
                memory.from_host(index, into_places, scratch, range(end - begin))
                memory.wait_for_copies()  # the scratch memory is written again


def _parts(columns: range, count: int) -> Iterator[tuple[int, int]]:
    """Yield ``columns`` in parts (begin, end) of up to ``count``, which end at its multiples."""
    begin = columns.start
    while begin < columns.stop:
        end = min(columns.stop, (begin // count + 1) * count)
        yield begin, end
        begin = end
