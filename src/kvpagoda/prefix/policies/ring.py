"""A circular queue whose hand can jump: S3-FIFO's main queue."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from kvpagoda.errors import CheckFailed

_STEP = 2**40  # between two places where there is room
_LEAST = 8  # bits of the smallest range of places that is spread anew


class Ring:
    """Keys in a circle with a hand. What is put in stands behind the hand: it is the last that the hand will come to.

        ... last put in │ hand │ next │ ...      a key keeps its place; the hand moves

    ``place`` grows along the circle but for one seam, so that two keys can be told apart in O(1) by which one the hand
    comes to first. Places are labels that are spread anew where they lie too close (Bender et al., "Two simplified
    algorithms for maintaining order in a list", ESA 2002): ``put`` is amortised O(log n), all else O(1).

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
        self.hand = -1  #: -1: the circle is empty
        self._round = 0  # how often the hand came over the seam

    def __len__(self) -> int:
        return len(self.place)

    def __contains__(self, key: int) -> bool:
        return key in self.place

    def __iter__(self) -> Iterator[int]:
        """All keys, from the hand on."""
        key = self.hand
        for _ in range(len(self)):
            yield key
            key = self.next[key]

    def order(self, key: int) -> tuple[int, int]:
        """Smaller for what the hand comes to first. It grows only when the hand goes past ``key``, or as ``put`` says."""
        place = self.place[key]
        return self._round + (place < self.place[self.hand]), place

    def put(self, key: int) -> list[int]:
        """Put ``key`` in behind the hand; returns other keys whose place changed."""
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
        """Take ``key`` out; if the hand is there it moves on."""
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
        """Let the hand go on to ``key``, past what lies between; all round if it is there."""
        self._round += self.place[key] <= self.place[self.hand]
        self.hand = key

    def check(self) -> None:
        """Prove that links and places agree. Raises CheckFailed. O(n)."""
        keys = list(self)
        places = [self.place[key] for key in keys]
        seams = sum(a >= b for a, b in pairwise(places))
        linked = all(self.next[self._before[key]] == key for key in keys)
        if len(set(keys)) != len(self.place) or seams > 1 or (seams and places[-1] >= places[0]) or not linked:
            raise CheckFailed(f"a circle of {len(keys)} keys with {seams} seams is broken")

    def _gap(self, key: int, after: int) -> int:
        gap = self.place[after] - self.place[key]
        return gap if gap > 0 else 32 * _STEP

    def _spread(self, key: int) -> list[int]:
        """Spread the keys around ``key`` over the smallest range of places that has room; returns those that moved."""
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
        for number, one in enumerate(moved):
            place[one] = low + (number << bits) // count
        return moved
