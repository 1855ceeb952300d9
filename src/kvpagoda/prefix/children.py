"""What branches off a place in the tree."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Any, Generic, TypeVar

Child = TypeVar("Child")
_LONGEST = 512
_NONE: list[Any] = []  # shared by all that have none: a node is cheaper without


class Children(dict[bytes, Child], Generic[Child]):
    """Children by the bytes of their first block. Written with ``put`` and ``take`` alone.

    The keys are also kept sorted, in pieces of at most 512, from the first call of ``nearest`` on; ``put`` and ``take``
    then cost O(log n + 512) instead of O(1).
    """

    __slots__ = ("_pieces", "_starts")

    def __init__(self) -> None:
        self._pieces: list[list[bytes]] = _NONE
        self._starts: list[bytes] = _NONE  # lower bounds of the pieces; the first one is never looked at

    def put(self, key: bytes, child: Child) -> None:
        """Add ``child``, or let it replace the one of that key."""
        if self._pieces and key not in self:
            at = self._piece(key)
            piece = self._pieces[at]
            insort(piece, key)
            if len(piece) > _LONGEST:
                self._pieces[at : at + 1] = [piece[: _LONGEST // 2], piece[_LONGEST // 2 :]]
                self._starts.insert(at + 1, piece[_LONGEST // 2])
        self[key] = child

    def take(self, key: bytes) -> None:
        """Take out the child of ``key``."""
        del self[key]
        if len(self) == 1:  # a dictionary that was large is slow to find its only entry, unless it starts afresh
            only = self.popitem()
            self.clear()
            self[only[0]] = only[1]
        if self._pieces:
            at = self._piece(key)
            piece = self._pieces[at]
            del piece[bisect_left(piece, key)]
            if not piece:
                del self._pieces[at], self._starts[at]

    def nearest(self, key: bytes) -> list[Child]:
        """At most two children; none has a longer prefix in common with ``key`` than the better of them. O(log n)."""
        if not self._pieces:
            if len(self) <= 1:
                return list(self.values())
            keys = sorted(self)
            self._pieces = [keys[i : i + _LONGEST] for i in range(0, len(keys), _LONGEST)]
            self._starts = [piece[0] for piece in self._pieces]
        at = self._piece(key)
        piece = self._pieces[at]
        place = bisect_left(piece, key)
        before, after = piece[place - 1 : place] if place else [], piece[place : place + 1]
        if not before and at:
            before = self._pieces[at - 1][-1:]
        if not after and at + 1 < len(self._pieces):
            after = self._pieces[at + 1][:1]
        return [self[one] for one in (*before, *after)]

    def _piece(self, key: bytes) -> int:
        return max(0, bisect_right(self._starts, key) - 1)
