"""Choose the size of the sectors of an arena that several groups share. Arithmetic only.

    sector  | record | record | record |    owned by one group, which divides each of its sectors into ``per`` records

The records of a sector have equal size. In every group's view of the arena, record ``id`` therefore starts at byte
``id * sector / per``, whichever sectors the group owns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvpagoda.schema.layout import ALIGN
from kvpagoda.units import align_up, ceil_div

MAX_WASTE = 0.02
SHARE = 64
"""A sector is at most ``budget / SHARE`` bytes, unless one record is larger than that."""
MAX_RECORDS = 64
"""Sizes for 1 to so many of the largest records in one sector are tried."""
MAX_SIZES = 4096
"""How many sizes are tried for each number of largest records."""


@dataclass(frozen=True)
class SectorSize:
    """``nbytes`` of a sector; ``records[i]``: how many records of group i one sector holds."""

    nbytes: int
    records: tuple[int, ...]


def sector_size(
    record_nbytes: tuple[int, ...], max_nbytes: int, multiples: tuple[int, ...] | None = None
) -> SectorSize:
    """Return the smallest sector in which every group's records leave at most 2 % (``MAX_WASTE``) unused.

    ``record_nbytes``: bytes of one record of each group, at least 16. ``max_nbytes``: the most bytes of a sector,
    unless one record of the largest group needs more. ``multiples``: records of group i start at multiples of
    ``multiples[i]`` bytes, a multiple of 16 (None: 16 for all).

    If no sector wastes that little, the one whose worst group wastes least is returned. A sector holds at least one
    record of each group.

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
            step *= 6  # there are more than enough sizes: keep those with many divisors
        for nbytes in range(align_up(low, step), high + 1, step) or (low,):
            records = tuple(_records_in(nbytes, *record) for record in zip(record_nbytes, multiples))
            waste = max(1 - number * record / nbytes for number, record in zip(records, record_nbytes))
            if waste < least:
                best, least = SectorSize(nbytes, records), waste
            if least <= MAX_WASTE:
                return best
    return best


def budget_for(record_nbytes: tuple[int, ...], counts: Sequence[int], multiples: tuple[int, ...] | None = None) -> int:
    """Return a budget in bytes whose sectors hold ``counts[i]`` records of every group i at once.

    One more sector is for padding. Sectors grow with the budget, so a slightly smaller budget may suffice too.
    ``record_nbytes``, ``multiples``: see ``sector_size``.

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
    """Return the most records of ``record`` bytes in a sector of ``sector`` bytes that is divided into equal parts.

    The parts are multiples of ``multiple`` bytes. 1 if only a number far below ``sector / record`` divides the sector
    evenly.
    """
    units, most = sector // multiple, sector // record
    fewest = max(1, int(most * (1 - 2 * MAX_WASTE)))
    return next((number for number in range(most, fewest - 1, -1) if units % number == 0), 1)
