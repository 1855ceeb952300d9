"""What every row of a cache must hold: a function of the text up to its token, of the layer and of the field.

``RowOracle.step`` stands for the model: it compares all rows that attention of a step would read, and the states, with
what they must hold. Then it writes the rows of the step's own tokens. Rows are compared as bytes, whatever their dtype.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import kvpagoda

MOST_TOKENS = 4096
_WEIGHTS = np.random.default_rng(0).integers(1, 2**63, MOST_TOKENS, np.uint64) | np.uint64(1)
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass
class Text:
    """The tokens of one request, and the text that its states were written for."""

    space: str
    tokens: list[int]
    state: np.uint64 | None = None
    """The fingerprint of the text for which the states were written last; None if nothing was written to them."""

    def fingerprints(self, length: int) -> np.ndarray[Any, Any]:
        """Return one number for each prefix of the first ``length`` tokens, uint64 ``[length]``."""
        tokens = np.array(self.tokens[:length], np.uint64) + np.uint64(1)
        with np.errstate(over="ignore"):
            sums = np.cumsum(tokens * _WEIGHTS[:length]) + np.uint64(sum(self.space.encode()))
            sums ^= sums >> np.uint64(29)
            return sums * _MIX


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a view of the same memory as uint8 ``[records, rows, .., bytes]``."""
    return tensor.unsqueeze(-1).view(torch.uint8).numpy()


