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
from kvpagoda.kernels.numba_lanes import fetch, read_vector, write_vector

compiled: Callable[[Any], Any] = njit(cache=True, error_model="numpy")
inlined: Callable[[Any], Any] = njit(error_model="numpy", forceinline=True)
AHEAD = 8
"""Rows from one that is worked on to one that is asked for."""


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


@inlined
def _fetch(pages: Any, p: Any, at: Any, slot: Any) -> None:
    """Ask for the memory of the row in ``slot``, whatever number that is, ahead of its use: rows lie anywhere, and each would
    be waited for longer than it is worked on. ``at``: the byte of its page at which each vector begins."""
    page, within = slot // p.page * p.pages, slot % p.page
    for head in range(p.heads):
        fetch(pages, page + at[head] + within * p.scales_row + p.scales_at)
        for line in range(0, p.data_row, 64):
            fetch(pages, page + at[head] + within * p.data_row + line)


@lru_cache(maxsize=256)
def vector_loop(constants: str) -> Any:
    """The compiled loop that writes rows, or reads them where ``constants``, in JSON, have ``HALF``.

    It takes (numbers: a flat array, uint16 or float32, pages: flat uint8, slots, ``Parts``) and returns int64: the rows that
    are odd.
    """
    reads = "HALF" in json.loads(constants)
    move = read_vector if reads else write_vector
    # numba finds what it compiled by the date of this file and by what the loop encloses
    constants = json.dumps({**json.loads(constants), "SOURCE": zlib.crc32(inspect.getsource(numba_lanes).encode())})

    @compiled
    def loop(numbers: Any, pages: Any, slots: Any, p: Any) -> Any:
        vectors = p.cells * p.heads
        odd, count, at = np.empty(len(slots), np.int64), 0, np.empty(vectors, np.int64)
        for vector in range(vectors):
            at[vector] = vector // p.heads * p.cell_stride + vector % p.heads * p.head_stride
        for i in range(len(slots)):
            slot, ahead = np.int64(slots[i]), np.int64(slots[min(i + AHEAD, len(slots) - 1)])
            if slot < 0 or slot >= p.slots:
                if reads:
                    numbers[i * p.rows : i * p.rows + vectors * p.width] = 0
                continue
            is_odd, page, within = False, slot // p.page * p.pages, slot % p.page
            _fetch(pages, p, at, ahead)
            for vector in range(vectors):
                start, base = i * p.rows + vector * p.width, page + at[vector]
                data, scales = base + within * p.data_row, base + within * p.scales_row + p.scales_at
                is_odd |= move(numbers, start, pages, data + p.codes_at, scales, data + p.kept_at, constants)
            if is_odd:
                odd[count] = i
                count += 1
        return odd[:count]

    return loop
