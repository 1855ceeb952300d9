"""The axes of a cache's content, and folds: the digits into which an index is split to order it in memory.

An index of an axis is a number of several digits. For example, a token slot in pages of N tokens is
``slot = b * N + n``: the axis ``T`` is folded into the digits ``B`` (step N) and ``N`` (step 1). An expression orders
digits, not axes: ``L B H N`` places the heads between the two digits of ``T``.
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
"""Name of the axis of token slots (or rows of a compressed group).

``B``, ``P`` and ``N`` are its digits: blocks, kernel pages of a block, tokens of a kernel page.
"""


@dataclass(frozen=True)
class Axis:
    """One axis of the content, or one rank's range of it: indices ``first`` to ``first + size - 1`` of ``total``.

    ``pieces``: the most equal pieces into which tensor parallelism divides the axis (heads, or channels by their
    heads). With more ranks than pieces, neighbouring ranks hold the same piece. 0: every rank holds the whole axis.
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
        """Return the range of rank ``rank`` of ``ways`` tensor-parallel ranks.

        It begins with piece floor(rank * pieces / ways) and has max(1, pieces / ways) pieces. Raises LayoutError if
        neither of ``ways`` and ``pieces`` divides the other, or if this axis is a rank's range already.
        """
        if not self.pieces or ways == 1:
            return self
        if (self.first, self.size) != (0, self.total):
            text = f"axis {self.name!r} is a rank's part already; split the whole layout"
            raise LayoutError.of("divide", text, needed=ways, available=1)
        if self.pieces % ways and ways % self.pieces:
            text = f"{self.pieces} pieces of axis {self.name!r} cannot be divided over {ways} ranks"
            raise LayoutError.of("divide", text, needed=ways, available=self.pieces)
        each = self.total // self.pieces
        return replace(self, first=rank * self.pieces // ways * each, size=max(1, self.pieces // ways) * each)

    def stage(self, rank: int, stages: int) -> Axis:
        """Return the range of pipeline stage ``rank`` of ``stages``.

        The ranges are equal; if they do not divide evenly, the first ones have one index more. Raises LayoutError for
        more stages than indices.
        """
        if stages > self.size:
            text = f"{self.size} indices of axis {self.name!r} cannot be divided over {stages} stages"
            raise LayoutError.of("divide", text, needed=stages, available=self.size)
        short, longer = divmod(self.size, stages)
        first = rank * short + min(rank, longer)
        return replace(self, first=self.first + first, size=short + (rank < longer))


@dataclass(frozen=True)
class Fold:
    """One digit of the indices of ``axis``: ``index // step % count``. ``word``: its name in an expression.

    >>> Fold("D%8", "D", 1, 8).of(np.arange(10))
    array([0, 1, 2, 3, 4, 5, 6, 7, 0, 1])
    """

    word: str
    axis: str
    step: int
    count: int

    def of(self, indices: Ints) -> Ints:
        """Return the digit of each of ``indices``."""
        return indices // self.step % self.count


class Sizes:
    """The sizes behind the words of an expression: axes by name, tokens of a kernel page, kernel pages of a block."""

    def __init__(self, axes: Iterable[Axis], page_size: int, kernel_pages: int) -> None:
        self.axes = {axis.name: axis for axis in axes}
        self.page_size, self.kernel_pages = page_size, kernel_pages

    def fold(self, word: str) -> tuple[Fold, int | None]:
        """Return the digit that ``word`` names (``"B"``, ``"D"``, ``"D/8"``, ``"D%8"``) and its stride in bytes.

        The stride is None unless the word has one (``"N@656"``). Raises LayoutError.
        """
        match = FOLD.match(word)
        if match is None:
            raise LayoutError.of(
                "syntax", f"cannot read {word!r} as a digit; write AXIS, AXIS/step, AXIS%count or AXIS@stride"
            )
        axis, step, count, stride = match[1], int(match[2] or 1), int(match[3] or 0), match[4]
        page, kernel_pages = self.page_size, self.kernel_pages
        pages = {"B": (page * kernel_pages, 0), "P": (page, kernel_pages), "N": (1, page)}
        if axis in pages:
            if match[2] or match[3]:
                text = f"{word!r} folds a digit of the tokens; fold the axis {TOKENS!r} itself"
                raise LayoutError.of("fold", text, needed=word)
            axis, (step, count) = TOKENS, pages[axis]
        if axis not in self.axes:
            text = f"{word!r} has no size; sizes are given for: {', '.join(self.axes) or 'nothing'}"
            raise LayoutError.of("axis", text, needed=word)
        if step < 1:
            raise LayoutError.of("fold", f"the step of {word!r} must be at least 1", needed=word)
        count = count or ceil_div(self.axes[axis].size, step)
        return Fold(word.split("@")[0], axis, step, count), None if stride is None else int(stride)


def check_folds(part: str, folds: Iterable[Fold], axes: Mapping[str, Axis]) -> None:
    """Raise LayoutError unless the digits in ``folds`` number the indices of every axis exactly once."""
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
                    needed=covered, available=fold.step,
                )  # fmt: skip
            covered *= fold.count
        if covered < axes[name].size:
            text = f"part {part!r}: its digits of axis {name!r} cover {covered} of {axes[name].size} indices"
            raise LayoutError.of("fold", text, needed=axes[name].size, available=covered)
