"""The children of a node, found by their first block or by the longest common prefix with a block."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, Generic, TypeVar

Child = TypeVar("Child")
_LONGEST = 512
_TOKEN = 4  # bytes
_NONE: list[Any] = []  # shared by all instances that have none, to save memory
_NO_HEADS: set[bytes] = set()


class Children(dict[bytes, Child], Generic[Child]):
    """Children by the bytes of their first block. Write with ``put`` and ``take`` only.

    ``nearest`` builds indexes when it is first needed: a set of the first tokens of all keys at its first call, and the
    sorted keys, in pieces of at most 512, at the first call that finds its token in the set. Each call of ``nearest``
    then brings the pieces up to date: it sorts keys in that were put since, in O(log n + 512), and deletes keys that it
    passes and that were taken out. All indexes are dropped when more keys were taken out than are left.
    """

    __slots__ = ("_fresh", "_heads", "_num_taken", "_pieces", "_starts")

    def __init__(self) -> None:
        self._pieces: list[list[bytes]] = _NONE
        self._starts: list[bytes] = _NONE  # lower bounds of the pieces; the first one is never read
        self._fresh: list[bytes] = _NONE  # keys that are not in the pieces yet
        self._heads = _NO_HEADS  # the first token of every key
        self._num_taken = 0  # keys taken out since the indexes were built

    def put(self, key: bytes, child: Child) -> None:
        """Add ``child``, or replace the child of the same key by it."""
        if self._heads:
            self._heads.add(key[:_TOKEN])
            if self._pieces and key not in self:
                self._fresh.append(key)
        self[key] = child

    def take(self, key: bytes) -> None:
        """Remove the child of ``key``. Amortised O(1)."""
        del self[key]
        if len(self) == 1:  # iterating over a dictionary that was large is slow, unless it is rebuilt
            last_key, last_child = self.popitem()
            self.clear()
            self[last_key] = last_child
        if self._heads:
            self._num_taken += 1
            if self._num_taken > len(self) + _LONGEST:
                self._heads, self._pieces, self._fresh, self._num_taken = _NO_HEADS, _NONE, _NONE, 0

    def nearest(self, key: bytes) -> list[Child]:
        """Return at most two children; one of them has the longest common prefix of tokens with ``key``.

        Amortised O(log n), and O(1) if no child has the first token of ``key``.
        """
        if not self._heads:
            self._heads = {child_key[:_TOKEN] for child_key in self}
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
        neighbours = (self._next(key, -1), self._next(key, 1))
        return [self[neighbour] for neighbour in neighbours if neighbour is not None]

    def _sort_in(self, key: bytes) -> None:
        """Insert ``key`` into its piece; split the piece if it becomes too long."""
        number = self._piece(key)
        piece = self._pieces[number]
        position = bisect_left(piece, key)
        if position == len(piece) or piece[position] != key:
            piece.insert(position, key)
            if len(piece) > _LONGEST:
                self._pieces[number : number + 1] = [piece[: _LONGEST // 2], piece[_LONGEST // 2 :]]
                self._starts.insert(number + 1, piece[_LONGEST // 2])

    def _next(self, key: bytes, step: int) -> bytes | None:
        """Return the greatest key below ``key`` (step -1) or the smallest that is at least ``key`` (step 1), or None.

        Deletes the keys on the way that were taken out.
        """
        number = self._piece(key)
        position = bisect_left(self._pieces[number], key)
        while True:
            piece = self._pieces[number]
            while True:
                candidate = position - 1 if step < 0 else position
                if not 0 <= candidate < len(piece):
                    break
                if piece[candidate] in self:
                    return piece[candidate]
                del piece[candidate]
                position = candidate
            if not piece and len(self._pieces) > 1:
                del self._pieces[number], self._starts[number]
                number -= step > 0
            number += step
            if not 0 <= number < len(self._pieces):
                return None
            position = 0 if step > 0 else len(self._pieces[number])

    def _piece(self, key: bytes) -> int:
        """Return the number of the piece that ``key`` belongs to."""
        return max(0, bisect_right(self._starts, key) - 1)
