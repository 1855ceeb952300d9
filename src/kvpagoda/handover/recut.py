"""Copies the rows of a text from records of source ranks into the records of a target rank, whatever the pages of each.

A field is copied along its rows and the axes of a row; ``layouts.copying`` joins what lies together on both sides, and copies
the rest with few strided numpy calls."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

import numpy as np

from kvpagoda.handover.content import FieldPlace, GroupPlace, Piece, pieces_of
from kvpagoda.layouts.axes import Ints
from kvpagoda.layouts.copying import Moved, copy, joined
from kvpagoda.pages import Bytes


def is_same(source: GroupPlace, target: GroupPlace, ranks: tuple[int, int]) -> bool:
    """Return whether a record of the source is a record of the target, byte for byte."""
    return source == target and (ranks[0] == ranks[1] or all(field.runs is None for field in source.fields))


def givers_of(source: GroupPlace, target: GroupPlace, ranks: tuple[int, int], rank: int) -> set[int]:
    """Return the source ranks that have what target rank ``rank`` keeps in its records of this group."""
    if is_same(source, target, ranks):
        return {rank if ranks[0] == ranks[1] else rank * ranks[0] // ranks[1]}
    pairs = _fields(source, target)
    return {piece.giver for _, _, one, other in pairs for piece in pieces_of(one, other, ranks, rank)}


class Recut:
    """Copies the rows of one group from records of the source ``ranks[0]`` to those of target rank ``rank`` of ``ranks[1]``.

    ``unit``: where both sides begin a record, in tokens. Texts that lie alike in their records are copied alike, so what is
    worked out for one part of a text serves for others."""

    def __init__(self, source: GroupPlace, target: GroupPlace, ranks: tuple[int, int], rank: int) -> None:
        self._source, self._target, self._ranks, self._rank = source, target, ranks, rank
        self.unit = lcm(source.tokens, target.tokens)
        self._parts: dict[tuple[int, ...], list[tuple[int, list[Moved]]]] = {}

    def copy(self, given: Mapping[int, Bytes], into: Bytes, firsts: tuple[int, int], tokens: range) -> None:
        """Copy ``tokens`` of the text (of a state: all of it) from ``given``, source rank -> uint8 ``[n, nbytes]`` records, to
        the records ``into``. ``firsts``: the token with which the first record of each side begins. Other bytes stay."""
        start = tokens.start
        place = firsts[0] - start, firsts[1] - start, len(tokens), start % self.unit if self.unit else 0
        if place not in self._parts:
            self._parts[place] = self._worked_out(firsts, tokens)
        copy((parts, given[giver].reshape(-1), into.reshape(-1)) for giver, parts in self._parts[place])

    def _worked_out(self, firsts: tuple[int, int], tokens: range) -> list[tuple[int, list[Moved]]]:
        """Return what is to be copied from each source rank."""
        source, target, parts = self._source, self._target, dict[int, list[Moved]]()
        for rows, slots, one, other in _fields(source, target):
            ratio = 1 if not source.tokens else source.tokens // (rows * source.pages)
            count = slots * target.pages
            wanted = (
                np.arange(count) if not target.tokens else np.arange(-(-tokens.start // ratio), tokens.stop // ratio)
            )
            if not len(wanted):
                continue
            adds = _addresses(source, rows, one.strides[0], wanted - firsts[0] // ratio)
            puts = _addresses(target, slots, other.strides[0], wanted - firsts[1] // ratio)
            for piece in pieces_of(one, other, self._ranks, self._rank):
                parts.setdefault(piece.giver, []).append(_moved(one, other, piece, (adds, puts), ratio))
        return [(giver, joined(some)) for giver, some in parts.items()]


def _fields(source: GroupPlace, target: GroupPlace) -> list[tuple[int, int, FieldPlace, FieldPlace]]:
    """Return (rows of the field in a page of the source, and of the target, the field there, and here)."""
    theirs = {(field.layer, field.name): (rows, field) for rows, field in zip(source.rows, source.fields)}
    pairs = []
    for rows, field in zip(target.rows, target.fields):
        given = theirs[field.layer, field.name]
        pairs.append((given[0], rows, given[1], field))
    return pairs


def _addresses(group: GroupPlace, rows: int, stride: int, wanted: Ints) -> Ints:
    """Return where rows ``wanted``, counted from the first record on, begin, less the offset of the field."""
    pages, inside = np.divmod(wanted, rows)
    records, page = np.divmod(pages, group.pages)
    found: Ints = records * group.nbytes + page * (group.nbytes // group.pages) + inside * stride
    return found


def _moved(one: FieldPlace, other: FieldPlace, piece: Piece, rows: tuple[Ints, Ints], ratio: int) -> Moved:
    """Return the copy of one ``piece`` of a field. ``rows``: the addresses of the rows on each side."""
    begins, axes, strides = [one.offset, other.offset], [], list[object]()
    for axis, size in enumerate(one.shape):
        steps = one.strides[axis + 1], other.strides[axis + 1]
        if one.runs is not None and axis == one.runs[0]:
            size = piece.count
            begins[0] += piece.source * steps[0]
            begins[1] += piece.begin * steps[1]
        axes.append((np.arange(size) * steps[0], np.arange(size) * steps[1]))
        strides.append((size, *steps))
    axes.append(rows)
    strides.append(("rows", ratio, one.strides[0], other.strides[0]))
    order = sorted(range(len(axes)), key=lambda n: int(axes[n][0][1]) if len(axes[n][0]) > 1 else 0)
    order.sort(key=lambda n: n == len(axes) - 1)  # rows last: their addresses are no multiples of one stride
    kept = [n for n in order if len(axes[n][0]) > 1 or n == len(axes) - 1]
    return Moved(begins[0], begins[1], one.itemsize, tuple(axes[n] for n in kept), tuple(strides[n] for n in kept))
