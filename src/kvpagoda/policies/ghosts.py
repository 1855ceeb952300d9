"""The identity of evicted blocks (ghosts) that an eviction policy still remembers."""

from __future__ import annotations

from collections.abc import Iterable

from kvpagoda.arrays import Ids


class GhostIndex:
    """Map of ghosts: (key of the block above, tokens of the block as bytes) -> key of the evicted block.

    Tokens are compared for equality; they are hashed only as the keys of a dictionary. A key keeps its meaning while
    the policy remembers it or a ghost lies below it, so that a whole path is recognised when it is cached again. All
    calls are amortised O(1) for each key.

    >>> ghosts = GhostIndex()
    >>> ghosts.add(-1, [4, 5], [b"first", b"second"])
    >>> ghosts.find(4, b"second"), ghosts.forget([4]), ghosts.forget([5])
    (5, [], [5, 4])
    """

    def __init__(self) -> None:
        self._keys: dict[tuple[int, bytes], int] = {}
        self._places: dict[int, tuple[int, bytes]] = {}
        self._num_below: dict[int, int] = {}  # key -> number of ghosts directly below it
        self._remembered: set[int] = set()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, above: int, block: bytes) -> int | None:
        """Return the key of the ghost ``block`` below the key ``above``, or None."""
        return self._keys.get((above, block))

    def add(self, above: int, keys: list[int], blocks: list[bytes]) -> None:
        """Add the evicted ``blocks``, a chain below the key ``above``. They are remembered until ``forget``."""
        for key, block in zip(keys, blocks):
            self._places[key] = place = above, block
            self._keys[place] = key
            self._num_below[above] = self._num_below.get(above, 0) + 1
            above = key
        self._remembered.update(keys)

    def discard(self, key: int) -> None:
        """Remove the ghost ``key``: its block is cached again."""
        self._remembered.discard(key)
        self._drop(key)

    def proven(self, keys: Ids | list[int]) -> list[int]:
        """Return ``keys`` as a list. Raises ValueError if one of them is not remembered, or is named twice."""
        numbers: list[int] = keys if isinstance(keys, list) else keys.tolist()
        if len(set(numbers)) < len(numbers) or not self._remembered.issuperset(numbers):
            raise ValueError(f"remove() returned {keys!r}; among these are keys of no evicted block, or one key twice")
        return numbers

    def clear(self) -> list[int]:
        """Remove all ghosts; return their keys."""
        keys = list(self._places)
        for memory in (self._places, self._keys, self._num_below, self._remembered):
            memory.clear()
        return keys

    def forget(self, keys: Iterable[int]) -> list[int]:
        """Stop remembering ``keys``; return those of them, and of the keys above them, that have lost their meaning."""
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
