"""Rows whose bytes say what they are: of which text up to which token, layer, field, head of the whole model and element.

``Rows`` stands for the model on one rank: it writes what a step computes, and compares what the next token would read."""

from __future__ import annotations

import zlib
from typing import Any, ClassVar

import numpy as np

from kvpagoda import KVCache, Sequence
from kvpagoda.handover.content import GroupPlace, places_of

_MIX = np.uint64(0x9E3779B97F4A7C15)
_WEIGHTS = np.random.default_rng(7).integers(1, 2**63, 1 << 16, np.uint64) | np.uint64(1)
Array = np.ndarray[Any, Any]


def mixed(values: Array) -> Array:
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(31))) * _MIX
        return values ^ (values >> np.uint64(29))


def prints_of(tokens: Array) -> Array:
    """Return one number for each prefix of ``tokens``: uint64 ``[n]``; entry i is of the first i + 1."""
    with np.errstate(over="ignore"):
        return mixed(
            np.cumsum((np.asarray(tokens, np.uint64) + np.uint64(1)) * _WEIGHTS[: len(tokens)], dtype=np.uint64)
        )


class Rows:
    """The rows of ``cache``, rank ``rank`` of ``ranks`` of a model split by tensor parallelism."""

    def __init__(self, cache: KVCache, rank: int = 0, ranks: int = 1) -> None:
        self._cache, self._rank, self._ranks = cache, rank, ranks
        self._groups: tuple[GroupPlace, ...] = places_of(cache.schema, cache.plan)
        self.num_compared = 0

    def compute(self, sequence: Sequence, tokens: Array, upto: int, step: int) -> None:
        """Write the rows of all tokens below ``upto`` that are not committed, and commit them, ``step`` at a time; before, the
        rows that optional groups lack."""
        if (first := self.lacking(sequence)) is not None and sequence.length < upto:
            self._each(sequence, tokens[: sequence.length], first, sequence.length, writes=True, optional=True)
        while sequence.length < upto:
            count = min(step, upto - sequence.length, self._cache.step_limit(sequence))
            sequence.extend(count)
            begin, end = sequence.length, sequence.length + count
            self._each(sequence, tokens[:end], begin, end, writes=True)
            sequence.commit(tokens[begin:end])

    @staticmethod
    def lacking(sequence: Sequence) -> int | None:
        """Return the first token of which optional groups lack a row, until something was committed."""
        return sequence.match.lacking_from if sequence.length <= sequence.match.resumable else None

    def compute_layer(self, sequence: Sequence, tokens: Array, begin: int, end: int, layer: int) -> None:
        """Write the rows of tokens ``begin .. end - 1`` of one layer, which a later ``commit`` is for."""
        self._each(sequence, tokens[:end], begin, end, writes=True, layer=layer)

    def compare(self, sequence: Sequence) -> None:
        """Raise AssertionError unless everything that the next token of ``sequence`` reads is what it must be; of optional
        groups what is not said to be lacking."""
        self._each(sequence, np.asarray(sequence.tokens), 0, sequence.length, writes=False)

    def _each(
        self,
        sequence: Sequence,
        tokens: Array,
        begin: int,
        end: int,
        *,
        writes: bool,
        layer: int = -1,
        optional: bool = False,
    ) -> None:
        """Write, or compare, rows of all groups and layers; of one ``layer``, or of ``optional`` groups alone."""
        prints, core, slot = prints_of(tokens), self._cache.core, sequence.slot
        lacking = None if writes else self.lacking(sequence)
        for index, (group, places) in enumerate(zip(core.groups, self._groups)):
            if optional and not group.growth.is_optional:
                continue
            arena = core.memory.arenas[index]  # type: ignore[attr-defined]
            cells = group.table.cells[slot]
            for rows, field in zip(places.rows, places.fields):
                if layer not in (-1, field.layer):
                    continue
                memory = _bytes(arena.layer(field.layer)[field.name])
                if group.growth.is_state:
                    wanted = np.full(rows, end - 1)
                    at = int(cells[end % group.places]) * np.ones(rows, np.int64), np.arange(rows)
                else:
                    per_block = rows * places.pages
                    ratio = places.tokens // per_block
                    first = begin if writes else group.growth.first_needed(end)
                    last = end if lacking is None or not group.growth.is_optional else lacking
                    numbers = np.arange(-(-first // ratio) if not writes else first // ratio, last // ratio)
                    wanted = (numbers + 1) * ratio - 1
                    page = cells[numbers // per_block].astype(np.int64) * places.pages + numbers % per_block // rows
                    at = page, numbers % per_block % rows
                if not len(wanted):
                    continue
                expected = self._expected(prints[wanted], field, np.arange(rows) if group.growth.is_state else None)
                if writes:
                    memory[at] = expected
                else:
                    same = memory[at] == expected
                    assert same.all(), (
                        f"{group.name} layer {field.layer} {field.name}: rank {self._rank}, {np.argwhere(~same)[:4].tolist()}"
                    )
                    self.num_compared += len(wanted)

    def _expected(self, prints: Array, field: Any, rows: Array | None) -> Array:
        """Return the bytes of rows of ``field``: uint8 ``[n, *shape, itemsize]``."""
        salt = np.uint64(zlib.crc32(f"{field.layer}/{field.name}".encode()))
        with np.errstate(over="ignore"):
            found = mixed(prints + salt * np.uint64(0x1000193))
            if rows is not None:
                found = found + rows.astype(np.uint64) * np.uint64(1_000_003)
            for axis, size in enumerate(field.shape):
                if field.runs is not None and field.runs[0] == axis:
                    numbers = np.concatenate([self._whole(*run) + 1000 * n for n, run in enumerate(field.runs[1])])
                else:
                    numbers = np.arange(size)
                found = mixed(found[..., None] + numbers.astype(np.uint64) * np.uint64(7919 + 104729 * axis))
        return found[..., None].view(np.uint8)[..., : field.itemsize]

    def _whole(self, heads: int, width: int) -> Array:
        """Return which elements of the whole model's axis this rank has, of a run of ``heads`` heads."""
        first = (
            self._rank * max(1, self.of_model.get(width, heads * self._ranks)) // self._ranks
            if heads == 1
            else self._rank * heads
        )
        return np.arange(first * width, (first + heads) * width)

    of_model: ClassVar[dict[int, int]] = {}
    """Width of a head -> heads of the whole model, where a rank has a single head and may share it."""


def _bytes(tensor: Any) -> Array:
    import torch

    return tensor.unsqueeze(-1).view(torch.uint8).numpy()
