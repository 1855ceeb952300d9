"""Copies on this machine: parts that move, as few strided copies of numpy, or gathered where they lie irregularly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise, product
from math import prod

import numpy as np
import numpy.typing as npt

from kvpagoda.layouts.axes import Ints
from kvpagoda.layouts.spans import Moved, repeated

Bytes = npt.NDArray[np.uint8]
Dim = tuple[int, int, int]
"""How often something is repeated, and how many bytes that adds in source and target each time."""
Strided = tuple[int, int, int, list[Dim]]
"""The first byte in source and target, bytes that are dense in both, and how they are repeated."""
GATHERED = 1 << 18
"""Bytes that are gathered at once, so that they are still in a core's own cache when they are written."""
ALONE = 1 << 15
"""Bytes from which on a strided copy is worth a call of numpy of its own."""
SHARED = 1 << 20
"""Bytes from which on several threads share a strided copy."""
Work = tuple[Iterable[Moved], Bytes, Bytes]
"""Parts that move, and the memory of one source and one target rank."""


def copy(work: Iterable[Work], threads: int = 1) -> None:
    """Copy all parts from their source to their target: uint8 vectors that do not overlap, long enough for every span.

    Where addresses are strided, O(1) calls of numpy a part; elsewhere one for ``ALONE`` or for ``GATHERED`` bytes. Every copy
    of numpy is shared by ``threads`` threads; no two write the same byte.
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
    """What moves one part, as calls in any order."""
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
        for at in range(0, len(begins), step):
            yield partial(_gathered, begins[at : at + step], puts[at : at + step], part.nbytes, source, target)


def _shares(whole: Strided, shares: int) -> Iterator[Strided]:
    """A strided copy in so many pieces, as equal as its longest dim allows."""
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
    """An axis as pieces, each a few begins times regular dims: 64 tokens in pages of 16 are 4 begins, and 16 times a step."""
    steps = np.stack((np.diff(adds), np.diff(puts)), axis=1)
    other = np.flatnonzero(np.any(steps != steps[:1], axis=1))
    count = int(other[0]) + 1 if len(other) else len(adds)
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
    """One copy of ``nbytes`` bytes, repeated along ``dims``."""
    if nbytes == 1 and dims and dims[-1][1:] == (1, 1):  # dense bytes, cut for threads
        *dims, (nbytes, _, _) = dims
    dtype, inner = (f"u{nbytes}", 1) if nbytes in (2, 4, 8) else ("u1", nbytes)
    shape = (*(count for count, _, _ in dims), inner)
    to = np.ndarray(shape, dtype, target, put, (*(puts for _, _, puts in dims), 1))
    to[...] = np.ndarray(shape, dtype, source, begin, (*(adds for _, adds, _ in dims), 1))


def _gathered(begins: Ints, puts: Ints, nbytes: int, source: Bytes, target: Bytes) -> None:
    """``nbytes`` bytes from each of ``begins`` to each of ``puts``."""
    gather, scatter = (
        np.ndarray(len(memory) - nbytes + 1, f"V{nbytes}", memory, strides=(1,)) for memory in (source, target)
    )
    scatter[puts] = gather[begins]
