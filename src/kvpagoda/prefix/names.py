"""The identity of blocks that were evicted but are still remembered by the eviction policy."""

from __future__ import annotations

from collections.abc import Iterable


class Names:
    """Which evicted block had which cell: (cell of the block above, its tokens as bytes) -> cell. No token is hashed
    beyond what a dictionary does to its keys, and equality is that of the tokens.

    A cell keeps its meaning while the policy remembers it or while a block below it has a name, so that a whole path is
    known again when it comes back. All calls are amortised O(1) for each cell.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, bytes], int] = {}
        self._places: dict[int, tuple[int, bytes]] = {}
        self._below: dict[int, int] = {}  # names right below a cell
        self._kept: set[int] = set()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, above: int, block: bytes) -> int | None:
        """The cell that ``block`` had below the cell ``above``."""
        return self._cells.get((above, block))

    def leave(self, above: int, cells: list[int], blocks: list[bytes]) -> None:
        """``blocks``, one below the other from the cell ``above`` on, are no longer cached; remembered until ``forget``."""
        for cell, block in zip(cells, blocks):
            self._places[cell] = place = above, block
            self._cells[place] = cell
            self._below[above] = self._below.get(above, 0) + 1
            above = cell
        self._kept.update(cells)

    def come_back(self, cell: int) -> None:
        """The block of ``cell`` is cached again."""
        self._kept.discard(cell)
        self._drop(cell)

    def forget(self, cells: Iterable[int]) -> list[int]:
        """The policy remembers ``cells`` no more; returns those, and cells above them, that mean nothing any more."""
        meaningless = []
        for cell in cells:
            self._kept.discard(cell)
            while cell in self._places and cell not in self._kept and cell not in self._below:
                meaningless.append(cell)
                cell = self._drop(cell)
        return meaningless

    def _drop(self, cell: int) -> int:
        above, block = self._places.pop(cell)
        del self._cells[above, block]
        self._below[above] -= 1
        if not self._below[above]:
            del self._below[above]
        return above
