"""Which rank gives what to which: the overlap of what two ranks hold, and one source among those that hold the same.

Rank r of W needs the sources that hold its heads: floor(r * S / W) of S where there are fewer sources than targets, a run of
them where there are more. What several sources hold alike (a latent, heads with more ranks than heads) comes from one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod

from kvpagoda.errors import LayoutError
from kvpagoda.layouts.axes import Axis

Held = Mapping[str, Axis]
"""The axes of a part by name, with the range that a rank holds."""


def overlap(mine: Axis, theirs: Axis) -> range:
    """Indices of the whole axis that both hold."""
    return range(max(mine.first, theirs.first), min(mine.first + mine.size, theirs.first + theirs.size))


def givers(part: str, sources: Sequence[Held], target: Held, rank: int, ways: int) -> list[int]:
    """The source ranks that give ``part`` to target rank ``rank`` of ``ways``: together they hold all of it once.

    Among sources that hold the same, the first from ``rank * sources // ways`` on is taken, else the last, so that targets
    are spread over them. Raises LayoutError with rule 'shards' where something is missing, or held twice by ranks that do not
    hold the same. O(sources).
    """
    alike: dict[tuple[range, ...], list[int]] = {}
    for number, held in enumerate(sources):
        ranges = tuple(overlap(held[name], axis) for name, axis in target.items())
        if all(ranges):
            alike.setdefault(ranges, []).append(number)
    first = rank * len(sources) // ways
    chosen = [next((one for one in ranks if one >= first), ranks[-1]) for ranks in alike.values()]
    wants = ", ".join(f"{axis.name} {axis.first}..{axis.first + axis.size - 1}" for axis in target.values())
    for one, other in combinations(alike, 2):
        if all(a.start < b.stop and b.start < a.stop for a, b in zip(one, other)):
            ranks = f"{alike[one][0]} and {alike[other][0]}"
            raise LayoutError.of(
                "shards", f"source ranks {ranks} hold some of the same of {part!r} ({wants}), but not all of it"
            )
    found, wanted = sum(prod(map(len, ranges)) for ranges in alike), prod(axis.size for axis in target.values())
    if found < wanted:
        raise LayoutError.of(
            "shards", f"target rank {rank} holds {wants} of {part!r}; the sources have {found} of its {wanted} elements"
        )
    return sorted(chosen)
