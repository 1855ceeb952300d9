"""Results of the prefix tree: match, lease, inserted and evicted blocks."""

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
    """The cached prefix of a text. The text must not change while the match is in use.

    ``num_tokens``: leading tokens that match. ``num_blocks``: whole blocks among them. ``ids``: int32
    ``[num_groups, num_blocks]``, the ids of these blocks, 0 where a group keeps nothing. ``checkpoint``: (num_tokens,
    state id) of the deepest checkpoint within these blocks, or None. ``beyond``: the node of the block that begins with
    the matching tokens after the whole blocks, or None. This block can be copied, not shared (see
    ``PrefixTree.pin_partial``).
    """

    num_tokens: int
    num_blocks: int
    ids: Ids
    namespace: bytes
    tokens: Ids = field(repr=False)
    node: Node | None = field(repr=False)  # the node in which the whole blocks end
    removals: int = field(repr=False)  # the tree's count of removals at the time of the match
    beyond: Node | None = field(repr=False)
    checkpoint: tuple[int, int] | None = field(init=False, default=None)


@dataclass(slots=True, eq=False, repr=False)
class Lease:
    """A pin on the first ``num_blocks`` blocks of one text: they stay cached until ``PrefixTree.unpin``.

    Splits and merges of nodes do not affect a lease. ``is_open`` is true until the lease is unpinned.
    """

    tree: object
    node: Node
    num_blocks: int
    is_open: bool = True

    def __repr__(self) -> str:
        return f"Lease({self.num_blocks} blocks{'' if self.is_open else ', unpinned'})"


class Inserted(NamedTuple):
    """Result of inserting n blocks.

    ``ids``: int32 ``[num_groups, n]``, the ids that the tree owns for these blocks; use them from now on.
    ``num_added``: blocks that were not cached before. ``lease``: covers all n blocks, if the caller asked for a lease.
    ``doubles``: the mask that ``duplicates`` returns, or None if it is false everywhere.
    """

    ids: Ids
    doubles: Mask | None
    num_added: int
    lease: Lease | None

    @property
    def duplicates(self) -> Mask:
        """Mask of the given ids that the tree did not take, because it has a block there: bool ``[num_groups, n]``.

        The caller still owns these ids, and frees them.
        """
        return np.zeros(self.ids.shape, np.bool_) if self.doubles is None else self.doubles


@dataclass(slots=True, eq=False)
class Evicted:
    """Blocks and checkpoints that the tree removed. The caller owns their ids now, and frees them.

    ``ids``: int32 ``[num_groups, k]`` of k blocks, in the order of eviction, 0 where a group kept nothing. ``states``:
    state ids of the checkpoints that were removed with them. ``shortfall``: how many blocks were not evicted although
    requested, because all remaining blocks are pinned, or because the host ran out of memory on the way.
    """

    ids: Ids
    states: tuple[int, ...]
    shortfall: int
