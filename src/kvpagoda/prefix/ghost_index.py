"""The identity of blocks that were evicted but are still remembered by the eviction policy."""

from __future__ import annotations

from collections.abc import Iterable


class GhostIndex:
    """Which evicted block had which key: (key of the block above, its tokens as bytes) -> key. No token is hashed
    beyond what a dictionary does to its keys, and equality is that of the tokens.

    A key keeps its meaning while the policy remembers it or while a ghost lies below it, so that a whole path is known
    again when it comes back. All calls are amortised O(1) for each key.

    >>> ghosts = GhostIndex()
    >>> ghosts.add(-1, [4, 5], [b"first", b"second"])
    >>> ghosts.find(4, b"second"), ghosts.forget([4]), ghosts.forget([5])
    (5, [], [5, 4])
    """

    def __init__(self) -> None:
        self._keys: dict[tuple[int, bytes], int] = {}
        self._places: dict[int, tuple[int, bytes]] = {}
        self._num_below: dict[int, int] = {}  # ghosts right below a key
        self._remembered: set[int] = set()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, above: int, block: bytes) -> int | None:
        """The key that ``block`` had below the key ``above``."""
        return self._keys.get((above, block))

    def add(self, above: int, keys: list[int], blocks: list[bytes]) -> None:
        """``blocks``, one below the other from the key ``above`` on, were evicted; remembered until ``forget``."""
        for key, block in zip(keys, blocks):
            self._places[key] = place = above, block
            self._keys[place] = key
            self._num_below[above] = self._num_below.get(above, 0) + 1
            above = key
        self._remembered.update(keys)

    def discard(self, key: int) -> None:
        """The block of ``key`` is cached again."""
        self._remembered.discard(key)
        self._drop(key)

    def forget(self, keys: Iterable[int]) -> list[int]:
        """The policy remembers ``keys`` no more; returns those, and keys above them, that mean nothing any more."""
        meaningless = []
        for key in keys:
            self._remembered.discard(key)
            while key in self._places and key not in self._remembered and key not in self._num_below:
                meaningless.append(key)
                key = self._drop(key)
        return meaningless

    def _drop(self, key: int) -> int:
        above, block = self._places.pop(key)
        del self._keys[above, block]
        self._num_below[above] -= 1
        if not self._num_below[above]:
            del self._num_below[above]
        return above
