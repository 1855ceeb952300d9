"""Consecutive blocks: their tokens, and their ids in every group."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from kvpagoda.blocks.ids import Ids

_FEW = 4  # blocks that are copied rather than left in a text: fewer arrays to keep and to free
_SMALL, _SPARE = 64, 16  # arrays of at most so many blocks, or of so many times what is left, are not cut down


class EdgeArrays:
    """The arrays of an edge: they grow and shrink at the end and split anywhere.

    ``tokens`` int32 ``[num_blocks * block_size]`` tokens, ``ids`` int32 ``[rows, num_blocks]``: views, valid until the edge
    changes. The arrays behind them belong to this edge alone, unless the tokens are read-only, and lie in a text:

        | not ours any more | at  num_blocks blocks  | room to grow |
    """

    __slots__ = ("_at", "_ids", "_tokens", "block_size", "ids", "num_blocks", "tokens")
    _at: int
    _tokens: Ids
    _ids: Ids
    tokens: Ids
    ids: Ids
    num_blocks: int

    def __init__(self, block_size: int, tokens: Ids, ids: Ids) -> None:
        """Takes the arrays over."""
        self.block_size = block_size
        self._adopt(tokens, ids)

    def block(self, i: int) -> bytes:
        """The tokens of block ``i`` as bytes."""
        return self.tokens[i * self.block_size : (i + 1) * self.block_size].tobytes()

    def make_room(self, n: int) -> None:
        """See to it that ``append`` can take ``n`` blocks; may copy what is here, and changes nothing else."""
        new = self.num_blocks + n
        if self._at + new > self._ids.shape[1] or not self._tokens.flags.writeable:
            self._move(max(new + new // 4, 8))

    def append(self, tokens: Ids, ids: Ids, text: Ids | None = None) -> None:
        """Add blocks at the end; copies them, but for tokens of the ``text`` that they lie in. Amortised O(blocks added).

        It may raise where ``make_room`` was not called, and nothing has changed then.
        """
        new, size = self.num_blocks + ids.shape[1], self.block_size
        is_there = text is not None and self._tokens.base is text
        if self._at + new > self._ids.shape[1] or not (is_there or self._tokens.flags.writeable):
            self._move(max(new + new // 4, 8))
            is_there = False
        first, end = self._at + self.num_blocks, self._at + new
        if not is_there:
            self._tokens[first * size : end * size] = tokens
        self._ids[:, first:end] = ids
        self._view(self._at, new)

    def has_room(self, n: int, text: Ids | None) -> bool:
        """Whether to append ``n`` blocks costs little: there is room, or little to copy for more."""
        if self.num_blocks <= _SMALL:
            return True
        room = self._ids.shape[1] - self._at - self.num_blocks
        return bool(n <= room and (self._tokens.flags.writeable or self._tokens.base is text))

    def cut(self, num_blocks: int) -> None:
        """Drop all but the first ``num_blocks`` blocks. Amortised O(1) for each block dropped."""
        self._view(self._at, num_blocks)
        self.trim()

    def trim(self) -> None:
        """Let go of arrays that are much larger than what is here."""
        if self._ids.shape[1] > max(_SMALL, _SPARE * self.num_blocks):
            with suppress(MemoryError):  # then it keeps what it has
                self._move(2 * self.num_blocks)

    def take_front(self, num_blocks: int) -> tuple[Ids, Ids]:
        """Move the first ``num_blocks`` blocks out: their tokens and ids, the caller's. O(smaller part)."""
        size, count = self.block_size, self.num_blocks
        front = self.tokens[: num_blocks * size], self.ids[:, :num_blocks]
        if 2 * num_blocks > count:  # the front keeps the arrays
            self._adopt(self.tokens[num_blocks * size :].copy(), self.ids[:, num_blocks:].copy())
            return front
        copies = front[0].copy(), front[1].copy()
        self._view(self._at + num_blocks, count - num_blocks)
        return copies

    def put_front(self, other: EdgeArrays) -> None:
        """Take the blocks of ``other``, which is not used any more, in before the first one.

        Amortised O(these blocks) if there are fewer of these than of the others, else O(both).
        """
        if other.num_blocks > self.num_blocks:
            other.append(self.tokens, self.ids)
            self._tokens, self._ids = other._tokens, other._ids
            self._view(other._at, other.num_blocks)
            return
        self._adopt(np.concatenate((other.tokens, self.tokens)), np.concatenate((other.ids, self.ids), axis=1))

    def _adopt(self, tokens: Ids, ids: Ids) -> None:
        self._tokens = self.tokens = tokens
        self._ids = self.ids = ids
        self._at, self.num_blocks = 0, ids.shape[1]

    def _view(self, at: int, num_blocks: int) -> None:
        size, end = self.block_size, at + num_blocks
        self._at, self.num_blocks = at, num_blocks
        self.tokens, self.ids = self._tokens[at * size : end * size], self._ids[:, at:end]

    def _move(self, room: int) -> None:
        """Into new arrays of ``room`` blocks."""
        count, size = self.num_blocks, self.block_size
        tokens, ids = np.empty(room * size, np.int32), np.empty((len(self._ids), room), np.int32)
        tokens[: count * size], ids[:, :count] = self.tokens, self.ids
        self._tokens, self._ids = tokens, ids
        self._view(0, count)


def arrays_of(tokens: Ids, ids: Ids, text: Ids | None, first: int) -> tuple[Ids, Ids]:
    """Arrays for an edge that begins with ``tokens``, which ``text`` has from ``first`` on, and ``ids``. If there are many,
    the rest of the text, read-only, if that is most of it: then there is room to go on with it. Else copies; with room if
    most of the rest is still to come."""
    rows, n = ids.shape
    rest = tokens if text is None or n <= _FEW else text[first:]
    if text is not None and rest is not tokens and 2 * len(rest) >= len(text):
        rest.flags.writeable = False
    elif 2 * len(tokens) >= len(rest):
        return tokens.copy(), ids.copy()
    else:
        rest = np.empty(len(rest), np.int32)
        rest[: len(tokens)] = tokens
    room = np.empty((rows, len(rest) * n // len(tokens)), np.int32)
    room[:, :n] = ids
    return rest, room
