"""The parts to copy between two layouts, as byte spans, and the copy itself between two memories of this host.

Spans are (source byte, target byte, bytes), int64 ``[n, 3]``. An address is a sum of one term per axis
(``Layout.along``). If the terms of an axis increase by exactly the length of the span, in source and target, the span
grows over that axis. Along any other axis the span is repeated.

A copy is as few strided numpy copies as possible; what these cannot reach is gathered by spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise, product
from math import prod

import numpy as np
import numpy.typing as npt

from kvpagoda.layouts.axes import Ints

Bytes = npt.NDArray[np.uint8]
Dim = tuple[int, int, int]
"""(count, source step, target step): how often a copy is repeated, and the bytes from one repetition to the next."""
Strided = tuple[int, int, int, list[Dim]]
"""(first source byte, first target byte, bytes that are dense in both, repetitions)."""
GATHERED = 1 << 18
"""Bytes that are gathered at once: few enough to be still in a core's own cache when they are written."""
ALONE = 1 << 15
"""A strided copy of at least so many bytes is a numpy call of its own."""
SHARED = 1 << 20
"""A strided copy of at least so many bytes is shared between threads."""


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


Work = tuple[Iterable[Moved], Bytes, Bytes]
"""(parts to copy, memory of a source rank, memory of a target rank)."""


def copy(work: Iterable[Work], threads: int = 1) -> None:
    """Copy all parts of ``work`` from their source to their target memory.

    The memories are uint8 vectors that do not overlap and are long enough for every span. O(1) numpy calls per part
    where addresses are strided, else one for every ``ALONE`` or ``GATHERED`` bytes. The calls are shared between
    ``threads`` threads; no two of them write the same byte.
    """
    jobs = [job for parts, source, target in work for part in parts for job in _jobs(part, source, target, threads)]
    if threads == 1:
        for job in jobs:
            job()
        return
    from concurrent.futures import ThreadPoolExecutor  # slow to load

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def _jobs(part: Moved, source: Bytes, target: Bytes, threads: int) -> Iterator[Callable[[], None]]:
    """Yield calls that together copy one part; they may run in any order."""
    for pieces in product(*(_regular(adds, puts) for adds, puts in part.axes)):
        begins, puts = np.array([part.source]), np.array([part.target])
        dims = [dim for _, _, inner in pieces for dim in inner]
        for outer_adds, outer_puts, _ in pieces:
            begins, puts = repeated(begins, outer_adds), repeated(puts, outer_puts)
        nbytes = part.nbytes * prod(count for count, _, _ in dims)
        if len(begins) == 1 or nbytes >= ALONE:
            shares = threads if nbytes * len(begins) >= SHARED and len(begins) < threads else 1
            for begin, put in zip(begins.tolist(), puts.tolist()):
                for share in _shares((begin, put, part.nbytes, dims), shares):
                    yield partial(_strided, *share, source, target)
            continue
        for count, adds, adds_target in dims:
            begins = repeated(begins, np.arange(count) * adds)
            puts = repeated(puts, np.arange(count) * adds_target)
        step = max(1, GATHERED // part.nbytes)
        for i in range(0, len(begins), step):
            yield partial(_gathered, begins[i : i + step], puts[i : i + step], part.nbytes, source, target)


def _shares(whole: Strided, shares: int) -> Iterator[Strided]:
    """Yield a strided copy in ``shares`` pieces, cut along its longest dim, as equal as that allows."""
    begin, put, nbytes, dims = whole
    if not dims:
        nbytes, dims = 1, [(nbytes, 1, 1)]
    longest = max(range(len(dims)), key=lambda dim: dims[dim][0])
    count, adds, puts = dims[longest]
    cuts = [count * share // shares for share in range(shares + 1)]
    for first, stop in pairwise(cuts):
        if first < stop:
            inside = [*dims[:longest], (stop - first, adds, puts), *dims[longest + 1 :]]
            yield begin + first * adds, put + first * puts, nbytes, inside


def _regular(adds: Ints, puts: Ints) -> Iterator[tuple[Ints, Ints, list[Dim]]]:
    """Yield an axis as pieces (source begins, target begins, regular dims).

    Each begin is repeated along the dims: 64 tokens in pages of 16 are 4 begins, and one dim of 16 equal steps.
    """
    steps = np.stack((np.diff(adds), np.diff(puts)), axis=1)
    changes = np.flatnonzero(np.any(steps != steps[:1], axis=1))
    count = int(changes[0]) + 1 if len(changes) else len(adds)
    whole = len(adds) // count * count
    rows = [values[:whole].reshape(-1, count) for values in (adds, puts)]
    if count == 1 or any(np.any(row - row[:, :1] != row[0] - row[0, 0]) for row in rows):
        yield adds, puts, []
        return
    for outer_adds, outer_puts, dims in _regular(rows[0][:, 0], rows[1][:, 0]):
        yield outer_adds, outer_puts, [*dims, (count, int(steps[0, 0]), int(steps[0, 1]))]
    if whole < len(adds):
        yield from _regular(adds[whole:], puts[whole:])


def _strided(begin: int, put: int, nbytes: int, dims: list[Dim], source: Bytes, target: Bytes) -> None:
    """Copy ``nbytes`` bytes from ``begin`` in source to ``put`` in target, repeated along ``dims``."""
    if nbytes == 1 and dims and dims[-1][1:] == (1, 1):  # dense bytes, cut for threads
        *dims, (nbytes, _, _) = dims
    dtype, inner = (f"u{nbytes}", 1) if nbytes in (2, 4, 8) else ("u1", nbytes)
    shape = (*(count for count, _, _ in dims), inner)
    to = np.ndarray(shape, dtype, target, put, (*(puts for _, _, puts in dims), 1))
    to[...] = np.ndarray(shape, dtype, source, begin, (*(adds for _, adds, _ in dims), 1))


def _gathered(begins: Ints, puts: Ints, nbytes: int, source: Bytes, target: Bytes) -> None:
    """Copy ``nbytes`` bytes from each of ``begins`` in source to the same entry of ``puts`` in target."""
    gather, scatter = (
        np.ndarray(len(memory) - nbytes + 1, f"V{nbytes}", memory, strides=(1,)) for memory in (source, target)
    )
    scatter[puts] = gather[begins]