def _pattern(prints: np.ndarray[Any, Any], salt: int, nbytes: int) -> np.ndarray[Any, Any]:
    """Return ``nbytes`` bytes for each fingerprint, which differ for each ``salt``: uint8 ``[n, nbytes]``."""
    with np.errstate(over="ignore"):
        mixed = (prints + np.uint64(salt)) * _MIX
    mixed ^= mixed >> np.uint64(31)
    repeats = -(-nbytes // 8)
    return np.tile(mixed[:, None].view(np.uint8), (1, repeats))[:, :nbytes]


def _rounded(prints: np.ndarray[Any, Any], salt: int, nbytes: int) -> np.ndarray[Any, Any]:
    """Return ``nbytes`` bytes for each fingerprint: a float32 number again and again that checkpoints in fewer bytes keep as
    it is, 127 times a power of two."""
    power = _pattern(prints, salt, 1)[:, 0].astype(np.int32) % 128 - 32
    return np.tile(np.ldexp(np.float32(127), power)[:, None].view(np.uint8), (1, nbytes // 4))


class RowOracle:
    """Reads and writes the rows of one ``cache`` on the CPU."""

    def __init__(self, cache: kvpagoda.KVCache) -> None:
        self._cache = cache
        self._is_rounded = cache.plan.checkpoint_format is not None
        self._views: dict[tuple[int, str], tuple[np.ndarray[Any, Any], int]] = {}
        self.num_compared = 0

    def step(self, batch: kvpagoda.Batch, texts: Many[Text], before: Many[int], counts: Many[int]) -> None:
        """Compare and write the rows of ``batch``, which computes tokens ``before[i] .. before[i] + counts[i] - 1`` of
        ``texts[i]``. Raises AssertionError for a wrong row."""
        ends = [start + count for start, count in zip(before, counts)]
        prints = [text.fingerprints(end) for text, end in zip(texts, ends)]
        salt = 0
        for layer in self._cache.schema.layers:
            if layer.owner != layer.index:
                continue
            view = batch.layer(layer.index)
            if layer.growth is not None:
                self._slot_mapping(view, before, counts)
            for field in (field for rows in layer.block_rows() for field in rows.fields(1)):
                salt += 1
                for i in range(len(texts)):
                    self._block_field(view, layer, field.name, i, prints[i], before[i], salt)
            for rows in layer.state_rows():
                salt += 1
                self._states_left(view, layer.index, rows, batch, prints, salt)
                for i, text in enumerate(texts):
                    if view.state_writes.shape[1] > 1:
                        self._states_in_turn(view, layer.index, rows, i, prints[i], before[i], salt)
                    else:
                        self._state_field(view, layer.index, rows, i, text.state, prints[i][-1], salt)
        for text, end in zip(texts, prints):
            text.state = end[-1]

    def blank(self, batch: kvpagoda.Batch, index: int) -> None:
        """Fill the states of layer ``index`` with which the rows of ``batch`` begin, as those of an empty text."""
        view = batch.layer(index)
        for rows in self._cache.schema.layers[index].state_rows():
            view[rows.name][view.state_indices.long()] = rows.fill

    def write_optional(self, batch: kvpagoda.Batch, text: Text, first: int, end: int) -> None:
        """Write the rows of tokens ``first .. end - 1`` of ``text``, which ``batch`` is of, in all optional groups."""
        prints, salt, size, rows = text.fingerprints(end), 0, self._cache.block_size, np.arange(first, end)
        for layer in self._cache.schema.layers:
            if layer.owner != layer.index:
                continue
            for field in layer.block_rows():
                salt += 1
                if layer.growth is not None and layer.growth.is_optional:
                    view = batch.layer(layer.index)
                    memory, nbytes = self._view(view, layer.index, field.name)
                    blocks = view.block_table[0].numpy()[rows // size]
                    memory[blocks, rows % size] = _pattern(prints[rows], salt, nbytes).reshape(-1, *memory.shape[2:])
            salt += len(layer.state_rows())

    def _view(self, view: Any, index: int, name: str) -> tuple[np.ndarray[Any, Any], int]:
        known = self._views.get((index, name))
        if known is None:
            found = _bytes_of(view[name])
            known = self._views[index, name] = found, int(np.prod(found.shape[2:]))
        return known

    def _block_field(
        self, view: Any, layer: Any, name: str, i: int, prints: np.ndarray[Any, Any], before: int, salt: int
    ) -> None:
        """Compare the rows of one field that request ``i`` reads, then write those of its new tokens."""
        memory, nbytes = self._view(view, layer.index, name)
        rows_per_block, size = memory.shape[1], self._cache.block_size
        ratio = size // rows_per_block  # tokens that one row stands for
        first, done, end = -(-layer.growth.first_needed(before) // ratio), before // ratio, len(prints) // ratio
        rows = np.arange(first, end)
        blocks, within = view.block_table[i].numpy()[rows // rows_per_block], rows % rows_per_block
        expected = _pattern(prints[(rows + 1) * ratio - 1], salt, nbytes)
        known = max(0, done - first)
        if known:
            found = memory[blocks[:known], within[:known]].reshape(known, nbytes)
            wrong = np.flatnonzero((found != expected[:known]).any(axis=1))
            assert not len(wrong), (
                f"layer {layer.index} {name}: rows {(rows[wrong]).tolist()} of request {i} are others"
            )
            self.num_compared += known
        shape = memory.shape[2:]
        memory[blocks[known:], within[known:]] = expected[known:].reshape(-1, *shape)

    def _slot_mapping(self, view: Any, before: Many[int], counts: Many[int]) -> None:
        size, table = self._cache.block_size, view.block_table.numpy()
        expected = [
            int(table[i, at // size]) * size + at % size
            for i, (start, count) in enumerate(zip(before, counts))
            for at in range(start, start + count)
        ]
        found = view.slot_mapping[: len(expected)].tolist()
        assert found == expected, f"slot_mapping {found} is not that of the block table, {expected}"

    def _states_in_turn(
        self, view: Any, index: int, rows: Any, i: int, prints: np.ndarray[Any, Any], before: int, salt: int
    ) -> None:
        """Compare the state with which request ``i`` begins the step, and write those after its last tokens, each to a
        place of its own."""
        memory, nbytes = self._view(view, index, rows.name)
        row, places = int(view.state_indices[i]), view.state_writes[i].tolist()
        states = self._state_of(rows, prints, salt, nbytes * memory.shape[1])
        is_same = memory[row].reshape(-1) == states[before - 1] if before else view[rows.name][row] == rows.fill
        assert is_same.all(), f"layer {index} {rows.name}: request {i} has another state than that of {before} tokens"
        self.num_compared += 1
        for place, state in zip(places, states[before:][-len(places) :]):
            memory[place] = state.reshape(memory.shape[1:])

    def _state_of(self, rows: Any, prints: np.ndarray[Any, Any], salt: int, nbytes: int) -> np.ndarray[Any, Any]:
        """Return the bytes of the state of each fingerprint: uint8 ``[n, nbytes]``."""
        return (_rounded if self._is_rounded and rows.dtype == "float32" else _pattern)(prints, salt, nbytes)

    def _states_left(self, view: Any, index: int, rows: Any, batch: Any, prints: Many[Any], salt: int) -> None:
        """Write the states that the step leaves at positions inside of it, each to a block of its own."""
        memory, nbytes = self._view(view, index, rows.name)
        named = batch.checkpoints
        for row, token, place in zip(named.rows.tolist(), named.tokens.tolist(), named.places.tolist()):
            after = prints[row][int(batch.positions[token]) : int(batch.positions[token]) + 1]
            memory[place] = self._state_of(rows, after, salt, nbytes * memory.shape[1]).reshape(memory.shape[1:])

    def _state_field(
        self, view: Any, index: int, rows: Any, i: int, state: np.uint64 | None, after: np.uint64, salt: int
    ) -> None:
        """Compare the state of request ``i``, written for fingerprint ``state``, then write it for ``after``."""
        memory, nbytes = self._view(view, index, rows.name)
        row = int(view.state_indices[i])
        count = memory.shape[1]
        if state is None:
            assert (view[rows.name][row] == rows.fill).all(), f"layer {index} {rows.name}: request {i} has an old state"
        else:
            expected = self._state_of(rows, np.array([state]), salt, nbytes * count)
            assert (memory[row].reshape(-1) == expected[0]).all(), (
                f"layer {index} {rows.name}: request {i} has another state"
            )
            self.num_compared += 1
        memory[row] = self._state_of(rows, np.array([after]), salt, nbytes * count).reshape(memory.shape[1:])
