"""What was measured, as rows of figures beside their bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

HEADS, LATENTS, INDEX_KEYS, NVFP4_ROWS = "heads", "MLA and DeepSeek-V4 rows", "index keys", "NVFP4 rows"
CARD, BLOCKS, STEPS, TIER, SWAP = "the card", "copies of blocks", "decode steps", "a host tier", "suspend and resume"
LOOP = "a captured loop"


class RowBound(NamedTuple):
    """What a figure should be: at least ``value``, or at most. ``text``: how the bound is said, if it is not a number."""

    value: float
    is_least: bool
    text: str = ""

    def __str__(self) -> str:
        return f"{'>=' if self.is_least else '<='} {self.text or f'{self.value:g}'}"


def at_least(value: float, text: str = "") -> RowBound:
    """Return the bound of a figure that should be ``value`` or more."""
    return RowBound(value, True, text)


def at_most(value: float, text: str = "") -> RowBound:
    """Return the bound of a figure that should be ``value`` or less."""
    return RowBound(value, False, text)


@dataclass(frozen=True)
class BenchRow:
    """The figures of one case. ``part``: the table that it belongs to. ``figures``: name -> value, and the name ends with
    the unit: ``append_percent``, ``host_us``, ``in_gbps``. ``bounds``: of some of them. ``failed``: why there are none."""

    part: str
    case: str
    figures: Mapping[str, float] = field(default_factory=dict)
    bounds: Mapping[str, RowBound] = field(default_factory=dict)
    failed: str = ""

    def meets(self, name: str) -> bool | None:
        """Return whether figure ``name`` meets its bound; None if it has none."""
        bound, value = self.bounds.get(name), self.figures[name]
        return None if bound is None else value >= bound.value if bound.is_least else value <= bound.value

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data, the figures rounded to six digits."""
        row: dict[str, Any] = {"part": self.part, "case": self.case}
        if self.failed:
            return row | {"failed": self.failed}
        row |= {name: float(f"{value:.6g}") for name, value in self.figures.items()}
        bounds = {name: {"bound": str(bound), "is_met": self.meets(name)} for name, bound in self.bounds.items()}
        return row | {"bounds": bounds}


class BenchCase(NamedTuple):
    """One measurement: the part and the name of its row, and the call that makes its figures and their bounds."""

    part: str
    name: str
    run: Callable[[], tuple[dict[str, float], dict[str, RowBound]]]


@dataclass(frozen=True)
class RowSizes:
    """How much is measured.

    ``moved``: bytes that an append or a gather reads and writes, at most; a copy of blocks twice that. ``text``: bytes of a
    request that goes to a tier and back. ``requests``: rows of a step; ``contexts``: their tokens; ``steps``: how many are
    timed. ``rounds``: a figure is the median of so many. ``few``: rows of a small append; ``replays``: of its graph."""

    moved: int = 1 << 30
    text: int = 1 << 30
    requests: int = 256
    contexts: tuple[int, ...] = (1024, 8192)
    steps: int = 48
    rounds: int = 5
    few: int = 256
    replays: int = 50

    def within(self, free_nbytes: int) -> RowSizes:
        """Return these sizes, with fewer bytes if ``free_nbytes`` of memory do not hold eight times as many."""
        most = max(1 << 20, free_nbytes // 8)
        return replace(self, moved=min(self.moved, most), text=min(self.text, most))


SHORT = RowSizes(moved=256 << 20, contexts=(1024,), steps=20, rounds=3)
"""The sizes of the doctor's short form."""
