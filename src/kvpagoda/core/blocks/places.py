"""Where blocks lie. Blocks have names and places, as addresses in virtual memory:

    name     the id of a block; it stays the same while the block lives       prefix tree, checkpoints, tiers, events
    place    where the block's bytes lie: a record of the group's memory      block tables, free lists, copies, kernels

A name that is passed to a kernel reads the bytes of another block, so the two are two types.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NewType

import numpy as np
import numpy.typing as npt

from kvpagoda.arrays import AnyIds, Ids
from kvpagoda.errors import CheckFailed

BlockNames = NewType("BlockNames", AnyIds)
"""Names of blocks: int32 in the prefix tree, intp where they index arrays."""
BlockPlaces = NewType("BlockPlaces", Ids)
"""Places of blocks: int32."""


class Move(NamedTuple):
    """Decision to exchange the places of blocks: ``names`` move to ``targets``, and the free blocks ``unused``, which
    lie there, to ``sources``."""

    sources: BlockPlaces
    targets: BlockPlaces
    names: npt.NDArray[np.intp]
    unused: npt.NDArray[np.intp]


class FixedPlaces:
    """The places of blocks that never move: name and place are the same number."""

    may_move = False

    def names_at(self, places: BlockPlaces) -> BlockNames:
        """Return the names of the blocks at ``places``: ``[n]``, a copy."""
        return BlockNames(places.copy())

    def places_of(self, names: BlockNames) -> BlockPlaces:
        """Return the places of the blocks ``names``: int32 ``[n]``."""
        same: Any = names  # the same numbers, where nothing moves
        return BlockPlaces(same if same.dtype == np.int32 else same.astype(np.int32))

    def moving(self, sources: BlockPlaces, targets: BlockPlaces) -> Move:
        """Return the decision to move the blocks at ``sources`` to ``targets``, where free blocks lie. Not for blocks
        that never move."""
        raise NotImplementedError("blocks of a memory of their own never move")

    def commit(self, move: Move) -> None:
        """Apply ``move``. Cannot fail. O(blocks moved)."""

    def check(self) -> None:
        """Prove that every block has one place. Raises CheckFailed."""


class PlaceTable(FixedPlaces):
    """The places of ``num_rows`` blocks that may move: a permutation. Block 0, the padding block, stays at place 0.

    >>> table = PlaceTable(4)
    >>> table.commit(table.moving(np.array([1], np.int32), np.array([3], np.int32)))
    >>> table.places_of(np.array([1, 3])), table.names_at(np.array([3, 1], np.int32))
    (array([3, 1], dtype=int32), array([1, 3]))
    """

    may_move = True

    def __init__(self, num_rows: int) -> None:
        self._place_of: Ids = np.arange(num_rows, dtype=np.int32)  # by name
        self._name_at = np.arange(num_rows)  # by place; intp, since numpy takes several times as long to index by int32

    def names_at(self, places: BlockPlaces) -> BlockNames:
        return BlockNames(self._name_at[places])

    def places_of(self, names: BlockNames) -> BlockPlaces:
        return BlockPlaces(self._place_of[names])

    def moving(self, sources: BlockPlaces, targets: BlockPlaces) -> Move:
        return Move(sources, targets, self._name_at[sources], self._name_at[targets])

    def commit(self, move: Move) -> None:
        self._place_of[move.names] = move.targets
        self._place_of[move.unused] = move.sources
        self._name_at[move.targets] = move.names
        self._name_at[move.sources] = move.unused

    def shuffle(self, order: Ids) -> None:
        """Give block ``i`` the place ``order[i]``, before any block is in use: a permutation with ``order[0] == 0``."""
        self._place_of[:] = order
        self._name_at[order] = np.arange(len(order))

    def check(self) -> None:
        wrong = np.flatnonzero(self._name_at[self._place_of] != np.arange(len(self._place_of)))
        if len(wrong) or self._place_of[0]:
            text = f"blocks {wrong[:16].tolist()} have a place that names another block"
            raise CheckFailed(text, available=wrong[:16].tolist())


def places_for(num_rows: int, *, may_move: bool) -> FixedPlaces:
    """Return the places of ``num_rows`` blocks: a table if they may move."""
    return PlaceTable(num_rows) if may_move else FixedPlaces()
