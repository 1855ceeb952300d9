"""The ghosts of ARC: evicted blocks that it remembers."""

from __future__ import annotations

from collections import OrderedDict

from kvpagoda.errors import BadInput

Queue = OrderedDict[int, None]


def sized(num_blocks: int) -> int:
    """Return ``num_blocks``, if it is a valid cache capacity. Raises BadInput."""
    if num_blocks < 1:
        raise BadInput(f"this policy needs the number of blocks that the cache holds, at least 1, got {num_blocks}")
    return num_blocks


class Ghosts:
    """Evicted blocks, by whether they were used once or again, and the share of the cache for blocks used once."""

    def __init__(self, capacity: int) -> None:
        self._capacity = sized(capacity)
        self.share = 0
        self.once: Queue = OrderedDict()
        self.again: Queue = OrderedDict()

    def recall(self, key: int) -> bool:
        """Remove the ghost ``key``, which is cached again, and adapt the share. Return False if it is no ghost."""
        once, again = len(self.once), len(self.again)
        if key in self.once:
            self.share = min(self._capacity, self.share + max(1, again // once))
            del self.once[key]
        elif key in self.again:
            self.share = max(0, self.share - max(1, once // again))
            del self.again[key]
        else:
            return False
        return True

    def trim(self, num_once: int) -> list[int]:
        """Forget the oldest ghosts beyond ARC's limits, given ``num_once`` cached blocks used once; return them."""
        forgotten = []
        while len(self.once) > max(0, self._capacity - num_once):
            forgotten.append(self.once.popitem(last=False)[0])
        while len(self.once) + len(self.again) > self._capacity:
            forgotten.append((self.again or self.once).popitem(last=False)[0])
        return forgotten
