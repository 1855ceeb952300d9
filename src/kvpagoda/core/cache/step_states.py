"""Blocks in which a step leaves states at block boundaries that it passes, until they are checkpoints.

    batch     names a free block for each position inside the step at which a checkpoint is due
    commit    the engine says which of them it wrote
    settle    these become checkpoints; the others of the committed tokens are free again

What a step named and nobody committed is free again with the next batch of its request, unless that names the same
position, or with its end.
"""

from __future__ import annotations

import numpy as np

from kvpagoda.core.blocks.group import BlockGroup
from kvpagoda.core.blocks.places import BlockNames, BlockPlaces
from kvpagoda.core.cache.request import Request

_NONE = BlockPlaces(np.empty(0, np.int32))


Named = tuple[int, int, BlockNames, bool]
"""(row of the step, number of blocks before a position, name of the block, ``[1]``, in which the step leaves the state
there, whether no earlier step named it)."""


class StepStates:
    """Owns these blocks of ``group`` (None: the model has no states). They are allocated, and neither in a row of a request
    nor cached.

    ``named``: request -> the number of blocks before a position -> the name of the block, ``[1]``; requests without any are
    absent. ``wrote``: request -> those that its engine wrote, of committed tokens. The methods that change something
    cannot fail."""

    def __init__(self, group: BlockGroup | None) -> None:
        self.group = group
        self.named: dict[Request, dict[int, BlockNames]] = {}
        self.wrote: dict[Request, set[int]] = {}

    def positions(self, request: Request, block_size: int) -> tuple[int, ...]:
        """Return the positions, in tokens and ascending, that the newest step of ``request`` named and that are not
        committed yet."""
        length = request.length
        return tuple(sorted(at * block_size for at in self.named.get(request, ()) if at * block_size > length))

    def is_written(self, request: Request, depth: int) -> bool:
        """Return whether the state of ``request`` after ``depth`` blocks, which are committed, was left in a block."""
        return depth in self.wrote.get(request, ())

    def places(self, request: Request | None = None) -> BlockPlaces:
        """Return the places of all blocks, or of those of ``request``: int32."""
        owners = self.named.values() if request is None else [self.named.get(request, {})]
        names = [name for blocks in owners for name in blocks.values()]
        if not names or self.group is None:
            return _NONE
        return self.group.places_of(BlockNames(np.concatenate(names)))

    def name(self, request: Request, depth: int, block: BlockNames) -> None:
        """Own ``block``, which was allocated for the state of ``request`` after ``depth`` blocks."""
        self.named.setdefault(request, {})[depth] = block

    def commit(self, request: Request, depths: set[int], end: int) -> None:
        """Commit ``request`` up to ``end`` tokens, and record that its engine wrote the states after ``depths``, which are
        named."""
        request.own_length, self.wrote[request] = end, depths | self.wrote.get(request, set())

    def pop(self, request: Request, depth: int) -> BlockNames:
        """Give up the block for the state of ``request`` after ``depth`` blocks, and return it."""
        blocks, wrote = self.named[request], self.wrote.get(request, set())
        block = blocks.pop(depth)
        wrote.discard(depth)
        if not blocks:
            del self.named[request]
        if not wrote:
            self.wrote.pop(request, None)
        return block

    def useless(self, request: Request, num_blocks: int) -> list[int]:
        """Return the depths, up to the ``num_blocks`` that are committed, at which no checkpoint comes of the blocks of
        ``request`` any more."""
        due, wrote = (request.due, self.wrote.get(request, ())) if request.publishes else ((), ())
        return [at for at in self.named.get(request, ()) if at <= num_blocks and not (at in wrote and at in due)]

    def clear(self) -> None:
        """Forget all; the caller frees every block of the group."""
        self.named.clear()
        self.wrote.clear()
