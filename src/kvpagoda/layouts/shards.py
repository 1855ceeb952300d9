"""Choose the source ranks of each target rank: the overlap of two ranks, and one source among equal ones.

Target rank r of W needs the sources that hold its heads: source floor(r * S / W) of S if there are fewer sources than
targets, a run of sources if there are more. If several sources hold the same range (a latent, or more ranks than
heads), one of them is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod

from kvpagoda.errors import LayoutError
from kvpagoda.layouts.axes import Axis

Held = Mapping[str, Axis]
"""Name of an axis of a part -> the axis with the range that a rank holds."""


def overlap(mine: Axis, theirs: Axis) -> range:
    """Return the indices of the whole axis that are in both ranges."""
    return range(max(mine.first, theirs.first), min(mine.first + mine.size, theirs.first + theirs.size))


def givers(part: str, sources: Sequence[Held], target: Held, rank: int, ways: int) -> list[int]:
    """Return the source ranks from which target rank ``rank`` of ``ways`` copies ``part``, ascending.

    Together they hold every element of the target exactly once. Among sources with equal ranges, the first from
    ``rank * sources // ways`` on is chosen, else the last, so that targets are spread over the sources. Raises
    LayoutError with rule 'shards' if an element is missing, or if the ranges of two source ranks overlap without being
    equal. O(sources).
    """
    alike: dict[tuple[range, ...], list[int]] = {}
    for number, held in enumerate(sources):
        ranges = tuple(overlap(held[name], axis) for name, axis in target.items())
        if all(ranges):
            alike.setdefault(ranges, []).append(number)
    first = rank * len(sources) // ways
    chosen = [next((number for number in ranks if number >= first), ranks[-1]) for ranks in alike.values()]
    wants = ", ".join(f"{axis.name} {axis.first}..{axis.first + axis.size - 1}" for axis in target.values())
    for left, right in combinations(alike, 2):
        if all(a.start < b.stop and b.start < a.stop for a, b in zip(left, right)):
            ranks = f"{alike[left][0]} and {alike[right][0]}"
            raise LayoutError.of(
                "shards", f"source ranks {ranks} overlap in {part!r} ({wants}) without holding the same range"
            )
    found, wanted = sum(prod(map(len, ranges)) for ranges in alike), prod(axis.size for axis in target.values())
    if found < wanted:
        raise LayoutError.of(
            "shards", f"target rank {rank} needs {wants} of {part!r}; the sources have {found} of its {wanted} elements"
        )
    return sorted(chosen)
