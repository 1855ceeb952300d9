"""Copy parts between two memories of this host: as few strided numpy copies as possible, else by gathering spans."""

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
"""(count, source step, target step): how often a copy is repeated, and the bytes from one repetition to the next."""
Strided = tuple[int, int, int, list[Dim]]
"""(first source byte, first target byte, bytes that are dense in both, repetitions)."""
GATHERED = 1 << 18
"""Bytes that are gathered at once: few enough to be still in a core's own cache when they are written."""
ALONE = 1 << 15
"""A strided copy of at least so many bytes is a numpy call of its own."""
SHARED = 1 << 20
"""A strided copy of at least so many bytes is shared between threads."""
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
