"""What a ticket names, as a source from which a request starts: its records, cut to the blocks of this cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many

import numpy as np

from kvpagoda.blocks.places import BlockPlaces
from kvpagoda.cache.core import Core
from kvpagoda.cache.prefix_cache import PrefixMatch
from kvpagoda.cache.sources import Cached
from kvpagoda.handover.content import GroupPlace
from kvpagoda.handover.fetched import Given
from kvpagoda.handover.recut import Recut, givers_of, is_same
from kvpagoda.handover.ticket import Ticket
from kvpagoda.memory.pages import Bytes
from kvpagoda.prefix import Match
from kvpagoda.prefix.hybrid import Holding
from kvpagoda.units import ceil_div

_PART = 4 << 20
"""Bytes of records that are read, verified, recut and copied at once: few enough to stay in a core's caches."""


def givers_by_group(ticket: Ticket, groups: Many[GroupPlace], rank: tuple[int, int]) -> list[set[int]]:
    """Return for each group which source ranks of ``ticket`` have what target rank ``rank[0]`` of ``rank[1]`` keeps."""
    ranks = len(ticket.ranks), rank[1]
    return [
        givers_of(theirs, ours, ranks, rank[0]) if count else set()
        for theirs, ours, count in zip(ticket.groups, groups, ticket.counts)
    ]


class Received(Cached):
    """What a ``ticket`` names, beyond what is cached of its text, in ``match``. ``groups``: where fields lie in the records
    here. ``read``: returns the records of the source ranks, verified."""

    def __init__(
        self,
        core: Core,
        match: Match,
        ticket: Ticket,
        groups: tuple[GroupPlace, ...],
        rank: tuple[int, int],
        read: Callable[[], Given],
    ) -> None:
        self._ticket, self._groups, self._rank, self._read = ticket, groups, rank, read
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
        wanted = givers_by_group(ticket, self._groups, self._rank)
        targets = core.states.begin_at(ticket.length, own)
        given = self._read()
        for index, (group, places, givers) in enumerate(zip(core.groups, targets, wanted)):
            begin = self.shared[index].stop
            end = 1 if group.growth.is_state else ceil_div(ticket.length, group.block_size)
            if begin < end and givers:
                for first, table, rows in self._tables(index, given, sorted(givers), range(begin, end), ranks):
                    core.memory.from_host(index, places[first - begin : first - begin + len(rows)], table, rows)
        shared = 0 if core.full is None else self.shared[core.full.index].stop * core.block_size
        return PrefixMatch(ticket.length, ticket.length, "nothing", {}, None, ticket.length - shared)

    def _tables(
        self, index: int, given: Given, givers: list[int], columns: range, ranks: tuple[int, int]
    ) -> Iterator[tuple[int, Bytes, range]]:
        """Yield the records of group ``index`` for ``columns`` here: the first column, a table, and its rows. Where they must
        be recut, in parts that caches of a core hold. A table is valid until the next one."""
        theirs, ours, first = self._ticket.groups[index], self._groups[index], self._ticket.firsts[index]
        if is_same(theirs, ours, ranks):
            (table,) = given.records(index, givers, columns.start - first, columns.stop - first).values()
            yield columns.start, table, range(len(columns))
            return
        recut, length = Recut(theirs, ours, ranks, self._rank[0]), self._ticket.length
        if not recut.unit:  # a state
            into = np.zeros((1, ours.nbytes), np.uint8)
            recut.copy(given.records(index, givers, 0, 1), into, (0, 0), range(length))
            yield 0, into, range(1)
            return
        count = recut.unit // ours.tokens * max(1, _PART // (ours.nbytes * (recut.unit // ours.tokens)))
        into = np.zeros((min(count, len(columns)), ours.nbytes), np.uint8)
        begin = columns.start
        while begin < columns.stop:
            end = min(columns.stop, (begin // count + 1) * count)
            tokens = range(max(begin * ours.tokens, first * theirs.tokens), min(length, end * ours.tokens))
            source = tokens.start // theirs.tokens
            if len(tokens) < (end - begin) * ours.tokens:
                into[:] = 0  # what is behind the text, or before a window
            records = given.records(index, givers, source - first, ceil_div(tokens.stop, theirs.tokens) - first)
            recut.copy(records, into, (source * theirs.tokens, begin * ours.tokens), tokens)
            yield begin, into, range(end - begin)
            begin = end
