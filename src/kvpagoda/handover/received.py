"""What a ticket names, as a source from which a request starts: its records, cut to the blocks of this cache."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np

from kvpagoda.blocks.places import BlockPlaces
from kvpagoda.cache.core import Core
from kvpagoda.cache.prefix_cache import PrefixMatch
from kvpagoda.cache.sources import Cached
from kvpagoda.handover.content import GroupPlace
from kvpagoda.handover.fetched import Given
from kvpagoda.handover.recut import givers_of, is_same, recut
from kvpagoda.handover.ticket import Ticket
from kvpagoda.memory.pages import Bytes
from kvpagoda.prefix import Match
from kvpagoda.prefix.hybrid import Holding
from kvpagoda.units import ceil_div


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
