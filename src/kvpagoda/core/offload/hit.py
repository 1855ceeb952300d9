"""What tiers have of one text: found, perhaps read into staging memory already, and owned until it is released."""

from __future__ import annotations

import os
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from kvpagoda.abc import Lease
from kvpagoda.core.blocks.group import BlockGroup
from kvpagoda.tiers.level import Level

Record = tuple[Level, int]
"""A record of a text: the level that has it, and the number of the record in the text."""


@dataclass(eq=False)
class TierHit:
    """What ``levels`` have of a text, from block ``begin`` to block ``end``; records in ``held`` are read already.

    It owns the staging rows that are acquired for it, until ``release`` gives all of them back."""

    levels: tuple[Level, ...]
    block_hashes: list[bytes]
    begin: int
    end: int
    started: float | None = None
    """When the request for this hit began (``monotonic``); None while no request waits for it."""
    layerwise: bool = field(init=False, default=False)
    """Whether blocks may be copied to the device layer by layer, when a layer is asked for."""
    records: list[Record] = field(init=False, default_factory=list)
    """The records to load, in the order of the text."""
    leases: list[Lease] = field(init=False, default_factory=list)
    checkpoint: tuple[Level, list[int]] | None = field(init=False, default=None)
    """The level and the staging rows that hold the checkpoint at ``end``; None without one."""
    held: dict[Record, int] = field(init=False, default_factory=dict)
    """Record -> staging row, for records that are read."""
    is_arriving: bool = field(init=False, default=False)
    """Whether layers are still to be copied from its staging rows."""
    is_released: bool = field(init=False, default=False)
    """Whether it owns no staging rows any more."""
    _is_over: bool = field(init=False, default=False)

    def __enter__(self) -> TierHit:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def key(self, level: Level, number: int) -> bytes:
        """Return the key of the text's record ``number`` in ``level``."""
        return level.key(self.block_hashes[(number + 1) * level.unit])

    def bounded_key(self, level: Level, group: int, end: int, part: int = 0) -> bytes:
        """Return the key of record ``part`` of what bounded group ``group`` has at the end of ``end`` blocks."""
        return level.key(self.block_hashes[end], bounded_part(group, part))

    def deadline(self, level: Level) -> float:
        """Return when a call to ``level`` must end: its timeout after the request began, however many calls there were
        before (without a request: after now)."""
        return level.spec.timeout + (monotonic() if self.started is None else self.started)

    def release(self) -> None:
        """Give back the leases, and the staging rows as soon as nothing is copied from them. Releasing twice does no
        harm."""
        while self.leases:
            self.leases.pop().release()
        self._is_over = True
        self._give_back()

    def arrived(self) -> None:
        """Note that all layers are copied, and give back the staging rows if the hit is released."""
        self.is_arriving = False
        self._give_back()

    def _give_back(self) -> None:
        if self._is_over and not self.is_arriving:
            self.held, self.checkpoint = {}, None
            for level in self.levels:
                level.buffer.release_all(self)
            self.is_released = True


class Prefetch:
    """Records of one text that are being read into host memory. ``KVCache.prefetch`` makes it; ``open`` takes what it
    has."""

    def __init__(self, block_hashes: list[bytes], future: Future[TierHit | None]) -> None:
        self.block_hashes, self._process = block_hashes, os.getpid()
        self._future: Future[TierHit | None] | None = future

    @property
    def is_used(self) -> bool:
        """Whether ``open`` took it, or it was closed."""
        return self._future is None

    @property
    def is_done(self) -> bool:
        """Whether everything that can be read ahead is read, so that ``open`` does not wait for it."""
        return self._future is None or self._future.done() or self._process != os.getpid()

    def take(self, deadline: float) -> TierHit | None:
        """Return what was found, for the caller to release; wait for it until ``deadline``. What comes later is given
        back. In a forked child the result is None: the reading thread does not exist there."""
        future, self._future = self._future, None
        if future is None or self._process != os.getpid():
            return None
        try:
            return future.result(max(0.0, deadline - monotonic()))
        except (CancelledError, FutureTimeout):
            if not future.cancel():
                future.add_done_callback(_release)
            return None

    def close(self) -> None:
        """Give back what was read, or is being read."""
        hit = self.take(0.0)
        if hit is not None:
            hit.release()


def _release(future: Future[TierHit | None]) -> None:
    hit = None if future.exception() is not None else future.result()
    if hit is not None:
        hit.release()


def bounded_part(group: int, part: int) -> bytes:
    """Return the kind (see ``Level.key``) of record ``part`` of a block of bounded group ``group``: a window's block, found
    by the text up to its last token, or a copy of states, found by the text that they are of."""
    return b"bounded %d %d" % (group, part)


def num_needed(group: BlockGroup, length: Any) -> Any:
    """Return how many blocks of bounded ``group`` a text reads to go on after ``length`` tokens, whole blocks of it. The
    last ends there. Takes ints or arrays."""
    return -(-length // group.block_size) - group.growth.first_needed(length) // group.block_size
