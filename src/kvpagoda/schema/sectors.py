"""How large the sectors of an arena that several groups share must be. Arithmetic only.

    sector  | record | record | record |   of one group, which divides each of its sectors into ``per`` records of equal size

So in every group's view of the arena record ``id`` starts at ``id * sector / per``, whichever sectors the group has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvpagoda.schema.layout import ALIGN
from kvpagoda.units import align_up, ceil_div

MAX_WASTE = 0.02
SHARE = 64
"""A sector is at most one of so many parts of the budget, but where a record is larger."""
MAX_RECORDS = 64
"""Of the largest records, so many are tried in one sector."""
MAX_SIZES = 4096
"""Sizes tried for each number of them."""


@dataclass(frozen=True)
class SectorSize:
    """``nbytes`` of a sector, and how many records of each group one holds."""

    nbytes: int
    records: tuple[int, ...]


def sector_size(
    record_nbytes: tuple[int, ...], max_nbytes: int, multiples: tuple[int, ...] | None = None
) -> SectorSize:
    """The smallest sector of which every group's records waste at most 2 %, each record starting at a multiple of 16 bytes, or
    of its own of ``multiples``, which are multiples of 16.

    ``record_nbytes``: of one record of each group, at least 16. If no sector of at most ``max_nbytes`` is that good, the one
    whose worst group wastes least. A sector holds at least one record of each group, whatever ``max_nbytes`` says.

    >>> sector_size((1000, 4000), max_nbytes=64_000)
    SectorSize(nbytes=4032, records=(4, 1))
    """
    largest = max(record_nbytes)
    multiples = multiples or (ALIGN,) * len(record_nbytes)
    unit = math.lcm(*multiples)
    best, least = SectorSize(0, ()), 2.0
    for count in range(1, max(1, min(MAX_RECORDS, max_nbytes // largest)) + 1):
        low = align_up(count * largest, unit)
        high = max(low, min(max_nbytes, int(count * largest / (1 - MAX_WASTE))))
        step = unit
        while (high - low) // step > MAX_SIZES:
            step *= 6  # sizes with many divisors, where there are more than enough
        for nbytes in range(align_up(low, step), high + 1, step) or (low,):
            records = tuple(_records_in(nbytes, *record) for record in zip(record_nbytes, multiples))
            waste = max(1 - number * record / nbytes for number, record in zip(records, record_nbytes))
            if waste < least:
                best, least = SectorSize(nbytes, records), waste
            if least <= MAX_WASTE:
                return best
    return best


def budget_for(record_nbytes: tuple[int, ...], counts: Sequence[int], multiples: tuple[int, ...] | None = None) -> int:
    """Bytes of a budget whose sectors hold ``counts[i]`` records of each group i at once, beside the one for padding; sectors
    grow with the budget, so that a little less may do. ``multiples``: see ``sector_size``.

    >>> budget_for((1000, 4000), (9, 2))
    48000
    """
    budget = sum((count + 1) * nbytes for count, nbytes in zip(counts, record_nbytes))
    while True:
        sector = sector_size(record_nbytes, budget // SHARE, multiples)
        needed = (1 + sum(ceil_div(count, per) for count, per in zip(counts, sector.records))) * sector.nbytes
        if needed <= budget:
            return budget
        budget = needed


def _records_in(sector: int, record: int, multiple: int) -> int:
    """The most records of ``record`` bytes that divide ``sector`` bytes evenly into multiples of ``multiple`` bytes; 1 where
    that would be far fewer than have room."""
    units, most = sector // multiple, sector // record
    fewest = max(1, int(most * (1 - 2 * MAX_WASTE)))
    return next((number for number in range(most, fewest - 1, -1) if units % number == 0), 1)
