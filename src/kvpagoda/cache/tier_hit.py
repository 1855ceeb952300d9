"""What tiers have of one text: found, perhaps read into staging memory already, and owned until it is released."""

from __future__ import annotations

import os
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from time import monotonic

from kvpagoda.tiers.driver import Lease
from kvpagoda.tiers.level import Level

Record = tuple[Level, int]
"""A record of a text: the level that has it, and its number in the text."""


@dataclass(eq=False)
class TierHit:
    """What ``levels`` have of a text, from block ``begin`` of it up to ``end``: found and, where it is ``held``, read already.

    It owns the staging rows that are acquired for it, until ``release`` gives all of them back.
    """

    levels: tuple[Level, ...]
    block_hashes: list[bytes]
    begin: int
    end: int
    started: float | None = None
    """When the request began for which this is; None while nobody waits for it."""
    layerwise: bool = field(init=False, default=False)
    """Whether blocks may come in layer after layer, when they are asked for."""
    records: list[Record] = field(init=False, default_factory=list)
    """In the order of the text."""
    leases: list[Lease] = field(init=False, default_factory=list)
    checkpoint: tuple[Level, list[int]] | None = field(init=False, default=None)
    """The staging rows that hold the checkpoint at ``end``."""
    held: dict[Record, int] = field(init=False, default_factory=dict)
    """The staging rows of records that are read."""
    is_arriving: bool = field(init=False, default=False)
    """Whether layers are still copied from its staging rows."""
    is_released: bool = field(init=False, default=False)
    """Whether it owns nothing any more."""
    _is_over: bool = field(init=False, default=False)

    def __enter__(self) -> TierHit:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def key(self, level: Level, number: int) -> bytes:
        """The name of the text's record ``number`` in ``level``."""
        return level.key(self.block_hashes[(number + 1) * level.unit])

    def checkpoint_key(self, level: Level, end: int, part: int = 0) -> bytes:
        """The name of a record of the checkpoint after ``end`` blocks."""
        return level.key(self.block_hashes[end], checkpoint_part(part))

    def deadline(self, level: Level) -> float:
        """When a call to ``level`` has to be done: its timeout after the request began, whatever was asked before."""
        return level.spec.timeout + (monotonic() if self.started is None else self.started)

    def release(self) -> None:
        """Give back leases, and staging rows as soon as nothing is copied from them. Does no harm twice."""
        while self.leases:
            self.leases.pop().release()
        self._is_over = True
        self._give_back()

    def arrived(self) -> None:
        """All layers are copied."""
        self.is_arriving = False
        self._give_back()

    def _give_back(self) -> None:
        if self._is_over and not self.is_arriving:
            self.held, self.checkpoint = {}, None
            for level in self.levels:
                level.buffer.release_all(self)
            self.is_released = True


class Prefetch:
    """Records of one text that are being read into host memory. Made by ``KVCache.prefetch``; ``open`` takes what it has."""

    def __init__(self, block_hashes: list[bytes], future: Future[TierHit | None]) -> None:
        self.block_hashes, self._process = block_hashes, os.getpid()
        self._future: Future[TierHit | None] | None = future

    @property
    def is_used(self) -> bool:
        """Whether there is nothing to take any more."""
        return self._future is None

    @property
    def is_done(self) -> bool:
        """Whether all that can be read ahead is read: opening the request waits for nothing then."""
        return self._future is None or self._future.done() or self._process != os.getpid()

    def take(self, deadline: float) -> TierHit | None:
        """What was found, for the caller to release; waits for it until ``deadline``. What comes later is given back. In a
        forked child nothing was: the thread that reads is not there."""
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


def checkpoint_part(number: int) -> bytes:
    """The kind of a checkpoint's records."""
    return b"checkpoint %d" % number
