"""The arrays of one edge: the tokens of consecutive blocks, and their ids in every group."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from kvpagoda.blocks.ids import Ids

_FEW = 4  # up to so many blocks are copied instead of kept as a view of the text: cheaper to keep and to free
_SMALL, _SPARE = 64, 16  # arrays of up to 64 blocks, or of up to 16 times the blocks in use, are not shrunk


class EdgeArrays:
    """The arrays of an edge. They grow and shrink at the end, and split anywhere.

    ``tokens``: int32 ``[num_blocks * block_size]``. ``ids``: int32 ``[rows, num_blocks]``. Both are views, valid until
    the edge changes. The arrays behind them belong to this edge alone, except read-only tokens, which are a view of a
    text:

        | split off | num_blocks blocks, from _at on | room to grow |
    """

    __slots__ = ("_at", "_ids", "_tokens", "block_size", "ids", "num_blocks", "tokens")
    _at: int
    _tokens: Ids
    _ids: Ids
    tokens: Ids
    ids: Ids
    num_blocks: int

    def __init__(self, block_size: int, tokens: Ids, ids: Ids) -> None:
        """Take over the arrays ``tokens`` and ``ids``."""
        self.block_size = block_size
        self._adopt(tokens, ids)

    def block(self, i: int) -> bytes:
        """Return the tokens of block ``i`` as bytes."""
        return self.tokens[i * self.block_size : (i + 1) * self.block_size].tobytes()

    def make_room(self, n: int) -> None:
        """Make sure that ``append`` of ``n`` blocks needs no memory; may copy the arrays, and changes nothing else."""
        new = self.num_blocks + n
        if self._at + new > self._ids.shape[1] or not self._tokens.flags.writeable:
            self._move(max(new + new // 4, 8))

    def append(self, tokens: Ids, ids: Ids, text: Ids | None = None) -> None:
        """Append blocks. Copies them, except tokens that lie in ``text`` already. Amortised O(blocks added).

        May raise if ``make_room`` was not called before; nothing has changed then.
        """
        new, size = self.num_blocks + ids.shape[1], self.block_size
        is_view = text is not None and self._tokens.base is text
        if self._at + new > self._ids.shape[1] or not (is_view or self._tokens.flags.writeable):
            self._move(max(new + new // 4, 8))
            is_view = False
        first, end = self._at + self.num_blocks, self._at + new
        if not is_view:
            self._tokens[first * size : end * size] = tokens
        self._ids[:, first:end] = ids
        self.num_blocks = new
        self.tokens, self.ids = self._tokens[self._at * size : end * size], self._ids[:, self._at : end]

    def has_room(self, n: int, text: Ids | None) -> bool:
        """Return whether appending ``n`` blocks is cheap: there is room, or the blocks to copy are few."""
        if self.num_blocks <= _SMALL:
            return True
        room = self._ids.shape[1] - self._at - self.num_blocks
        return bool(n <= room and (self._tokens.flags.writeable or self._tokens.base is text))

    def cut(self, num_blocks: int) -> None:
        """Remove all but the first ``num_blocks`` blocks. Amortised O(1) for each block removed."""
        self._view(self._at, num_blocks)
        self.trim()

    def trim(self) -> None:
        """Replace arrays that are much larger than the blocks in use by smaller ones."""
        if self._ids.shape[1] > max(_SMALL, _SPARE * self.num_blocks):
            with suppress(MemoryError):  # without memory the large arrays stay
                self._move(2 * self.num_blocks)

    def take_front(self, num_blocks: int) -> tuple[Ids, Ids]:
        """Remove the first ``num_blocks`` blocks; return their tokens and ids, owned by the caller. O(smaller part)."""
        size, count = self.block_size, self.num_blocks
        front = self.tokens[: num_blocks * size], self.ids[:, :num_blocks]
        if 2 * num_blocks > count:  # the front keeps the arrays
            self._adopt(self.tokens[num_blocks * size :].copy(), self.ids[:, num_blocks:].copy())
            return front
        copies = front[0].copy(), front[1].copy()
        self._view(self._at + num_blocks, count - num_blocks)
        return copies

    def put_front(self, other: EdgeArrays) -> None:
        """Insert the blocks of ``other``, which is not used any more, before the first block of this edge.

        Amortised O(blocks of this edge) if ``other`` has more blocks, else O(both).
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
        """Copy the blocks into new arrays with room for ``room`` blocks."""
        count, size = self.num_blocks, self.block_size
        tokens, ids = np.empty(room * size, np.int32), np.empty((len(self._ids), room), np.int32)
        tokens[: count * size], ids[:, :count] = self.tokens, self.ids
        self._tokens, self._ids = tokens, ids
        self._view(0, count)


def arrays_of(tokens: Ids, ids: Ids, text: Ids | None, first: int) -> tuple[Ids, Ids]:
    """Return arrays (tokens, ids) for a new edge that begins with ``tokens`` and ``ids``.

    ``text`` contains ``tokens`` from ``first`` on. If the blocks are many and most of the text follows ``first``, the
    token array is a read-only view of the rest of the text, so there is room to grow. Otherwise both are copies; the
    copies have room for the rest of the text if most of it is still to come.
    """
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
