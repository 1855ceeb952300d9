"""A pool of single blocks, as engines without a prefix tree have it: free blocks in one queue, and blocks found by key.

A free block is taken from the front of the queue, and is found until then. Blocks that can be found go to the end when
they are freed, others to the front. Everything is an array, so that a call costs a few operations for all its blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import CheckFailed
from kvpagoda.replay.trace import Ints

Blocks = npt.NDArray[np.int32]
NO_BLOCK = 0
"""The number of no block, and a gap in the queue: blocks are numbered from 1."""


class BlockQueue:
    """The free blocks of 1 to ``num_blocks``, in the order in which they are taken.

    The queue is a stretch of an array with room before and after it; a block that leaves it from the middle leaves a gap.
    ``append``, ``prepend``, ``remove`` and ``take`` are O(their blocks), amortised.
    """

    def __init__(self, num_blocks: int) -> None:
        self._room = 2 * num_blocks + 64
        self._line = np.zeros(num_blocks + 2 * self._room, np.int32)
        self._at = np.zeros(num_blocks + 1, np.int64)  # where each free block is in the line
        self._begin = self._end = self._room
        self.num_free = 0
        self.append(np.arange(1, num_blocks + 1, dtype=np.int32))

    def append(self, blocks: Blocks) -> None:
        """Put ``blocks`` behind all others, in their order."""
        if self._end + len(blocks) > len(self._line):
            self._close_gaps()
        self._put(self._end, blocks)
        self._end += len(blocks)

    def prepend(self, blocks: Blocks) -> None:
        """Put ``blocks`` before all others, in their order: the first is taken next."""
        if self._begin < len(blocks):
            self._close_gaps()
        self._begin -= len(blocks)
        self._put(self._begin, blocks)

    def remove(self, blocks: Blocks) -> None:
        """Take ``blocks``, which are free, out of the queue."""
        self._line[self._at[blocks]] = NO_BLOCK
        self.num_free -= len(blocks)

    def take(self, count: int) -> Blocks:
        """Remove the first ``count`` blocks and return them. There must be so many."""
        if count > self.num_free:
            text = f"{count} blocks asked of {self.num_free} free ones"
            raise CheckFailed(text, needed=count, available=self.num_free)
        found = np.empty(0, np.int32)
        width = count
        while len(found) < count:  # wider, because of gaps
            stretch = self._line[self._begin : min(self._begin + width, self._end)]
            found = stretch[stretch != NO_BLOCK]
            width = 2 * width + 64
        taken: Blocks = found[:count].copy()
        if count:
            self._begin = int(self._at[taken[-1]]) + 1
            self.num_free -= count
        return taken

    def order(self) -> Blocks:
        """Return all free blocks, the next to be taken first: int32 ``[num_free]``."""
        stretch = self._line[self._begin : self._end]
        blocks: Blocks = stretch[stretch != NO_BLOCK]
        return blocks

    def _put(self, where: int, blocks: Blocks) -> None:
        self._line[where : where + len(blocks)] = blocks
        self._at[blocks] = np.arange(where, where + len(blocks))
        self.num_free += len(blocks)

    def _close_gaps(self) -> None:
        """Move the queue to the middle of the line, without gaps."""
        blocks = self.order()
        self._begin, self._end = self._room, self._room + len(blocks)
        self.num_free = 0
        self._put(self._begin, blocks)


class BlockPool:
    """Blocks 1 to ``num_blocks``, each held by some requests or free, and found by its key, 0 to ``num_keys``, if it has one.

    Several blocks may have one key; the one that got it first is found. A block that has a key may have others too
    (``share_also``). ``counts`` int32 ``[num_blocks + 1]``: by how many requests each block is held.
    """

    def __init__(self, num_blocks: int, num_keys: int) -> None:
        self.queue, self.num_blocks = BlockQueue(num_blocks), num_blocks
        self.counts = np.zeros(num_blocks + 1, np.int32)
        self._key_of = np.full(num_blocks + 1, -1, np.int64)
        self._others: dict[int, list[int]] = {}  # block -> its other keys
        self._found = np.zeros(num_keys, np.int32)
        self._has_more = np.zeros(num_keys, np.bool_)
        self.lost = np.zeros(num_blocks + 1, np.int64)  #: how often each block could be found, and no longer
        self.num_evicted = 0  #: blocks that could be found, and were used again for others
        self._alike: dict[int, list[int]] = {}  # key -> its blocks, the first first, once there were several

    def find(self, keys: Ints) -> Blocks:
        """Return the block of each key, ``NO_BLOCK`` where there is none: int32 ``[n]``."""
        found: Blocks = self._found[keys]
        return found

    def num_idle(self, blocks: Blocks) -> int:
        """Return how many of ``blocks`` no request holds."""
        return int(np.count_nonzero(self.counts[blocks[blocks != NO_BLOCK]] == 0))

    def hold(self, blocks: Blocks) -> None:
        """Count one more request that holds each of ``blocks``, which were found."""
        blocks = blocks[blocks != NO_BLOCK]
        self.queue.remove(blocks[self.counts[blocks] == 0])
        self.counts[blocks] += 1

    def take(self, count: int) -> Blocks:
        """Return ``count`` blocks from the front of the queue, held by one request. Their keys are forgotten."""
        blocks = self.queue.take(count)
        self.counts[blocks] = 1
        self.num_evicted += self._forget(blocks)
        return blocks

    def drop(self, blocks: Blocks) -> None:
        """Let nobody find ``blocks`` any more. Those that no request holds are taken next."""
        self._forget(blocks)
        free = blocks[self.counts[blocks] == 0]
        self.queue.remove(free)
        self.queue.prepend(free)

    def release(self, blocks: Blocks) -> None:
        """Count one request less for each of ``blocks``; the ones that nobody holds any more become free, in this order:
        those with a key at the end of the queue, the others at its front."""
        blocks = blocks[blocks != NO_BLOCK]
        self.counts[blocks] -= 1
        free = blocks[self.counts[blocks] == 0]
        is_found = self._key_of[free] >= 0
        self.queue.prepend(free[~is_found])
        self.queue.append(free[is_found])

    def give_back(self, blocks: list[int]) -> None:
        """``release`` blocks of which some may be there several times."""
        free: list[int] = []
        for block in blocks:
            self.counts[block] -= 1
            free += [block] * (not self.counts[block])
        self.counts[free] += 1
        self.release(np.array(free, np.int32))

    def move(self, source: int, copy: int) -> int:
        """Let ``copy``, which has no key, be found by the key of ``source``, which has one and none afterwards; return the
        key."""
        key = int(self._key_of[source])
        self._forget(np.array([source], np.int32))
        self.share(np.array([copy], np.int32), np.array([key], np.int64))
        return key

    def share_also(self, block: int, key: int) -> None:
        """Let ``block`` be found by ``key`` too; its only key if it has none."""
        if self._key_of[block] < 0:
            self.share(np.array([block], np.int32), np.array([key], np.int64))
        elif key not in (first := int(self._key_of[block]), *self._others.get(block, ())):
            self._key_of[block] = -1
            self.share(np.array([block], np.int32), np.array([key], np.int64))
            self._key_of[block] = first
            self._others.setdefault(block, []).append(key)

    def share(self, blocks: Blocks, keys: Ints) -> None:
        """Let ``blocks`` be found by ``keys``, and by no other key."""
        had_one = self._key_of[blocks] >= 0
        if had_one.any():
            self._forget(blocks[had_one])
        is_new = self._found[keys] == NO_BLOCK
        self._found[keys[is_new]] = blocks[is_new]
        self._key_of[blocks] = keys
        self._has_more[keys[~is_new]] = True
        has_more = self._has_more[keys]
        for key, block in zip(keys[has_more].tolist(), blocks[has_more].tolist()):
            alike = self._alike.setdefault(key, [int(self._found[key])])
            if block not in alike:
                alike.append(block)

    def _forget(self, blocks: Blocks) -> int:
        """Forget the keys of ``blocks``; return how many had one."""
        keys = self._key_of[blocks]
        blocks, keys = blocks[keys >= 0], keys[keys >= 0]
        self._key_of[blocks] = -1
        self.lost[blocks] += 1
        count = len(blocks)
        if self._others:
            more = [(block, key) for block in blocks.tolist() for key in self._others.pop(block, ())]
            blocks = np.concatenate((blocks, np.array([block for block, _ in more], np.int32)))
            keys = np.concatenate((keys, np.array([key for _, key in more], np.int64)))
        has_more = self._has_more[keys]
        self._found[keys[~has_more]] = NO_BLOCK
        for key, block in zip(keys[has_more].tolist(), blocks[has_more].tolist()):
            alike = self._alike[key]
            alike.remove(block)
            self._found[key] = alike[0] if alike else NO_BLOCK
        return count
