"""A random model of four layers over a ``KVCache``: full attention, a sliding window, a recurrent state, full attention.

Weights, arithmetic and what the cache keeps are float64, so that a prompt whose beginning is cached gives the numbers of
one that is computed, to some 1e-13, in whatever pieces and beside whatever others. Every number depends on all rows that
are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpagoda import Batch, Schema
from kvpagoda.schema import Attention, Layer, Recurrent
from kvpagoda.schema.fields import FULL, Growth, Rows

HIDDEN, HEADS, DIM, VOCAB = 24, 2, 8, 272
Array = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int32]
IMAGE = 258
"""The token that stands for a part of an image; 256 begins a text, 257 ends an answer, lower ones are characters."""
IMAGE_LENGTH = 8
"""Tokens of an image."""


@dataclass(frozen=True)
class Piece:
    """The new tokens of one row of a step. ``images``: the digest of each image -> where it begins. ``shift``: what is
    added to positions. ``hidden``: new tokens whose rows and states are not written."""

    tokens: Tokens
    adapter: str | None = None
    images: tuple[tuple[int, bytes], ...] = ()
    shift: int = 0
    hidden: range = range(0)
    narrower: int = 0
    """By how many tokens the window of this row is narrower, for its first new token."""


class HybridModel:
    """``layers``: of "full", "window" and "state". ``longest``: the most tokens of a text."""

    def __init__(
        self, seed: int = 0, layers: tuple[str, ...] = ("full", "window", "state", "full"), window: int = 40,
        longest: int = 512,
    ) -> None:  # fmt: skip
        kinds = {
            "full": Attention(HEADS, DIM, DIM, "float64", FULL),
            "window": Attention(HEADS, DIM, DIM, "float64", Growth(window=window)),
            "state": Recurrent((Rows("recurrent", (HEADS, DIM, DIM), "float64"),)),
        }
        self.kinds, self.window, self.longest = layers, window, longest
        made = tuple(Layer(i, kind, (kinds[kind],)) for i, kind in enumerate(layers))
        self.schema = Schema(made, "fake", longest, VOCAB)
        random = np.random.default_rng(seed)
        self.embedding, self.head = random.normal(size=(VOCAB, HIDDEN)), random.normal(size=(HIDDEN, VOCAB)) / 3
        self.positions, self.pictures = random.normal(size=(longest + 64, HIDDEN)), random.normal(size=(64, HIDDEN))
        self.inward = random.normal(size=(len(layers), HIDDEN, 3 * HEADS * DIM))
        self.outward = random.normal(size=(len(layers), HEADS * DIM, HIDDEN))
        self.powers = np.array([0.98, 0.9])[:, None] ** np.arange(
            longest + 65
        )  # what is left of a state after n tokens
        self._adapters: dict[str | None, Array] = {None: self.inward}

    def forward(self, batch: Batch, pieces: list[Piece]) -> list[Array]:
        """Write the rows and states of a step, and return the logits after the last token of each row, ``[VOCAB]``."""
        starts, positions = batch.qo_indptr.tolist(), batch.positions.numpy()
        views = [batch.layer(i) for i in range(len(self.kinds))]
        slots = [None if kind == "state" else view.slot_mapping.numpy() for kind, view in zip(self.kinds, views)]
        first, last, inside = batch.state_indices.tolist(), batch.state_writes.tolist(), batch.checkpoints
        stops = list(zip(inside.rows.tolist(), inside.tokens.tolist(), inside.places.tolist()))
        logits = []
        for row, piece in enumerate(pieces):
            begin, end = starts[row], starts[row + 1]
            at = positions[begin:end]
            written = np.ones(end - begin, bool)
            written[[i for i in piece.hidden if i < end - begin]] = False
            x, weights = self._embed(piece, at), self._weights(piece.adapter)
            for index, (kind, view) in enumerate(zip(self.kinds, views)):
                q, k, v = (_normed(x) @ weights[index]).reshape(-1, 3, HEADS, DIM).swapaxes(0, 1)
                if kind == "state":
                    pool = view["recurrent"].numpy()
                    out = self._recur(
                        q, k, v, written, pool, first[row], last[row][0],
                        [(token - begin, place) for which, token, place in stops if which == row],
                    )  # fmt: skip
                else:
                    table, length = view.block_table[row].numpy(), int(at[-1]) + 1
                    out = self._attend(q, k, v, written, view, slots[index][begin:end], table, length, at, piece)
                x = x / 2 + _normed(out @ self.outward[index])
            logits.append(_normed(x[-1]) @ self.head)
        return logits

    def _weights(self, adapter: str | None) -> Array:
        if adapter not in self._adapters:
            change = np.random.default_rng([*adapter.encode()]).normal(size=self.inward.shape)
            self._adapters[adapter] = self.inward + change / 2
        return self._adapters[adapter]

    def _embed(self, piece: Piece, at: Tokens) -> Array:
        x = self.embedding[piece.tokens] + self.positions[np.maximum(at + piece.shift, 0)]
        for offset, digest in piece.images:
            within = at - offset
            shown = (within >= 0) & (within < IMAGE_LENGTH)
            if shown.any():
                which = np.frombuffer(digest, np.uint8)[within[shown] % len(digest)] % 64
                x[shown] += 2 * self.pictures[which]
        return x

    def _attend(
        self, q: Array, k: Array, v: Array, written: Array, view: object, slots: Tokens, table: Tokens, length: int,
        at: Tokens, piece: Piece,
    ) -> Array:  # fmt: skip
        keys, values = (view[name].numpy() for name in ("k", "v"))
        size = keys.shape[1]
        for rows, new in ((keys, k), (values, v)):
            rows[slots[written] // size, slots[written] % size] = new[written]
        growth = view.layer.growth
        start = growth.first_needed(int(at[0])) // size * size  # what slid out of a window is not read
        blocks = table[start // size : -(-length // size)]
        keys, values = (rows[blocks].reshape(-1, HEADS, DIM)[: length - start] for rows in (keys, values))
        seen = growth.reads(at[:, None], np.arange(start, length))
        if growth.window is not None and piece.narrower:
            seen[0] &= np.arange(start, length) > at[0] - growth.window + piece.narrower
        scores = q.transpose(1, 0, 2) @ keys.transpose(1, 2, 0) / 40  # [heads, n, rows]
        scores[:, ~seen] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out = scores @ values.transpose(1, 0, 2) / scores.sum(-1, keepdims=True)
        return out.transpose(1, 0, 2).reshape(len(q), -1)

    def _recur(
        self, q: Array, k: Array, v: Array, written: Array, pool: Array, first: int, last: int,
        stops: list[tuple[int, int]],
    ) -> Array:  # fmt: skip
        """A state decays and takes ``k v^T`` in at every token: computed for all tokens of the piece at once."""
        before, n = pool[first, 0].copy(), len(q)
        q, k, v = (part.transpose(1, 0, 2) for part in (q, k * written[:, None, None] / 4, v))  # [heads, n, dim]
        ages = np.arange(n)[:, None] - np.arange(n)
        weight = self.powers[:, np.maximum(ages, 0)] * (ages >= 0)  # [heads, n, n]
        out = (q @ k.transpose(0, 2, 1) * weight) @ v + (q @ before) * self.powers[:, 1 : n + 1, None]
        for token, place in [*stops, (n - 1, last)]:
            taken = k[:, : token + 1] * weight[:, token, : token + 1, None]
            state = taken.transpose(0, 2, 1) @ v[:, : token + 1] + before * self.powers[:, token + 1, None, None]
            pool[place, 0] = state
        return out.transpose(1, 0, 2).reshape(n, -1)


def _normed(x: Array) -> Array:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) / x.shape[-1] + 1e-9)
