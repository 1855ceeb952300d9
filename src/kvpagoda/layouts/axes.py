"""Axes of what a cache holds, and folds: the digits of an index that memory is ordered by.

An index of an axis is written in digits. A token slot in pages of N is ``slot = b * N + n``: the axis ``T`` is folded into
``B`` (step N) and ``N`` (step 1). Memory then orders digits, not axes: ``L B H N`` puts heads between the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import LayoutError
from kvpagoda.units import ceil_div, whole_number

Ints = npt.NDArray[np.int64]
FOLD = re.compile(r"([A-Za-z]\w*)(?:/(\d+))?(?:%(\d+))?(?:@(\d+))?$")
TOKENS = "T"
"""The axis of token slots (or rows of a compressed group). ``B``, ``P`` and ``N`` are its digits: blocks, kernel pages of a
block, tokens of a kernel page."""


@dataclass(frozen=True)
class Axis:
    """One axis of the content, or the part of it that one rank holds: indices ``first`` to ``first + size - 1`` of ``total``.

    ``pieces``: tensor-parallel ranks divide the axis into at most so many equal pieces (heads, or channels by their heads);
    with more ranks than pieces, neighbours hold the same piece. 0: every rank holds all of it.
    """

    name: str
    size: int
    total: int
    first: int = 0
    pieces: int = 0

    def __post_init__(self) -> None:
        for what in ("size", "total", "first", "pieces"):
            number = whole_number(getattr(self, what), f"{what} of axis {self.name!r}", 0 if what != "size" else 1)
            object.__setattr__(self, what, number)
        if self.first + self.size > self.total:
            text = f"axis {self.name!r} holds {self.first}..{self.first + self.size - 1} of only {self.total} indices"
            raise LayoutError.of("size", text)
        if self.pieces and self.total % self.pieces:
            raise LayoutError.of(
                "divide", f"{self.total} indices of axis {self.name!r} are not {self.pieces} equal pieces"
            )

    def piece(self, rank: int, ways: int) -> Axis:
        """What rank ``rank`` of ``ways`` tensor-parallel ranks holds: piece floor(rank * pieces / ways) and those up to the
        next rank's. Raises LayoutError where neither of ways and pieces divides the other."""
        if not self.pieces or ways == 1:
            return self
        if (self.first, self.size) != (0, self.total):
            raise LayoutError.of("divide", f"axis {self.name!r} is a rank's part already; split the whole layout")
        if self.pieces % ways and ways % self.pieces:
            raise LayoutError.of(
                "divide", f"{self.pieces} pieces of axis {self.name!r} cannot be divided over {ways} ranks"
            )
        each = self.total // self.pieces
        return replace(self, first=rank * self.pieces // ways * each, size=max(1, self.pieces // ways) * each)

    def stage(self, rank: int, stages: int) -> Axis:
        """What pipeline stage ``rank`` of ``stages`` holds: equal runs, the first ones one more where they do not divide."""
        if stages > self.size:
            raise LayoutError.of(
                "divide", f"{self.size} indices of axis {self.name!r} cannot be divided over {stages} stages"
            )
        short, longer = divmod(self.size, stages)
        first = rank * short + min(rank, longer)
        return replace(self, first=self.first + first, size=short + (rank < longer))


@dataclass(frozen=True)
class Fold:
    """One digit of the indices of ``axis``: ``index // step % count``. ``word`` is how an expression spells it.

    >>> Fold("D%8", "D", 1, 8).of(np.arange(10))
    array([0, 1, 2, 3, 4, 5, 6, 7, 0, 1])
    """

    word: str
    axis: str
    step: int
    count: int

    def of(self, indices: Ints) -> Ints:
        """The digit of each index."""
        return indices // self.step % self.count


class Sizes:
    """What the words of an expression stand for: axes by name, tokens of a kernel page, kernel pages of a block."""

    def __init__(self, axes: Iterable[Axis], page_size: int, kernel_pages: int) -> None:
        self.axes = {axis.name: axis for axis in axes}
        self.page_size, self.kernel_pages = page_size, kernel_pages

    def fold(self, word: str) -> tuple[Fold, int | None]:
        """``"B"``, ``"D"``, ``"D/8"``, ``"D%8"``, ``"N@656"`` -> the digit, and the stride in bytes where one is given."""
        match = FOLD.match(word)
        if match is None:
            raise LayoutError.of(
                "syntax", f"cannot read {word!r} as a digit; write AXIS, AXIS/step, AXIS%count or AXIS@stride"
            )
        axis, step, count, stride = match[1], int(match[2] or 1), int(match[3] or 0), match[4]
        page, many = self.page_size, self.kernel_pages
        pages = {"B": (page * many, 0), "P": (page, many), "N": (1, page)}
        if axis in pages:
            if match[2] or match[3]:
                raise LayoutError.of("fold", f"{word!r} folds a digit of the tokens; fold the axis {TOKENS!r} itself")
            axis, (step, count) = TOKENS, pages[axis]
        if axis not in self.axes:
            raise LayoutError.of(
                "axis", f"{word!r} has no size; sizes are given for: {', '.join(self.axes) or 'nothing'}"
            )
        if step < 1:
            raise LayoutError.of("fold", f"the step of {word!r} must be at least 1")
        count = count or ceil_div(self.axes[axis].size, step)
        return Fold(word.split("@")[0], axis, step, count), None if stride is None else int(stride)


def check_folds(part: str, folds: Iterable[Fold], axes: Mapping[str, Axis]) -> None:
    """Every axis among ``folds`` has digits that number its indices exactly once. Raises LayoutError."""
    by_axis: dict[str, list[Fold]] = {}
    for fold in folds:
        by_axis.setdefault(fold.axis, []).append(fold)
    for name, digits in by_axis.items():
        digits.sort(key=lambda fold: (fold.step, fold.count))
        covered = 1
        for fold in digits:
            if fold.step != covered:
                raise LayoutError.of(
                    "fold",
                    f"part {part!r}: the digits {', '.join(one.word for one in digits)} of axis {name!r} do not number its "
                    f"{axes[name].size} indices once: {fold.word!r} has step {fold.step}, the digits below it cover {covered}",
                )
            covered *= fold.count
        if covered < axes[name].size:
            raise LayoutError.of(
                "fold", f"part {part!r}: its digits of axis {name!r} cover {covered} of {axes[name].size} indices"
            )
