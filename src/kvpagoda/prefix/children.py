"""What branches off a place in the tree."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, Generic, TypeVar

Child = TypeVar("Child")
_LONGEST = 512
_TOKEN = 4  # bytes
_NONE: list[Any] = []  # shared by all that have none: a node is cheaper without
_NO_HEADS: set[bytes] = set()


class Children(dict[bytes, Child], Generic[Child]):
    """Children by the bytes of their first block. Written with ``put`` and ``take`` alone.

    From the first call of ``nearest`` on the first tokens are kept as a set, and from the first one that finds its token
    there the keys also sorted, in pieces of at most 512. What was put in since is sorted in, in O(log n + 512), and what was
    taken out is cleared away, when ``nearest`` comes by; all of it goes when more was taken out than there is.
    """

    __slots__ = ("_fresh", "_heads", "_num_taken", "_pieces", "_starts")

    def __init__(self) -> None:
        self._pieces: list[list[bytes]] = _NONE
        self._starts: list[bytes] = _NONE  # lower bounds of the pieces; the first one is never looked at
        self._fresh: list[bytes] = _NONE  # that are not in the pieces yet
        self._heads = _NO_HEADS
        self._num_taken = 0  # since these were made

    def put(self, key: bytes, child: Child) -> None:
        """Add ``child``, or let it replace the one of that key."""
        if self._heads:
            self._heads.add(key[:_TOKEN])
            if self._pieces and key not in self:
                self._fresh.append(key)
        self[key] = child

    def take(self, key: bytes) -> None:
        """Take out the child of ``key``. Amortised O(1)."""
        del self[key]
        if len(self) == 1:  # a dictionary that was large is slow to find its only entry, unless it starts afresh
            only = self.popitem()
            self.clear()
            self[only[0]] = only[1]
        if self._heads:
            self._num_taken += 1
            if self._num_taken > len(self) + _LONGEST:
                self._heads, self._pieces, self._fresh, self._num_taken = _NO_HEADS, _NONE, _NONE, 0

    def nearest(self, key: bytes) -> list[Child]:
        """At most two children; none has more first tokens in common with ``key`` than the better of them. Amortised
        O(log n), and O(1) where none has its first token."""
        if not self._heads:
            self._heads = {one[:_TOKEN] for one in self}
        if key[:_TOKEN] not in self._heads:
            return _NONE
        if not self._pieces:
            if len(self) <= 1:
                return list(self.values())
            keys = sorted(self)
            self._pieces = [keys[i : i + _LONGEST] for i in range(0, len(keys), _LONGEST)]
            self._starts, self._fresh = [piece[0] for piece in self._pieces], []
        while self._fresh:
            self._sort_in(self._fresh.pop())
        found = (self._next(key, -1), self._next(key, 1))
        return [self[one] for one in found if one is not None]

    def _sort_in(self, key: bytes) -> None:
        at = self._piece(key)
        piece = self._pieces[at]
        place = bisect_left(piece, key)
        if place == len(piece) or piece[place] != key:
            piece.insert(place, key)
            if len(piece) > _LONGEST:
                self._pieces[at : at + 1] = [piece[: _LONGEST // 2], piece[_LONGEST // 2 :]]
                self._starts.insert(at + 1, piece[_LONGEST // 2])

    def _next(self, key: bytes, step: int) -> bytes | None:
        """The greatest key below ``key`` (step -1) or the smallest of at least ``key`` (1); clears away what is stale on
        the way."""
        at = self._piece(key)
        place = bisect_left(self._pieces[at], key)
        while True:
            piece = self._pieces[at]
            while True:
                at_key = place - 1 if step < 0 else place
                if not 0 <= at_key < len(piece):
                    break
                if piece[at_key] in self:
                    return piece[at_key]
                del piece[at_key]
                place = at_key
            if not piece and len(self._pieces) > 1:
                del self._pieces[at], self._starts[at]
                at -= step > 0
            at += step
            if not 0 <= at < len(self._pieces):
                return None
            place = 0 if step > 0 else len(self._pieces[at])

    def _piece(self, key: bytes) -> int:
        return max(0, bisect_right(self._starts, key) - 1)
