"""``append_rows`` and ``gather_rows`` compiled for the CPU by numba: the bytes of the reference.

A loop is compiled once for each rule and size of group, and kept on disk for as long as nothing changes that it is made of.
Where the parts of a row lie it is told in each call. A row that is odd, as ``numba_lanes`` says, is left to the reference;
there are hardly any.
"""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from kvpagoda.kernels import numba_lanes
from kvpagoda.kernels.numba_lanes import ask, read_vectors, write_codes, write_scales

compiled: Callable[[Any], Any] = njit(cache=True, error_model="numpy")
GROUPS_TOGETHER, AHEAD_NBYTES, PLACES = 8, 8192, 64
"""Groups whose scales are made at once, of several vectors if one has less; bytes of numbers from the vectors that are worked
on to those whose memory is asked for; the places of vectors that are kept, more than lie between these."""


class Parts(NamedTuple):
    """Where the parts of a row lie: what ``packed_rows`` calls the same in capitals. ``width`` elements of a vector, ``rows``
    of them from row to row, ``pages`` bytes from page to page, ``slots`` of them in all."""

    page: int
    heads: int
    cells: int
    head_stride: int
    cell_stride: int
    data_row: int
    scales_row: int
    codes_at: int
    scales_at: int
    kept_at: int
    width: int
    rows: int
    pages: int
    slots: int


@lru_cache(maxsize=256)
def vector_loop(constants: str) -> Any:
    """The compiled loop that writes rows, or reads them where ``constants``, in JSON, have ``HALF``.

    It takes (numbers: a flat array, uint16 or float32, pages: flat uint8, slots, ``Parts``) and returns int64: the rows that
    are odd, and perhaps others that were worked on together with them.

    Rows lie anywhere, and each would be waited for longer than it is worked on, so that its memory is asked for ahead. After
    the last row it is that one again.
    """
    c = json.loads(constants)
    reads, groups = "HALF" in c, c["GROUPS"]
    together = 1 if reads else 1 << max(0, (GROUPS_TOGETHER // groups).bit_length() - 1)
    ahead = together * max(1, min(PLACES // 2, AHEAD_NBYTES // (2 * (c["GROUP"] * groups + c["KEPT"]))) // together)
    # numba finds what it compiled by the date of this file and by what the loop encloses
    source = zlib.crc32(inspect.getsource(numba_lanes).encode())
    constants = json.dumps({**c, "TOGETHER": together, "SOURCE": source})

    @compiled
    def loop(numbers: Any, pages: Any, slots: Any, p: Any) -> Any:
        vectors, live = p.cells * p.heads, 0
        for i in range(len(slots)):
            if slots[i] >= 0 and slots[i] < p.slots:
                live += 1
            elif reads:
                numbers[i * p.rows : i * p.rows + vectors * p.width] = 0
        odd, of_place = np.zeros(len(slots), np.bool_), np.empty(PLACES, np.int64)
        at, places = np.empty(vectors, np.int64), np.empty((PLACES, 4), np.int64)
        for vector in range(vectors):
            at[vector] = vector // p.heads * p.cell_stride + vector % p.heads * p.head_stride
        i, vector, found, page, within = -1, vectors - 1, 0, 0, 0
        factors = np.empty((PLACES + 1) * groups + 64, np.float32)
        for first in range(-ahead, live * vectors, together):
            for n in range(first + ahead, first + ahead + together):
                vector += 1
                if vector == vectors:
                    vector = 0
                    if found < live:
                        found, i = found + 1, i + 1
                        while slots[i] < 0 or slots[i] >= p.slots:
                            i += 1
                        slot = np.int64(slots[i])
                        page, within = slot // p.page * p.pages, slot % p.page
                place = n & PLACES - 1
                data = page + at[vector] + within * p.data_row
                of_place[place] = i
                places[place, 0] = i * p.rows + vector * p.width
                places[place, 1] = data + p.codes_at
                places[place, 2] = page + at[vector] + within * p.scales_row + p.scales_at
                places[place, 3] = data + p.kept_at
                ask(numbers, pages, factors, places, place, constants)
            place, behind = first & PLACES - 1, first + together & PLACES - 1
            if reads:
                if first >= 0 and read_vectors(numbers, pages, factors, places, place, constants):
                    odd[of_place[place]] = True
                continue
            if first + together >= 0 and write_scales(numbers, pages, factors, places, behind, constants):
                odd[of_place[behind : behind + together]] = True
            if first >= 0:
                write_codes(numbers, pages, factors, places, place, constants)
        return np.flatnonzero(odd)

    return loop
