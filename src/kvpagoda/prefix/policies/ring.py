"""A circular queue whose hand can jump: the main queue of S3-FIFO."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from kvpagoda.errors import CheckFailed

_STEP = 2**40  # distance of two labels where there is room
_LEAST = 8  # the smallest range of labels that is spread anew, in bits


class Ring:
    """Keys in a circle with a hand. ``put`` inserts a key right behind the hand, so the hand reaches it last.

        ... last put in │ hand │ next │ ...      a key keeps its place; the hand moves

    ``place``: key -> label. Labels grow along the circle except at one seam, so for two keys it is known in O(1) which
    one the hand reaches first. Labels that are too close together are spread anew (Bender et al., "Two simplified
    algorithms for maintaining order in a list", ESA 2002): ``put`` is amortised O(log n), everything else O(1).

    >>> ring = Ring()
    >>> for key in (5, 6, 7): moved = ring.put(key)
    >>> ring.hand, list(ring)
    (5, [5, 6, 7])
    >>> ring.move_hand(6)
    >>> moved = ring.put(8)
    >>> list(ring)
    [6, 7, 5, 8]
    """

    def __init__(self) -> None:
        self.place: dict[int, int] = {}
        self.next: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self.hand = -1  #: the key at the hand; -1: the circle is empty
        self._round = 0  # how often the hand has crossed the seam

    def __len__(self) -> int:
        return len(self.place)

    def __contains__(self, key: int) -> bool:
        return key in self.place

    def __iter__(self) -> Iterator[int]:
        """Yield all keys, starting at the hand."""
        key = self.hand
        for _ in range(len(self)):
            yield key
            key = self.next[key]

    def order(self, key: int) -> tuple[int, int]:
        """Return the order of ``key``: smaller for keys that the hand reaches earlier.

        It grows only when the hand moves past ``key``, or when ``put`` returns the key.
        """
        place = self.place[key]
        return self._round + (place < self.place[self.hand]), place

    def put(self, key: int) -> list[int]:
        """Insert ``key`` behind the hand; return the other keys whose labels changed."""
        moved: list[int] = []
        if self.hand < 0:
            self.hand = self.next[key] = self._before[key] = key
            self.place[key] = 0
            return moved
        hand, last = self.hand, self._before[self.hand]
        step = self._gap(last, hand)
        if step < 2:
            moved = self._spread(last)
            step = self._gap(last, hand)
        self.place[key] = self.place[last] + max(1, step >> 5)
        self._before[key], self.next[key] = last, hand
        self.next[last] = self._before[hand] = key
        return moved

    def take(self, key: int) -> None:
        """Remove ``key``; if the hand is at it, the hand moves on."""
        before, after = self._before.pop(key), self.next.pop(key)
        if after == key:
            self.hand = -1
        else:
            if key == self.hand:
                self._round += self.place[after] < self.place[key]
                self.hand = after
            self.next[before], self._before[after] = after, before
        del self.place[key]

    def move_hand(self, key: int) -> None:
        """Move the hand on to ``key``, past the keys between; once round the circle if it is there already."""
        self._round += self.place[key] <= self.place[self.hand]
        self.hand = key

    def check(self) -> None:
        """Prove that links and labels agree. Raises CheckFailed. O(n)."""
        keys = list(self)
        places = [self.place[key] for key in keys]
        seams = sum(a >= b for a, b in pairwise(places))
        linked = all(self.next[self._before[key]] == key for key in keys)
        if len(set(keys)) != len(self.place) or seams > 1 or (seams and places[-1] >= places[0]) or not linked:
            raise CheckFailed(f"a circle of {len(keys)} keys with {seams} seams is broken")

    def _gap(self, key: int, after: int) -> int:
        """Return the distance of the labels of ``key`` and ``after``, the next key; a large number across the seam."""
        gap = self.place[after] - self.place[key]
        return gap if gap > 0 else 32 * _STEP

    def _spread(self, key: int) -> list[int]:
        """Spread the keys around ``key`` over the smallest range of labels with room; return the keys that moved."""
        place, first, last, count = self.place, key, key, 1
        for bits in range(_LEAST, 1 << 30):
            low = place[key] >> bits << bits
            high = low + (1 << bits)
            while low <= place[self._before[first]] < place[first]:
                first, count = self._before[first], count + 1
            while place[last] < place[self.next[last]] < high:
                last, count = self.next[last], count + 1
            if count <= 1.5**bits:
                break
        moved = [first]
        while moved[-1] != last:
            moved.append(self.next[moved[-1]])
        for number, moved_key in enumerate(moved):
            place[moved_key] = low + (number << bits) // count
        return moved
