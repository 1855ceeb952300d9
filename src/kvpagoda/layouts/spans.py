"""Byte spans of a copy: (source byte, target byte, bytes) as int64 ``[n, 3]``, computed from the parts to copy.

An address is a sum of one term per axis (``Layout.along``). If the terms of an axis increase by exactly the length of
the span, in source and target, the span grows over that axis. Along any other axis the span is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from kvpagoda.layouts.axes import Ints


@dataclass(frozen=True)
class Moved:
    """One part to copy.

    ``source``, ``target``: its first byte on each side. ``nbytes``: bytes of an element. ``axes``: for each axis the
    bytes that its chosen indices add to the address in source and target, the axis of the smallest source stride first.
    ``strides``: identifies each of these axes by its strides; parts with equal ``strides`` have equal ``axes``.
    """

    source: int
    target: int
    nbytes: int
    axes: tuple[tuple[Ints, Ints], ...]
    strides: tuple[object, ...]


def joined(parts: Iterable[Moved]) -> list[Moved]:
    """Return ``parts`` in as few ``Moved`` as possible.

    Elements grow over the innermost axes that are dense in source and target. Parts that are adjacent on both sides and
    repeated in the same way become one.
    """
    runs: list[Moved] = []
    for part in sorted(map(_grown, parts), key=lambda part: part.source):
        last = runs[-1] if runs else None
        if last is None or last.strides != part.strides or _end(last) != (part.source, part.target):
            runs.append(part)
        else:
            runs[-1] = replace(last, nbytes=last.nbytes + part.nbytes)
    return [_stacked(list(alike)) for _, alike in groupby(runs, key=lambda part: (part.nbytes, part.strides))]


def _stacked(parts: list[Moved]) -> Moved:
    """Return parts of one size and equal axes (K and V of a page) as one part with one more axis."""
    if len(parts) == 1:
        return parts[0]
    adds = np.array([part.source for part in parts]) - parts[0].source
    puts = np.array([part.target for part in parts]) - parts[0].target
    return replace(parts[0], axes=(*parts[0].axes, (adds, puts)), strides=(*parts[0].strides, "parts"))


def _end(part: Moved) -> tuple[int, int]:
    """Return the source and target byte after its first element."""
    return part.source + part.nbytes, part.target + part.nbytes


def _grown(part: Moved) -> Moved:
    """Return ``part`` with its elements grown over the innermost axes that are dense in source and target."""
    nbytes, axes, strides = part.nbytes, part.axes, part.strides
    while axes and all(np.array_equal(adds, np.arange(len(adds)) * nbytes) for adds in axes[0]):
        nbytes, axes, strides = nbytes * len(axes[0][0]), axes[1:], strides[1:]
    return replace(part, nbytes=nbytes, axes=axes, strides=strides)


def of_parts(parts: Iterable[Moved]) -> Ints:
    """Return the spans that copy all parts, merged and sorted by source byte.

    O(s log s) for s spans before they are merged: at most one for each index of the axes along which no span grows.
    """
    return merged(np.concatenate([np.empty((0, 3), np.int64), *map(_of_part, parts)]))


def _of_part(part: Moved) -> Ints:
    """Return the spans of one part, not sorted: int64 ``[n, 3]``."""
    source, target, nbytes = np.array([part.source]), np.array([part.target]), np.array([part.nbytes])
    for adds, puts in part.axes:
        if len(source) == 1:  # runs of indices whose bytes follow each other
            gaps = (np.diff(adds) != nbytes[0]) | (np.diff(puts) != nbytes[0])
            begins = np.concatenate(([0], np.flatnonzero(gaps) + 1))
            nbytes = nbytes[0] * np.diff(np.concatenate((begins, [len(adds)])))
            adds, puts = adds[begins], puts[begins]
        else:
            nbytes = np.tile(nbytes, len(adds))
        source, target = repeated(source, adds), repeated(target, puts)
    return np.stack((source, target, nbytes), axis=1)


def repeated(begins: Ints, adds: Ints) -> Ints:
    """Return ``begins`` plus each of ``adds``, as one vector."""
    return (adds[:, None] + begins).ravel()


def merged(spans: Ints) -> Ints:
    """Return ``spans`` sorted by source byte, with spans that are adjacent in source and target merged. O(n log n)."""
    if not len(spans):
        return spans
    if np.any(spans[1:, 0] < spans[:-1, 0]):
        spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = spans[:-1, :2] + spans[:-1, 2:]
    begins = np.concatenate(([0], np.flatnonzero(np.any(ends != spans[1:, :2], axis=1)) + 1))
    return np.stack((spans[begins, 0], spans[begins, 1], np.add.reduceat(spans[:, 2], begins)), axis=1)


def cut(spans: Ints, size: int, at: Ints) -> Ints:
    """Return the spans, cut where they cross a multiple of ``size`` bytes. O(spans returned).

    ``at``: int64 ``[n]``, the position of the first byte of each span, in the numbering that ``size`` refers to.
    """
    at = at % size
    slices = -(-(at + spans[:, 2]) // size)
    which = np.repeat(np.arange(len(spans)), slices)
    number = np.arange(len(which)) - np.repeat(np.cumsum(slices) - slices, slices)
    begins = np.maximum(0, number * size - at[which])
    ends = np.minimum(spans[which, 2], (number + 1) * size - at[which])
    return np.stack((spans[which, 0] + begins, spans[which, 1] + begins, ends - begins), axis=1)
