"""What the prefix tree answers, and what it hands out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpagoda.blocks.ids import Ids

if TYPE_CHECKING:
    from kvpagoda.prefix.node import Node

Mask = npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class Match:
    """What is cached of a text. The text must not change while the match is in use.

    ``num_tokens`` leading tokens match, ``num_blocks`` whole blocks of them; ``ids`` int32 ``[num_groups, num_blocks]``
    are those blocks, 0 where a group keeps nothing. ``checkpoint``: (num_tokens, state id) of the deepest one within them.
    ``beyond``: where the block lies that begins with the tokens after them, to be copied and not shared (see
    ``PrefixTree.pin_partial``), if there is one.
    """

    num_tokens: int
    num_blocks: int
    ids: Ids
    namespace: bytes
    tokens: Ids = field(repr=False)
    node: Node | None = field(repr=False)  # where the whole blocks end
    removals: int = field(repr=False)  # of the tree, when this was found
    beyond: Node | None = field(repr=False)
    checkpoint: tuple[int, int] | None = field(init=False, default=None)


@dataclass(slots=True, eq=False, repr=False)
class Lease:
    """The first ``num_blocks`` blocks of one text, pinned: they stay cached until ``PrefixTree.unpin``.

    Splits and merges of the tree do not matter to it. ``is_open`` until unpinned.
    """

    tree: object
    node: Node
    num_blocks: int
    is_open: bool = True

    def __repr__(self) -> str:
        return f"Lease({self.num_blocks} blocks{'' if self.is_open else ', unpinned'})"


class Inserted(NamedTuple):
    """What became of n blocks that were given to the tree.

    ``ids`` int32 ``[num_groups, n]``: the tree's own, to be used from now on. ``num_added``: blocks that were not cached
    before. ``lease`` covers everything, if that was asked for.
    """

    ids: Ids
    doubles: Mask | None
    num_added: int
    lease: Lease | None

    @property
    def duplicates(self) -> Mask:
        """bool ``[num_groups, n]``: the given ids that the tree did not take, because it has that block: still the caller's,
        to be freed."""
        return np.zeros(self.ids.shape, np.bool_) if self.doubles is None else self.doubles


@dataclass(slots=True, eq=False)
class Evicted:
    """What the tree gave up: the caller's, to be freed.

    ``ids`` int32 ``[num_groups, k]`` of k blocks, in the order they went, 0 where a group kept nothing; ``states``: the
    ids of the checkpoints that went with them; ``shortfall``: blocks asked for that did not go, since all that is left is
    pinned, or since the memory of the host ran out on the way.
    """

    ids: Ids
    states: tuple[int, ...]
    shortfall: int
