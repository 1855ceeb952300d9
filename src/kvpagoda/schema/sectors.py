"""How large the sectors of an arena that several kinds share must be. Arithmetic only.

    sector  | record | record | record |   of one kind; each kind carves its sectors into ``per`` records of sector / per bytes

So in every kind's view of the arena record ``id`` starts at ``id * sector / per``, whichever sectors the kind has.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpagoda.schema.layout import ALIGN
from kvpagoda.units import align_up

WASTE = 0.02
_TRIED = 4096


@dataclass(frozen=True)
class SectorSize:
    """``nbytes`` of a sector, and how many records of each kind one holds."""

    nbytes: int
    records: tuple[int, ...]


def sector_size(record_nbytes: tuple[int, ...], most_nbytes: int) -> SectorSize:
    """The smallest sector in which no kind's records lose more than 2 % of it, each record starting at a multiple of 16.

    If none of at most ``most_nbytes`` does, the one with the least loss in its worst kind. ``record_nbytes``: of one
    record of each kind, at least 16. The sector takes at least one of each, whatever ``most_nbytes`` says.
    """
    largest = max(record_nbytes)
    best, least = SectorSize(0, ()), 2.0
    for count in range(1, max(1, min(64, most_nbytes // largest)) + 1):
        low = align_up(count * largest, ALIGN)
        high = max(low, min(most_nbytes, int(count * largest / (1 - WASTE))))
        step = ALIGN
        while (high - low) // step > _TRIED:
            step *= 6  # sizes with many divisors, where there are more than enough
        for size in range(align_up(low, step) if step > ALIGN else low, high + 1, step):
            records = tuple(_most_records(size, nbytes) for nbytes in record_nbytes)
            worst = max(1 - per * nbytes / size for per, nbytes in zip(records, record_nbytes))
            if worst < least:
                best, least = SectorSize(size, records), worst
            if least <= WASTE:
                return best
    return best


def _most_records(size: int, nbytes: int) -> int:
    """The most records of ``nbytes`` that divide ``size`` evenly into multiples of 16 bytes; 1 where far fewer would."""
    units, most = size // ALIGN, size // nbytes
    fewest = max(1, int(most * (1 - 2 * WASTE)))
    return next((per for per in range(most, fewest - 1, -1) if units % per == 0), 1)
