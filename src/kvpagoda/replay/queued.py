"""A manager without a prefix tree: blocks in one queue and found by key, as vLLM's is, without memory.

It is no second manager of this library: it allocates nothing and knows no tokens. A profile sets what it does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvpagoda.replay.block_queue import NO_BLOCK, BlockPool, Blocks
from kvpagoda.replay.chains import Chains
from kvpagoda.replay.profiles import Profile
from kvpagoda.replay.trace import Ints
from kvpagoda.units import ceil_div


@dataclass
class _Table:
    """The blocks of a running request. ``shared``: how many of its blocks others were let find, or that it found."""

    keys: Ints
    blocks: Blocks
    count: int = 0
    shared: int = 0
    known: int = field(default=0)


class QueuedManager:
    """Serves requests of ``chains`` with ``num_blocks`` blocks. See ``driver.Manager``."""

    def __init__(self, chains: Chains, num_blocks: int, profile: Profile) -> None:
        self.chains, self.profile, self.size = chains, profile, chains.block_size
        self.pool = BlockPool(num_blocks, chains.num_keys)
        self.tables: dict[int, _Table] = {}
        self._asked: tuple[int, Ints, Blocks] = -1, np.empty(0, np.int64), np.empty(0, np.int32)
        self._spare = int(profile.watermark * (num_blocks + 1))  # vLLM counts its block of zeros too

    def step_starts(self) -> None:
        """See ``driver.Manager``."""

    def find(self, request: int, known: int) -> int:
        """See ``driver.Manager``. O(blocks)."""
        keys = self.chains.keys(request)
        found = self.pool.find(keys[: max(0, known - self.profile.recomputes) // self.size])
        missing = np.flatnonzero(found == NO_BLOCK)
        if len(missing):
            found = found[: missing[0]]
        self._asked = request, keys, found
        return len(found) * self.size

    def chunk(self, request: int, begin: int, end: int, known: int) -> int:
        """See ``driver.Manager``."""
        return end

    def start(self, request: int, end: int, known: int) -> bool:
        """See ``driver.Manager``."""
        asked, keys, found = self._asked
        assert asked == request, "a request is looked up before it starts"
        most = max(end, known) if self.profile.reserves == "prompt" else end
        needed = ceil_div(most, self.size) - len(found) + self.pool.num_idle(found)
        if needed + (self._spare if self.tables else 0) > self.pool.num_free:
            return False
        table = _Table(keys, np.zeros(ceil_div(int(self.chains.totals[request]), self.size), np.int32))
        self.pool.hold(found)
        table.blocks[: len(found)] = found
        table.count = table.shared = len(found)
        self.tables[request] = table
        self._extend(table, end)
        return True

    def grow(self, request: int, end: int, known: int) -> bool:
        """See ``driver.Manager``."""
        table = self.tables[request]
        if ceil_div(end, self.size) - table.count > self.pool.num_free:
            return False
        self._extend(table, end)
        return True

    def stop(self, request: int, is_complete: bool) -> None:
        """See ``driver.Manager``. The last block is used again first."""
        table = self.tables.pop(request)
        if self.profile.shares == "end" and is_complete:
            self._share(table, len(table.keys))
        self.pool.release(table.blocks[: table.count][::-1])

    def _extend(self, table: _Table, end: int) -> None:
        """Give ``table`` the blocks of its first ``end`` tokens; whole ones can be found from now on."""
        count = ceil_div(end, self.size)
        if count > table.count:
            table.blocks[table.count : count] = self.pool.take(count - table.count)
            table.count = count
        if self.profile.shares == "chunk":
            self._share(table, end // self.size)

    def _share(self, table: _Table, count: int) -> None:
        if count > table.shared:
            new = slice(table.shared, count)
            self.pool.share(table.blocks[new], table.keys[new])
            table.shared = count
