"""``append_rows`` and ``gather_rows`` compiled for the CPU by numba. The bytes are those of the reference.

One loop is compiled for each rule and group size, and cached on disk until its source changes. The places of the parts
of a row are arguments of each call (``Strides``). The few rows that ``vectors`` reports as odd are left to the
reference.
"""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from kvpagoda.core.lanes import llvm, vectors
from kvpagoda.core.lanes.vectors import ask, read_vectors, write_codes, write_scales

compiled: Callable[[Any], Any] = njit(cache=True, error_model="numpy")
TOGETHER, AHEAD, PLACES = 256, 4096, 64
"""Elements of the vectors that are processed in one step, elements to prefetch ahead, and rows of the ring ``places``.

The ring has at least four times as many rows as there are vectors in one step.
"""


class Strides(NamedTuple):
    """Where rows lie.

    Args:
        page: rows of a page.
        slots: number of slots in all pages.
        rows: elements from row to row of ``numbers``.
        at: of codes, scales and kept elements the first byte.
        pages: of these, the bytes from page to page.
        steps: of these, the bytes from row to row.
    """

    page: int
    slots: int
    rows: int
    at: tuple[int, int, int]
    pages: tuple[int, int, int]
    steps: tuple[int, int, int]


@lru_cache(maxsize=256)
def vector_loop(constants: str) -> Any:
    """Return the compiled loop that writes rows, or reads them if ``constants`` has ``HALF``.

    Rows are scattered over memory and waiting for one takes longer than processing it, so their memory is prefetched;
    after the last row, the last row again.

    Args:
        constants: JSON.

    Returns:
        A loop that takes (numbers: flat array, uint16 or float32, memory: flat uint8, slots, ``Strides``, int64
        ``[vectors, 3]``: bytes from the parts of a row to those of each of its vectors). It returns, as int64, the
        indices of the odd rows and of rows processed together with them.
    """
    c = json.loads(constants)
    reads, groups, width = "HALF" in c, c["GROUPS"], c["GROUPS"] * c["GROUP"] + c["KEPT"]
    together = 1 if reads else 1 << min(max(TOGETHER // width, 1), PLACES // 8).bit_length() - 1
    ahead = together * max(1, min(AHEAD // width, PLACES // 2) // together)
    # numba looks up its disk cache by the date of this file and the values that the loop encloses
    source = zlib.crc32((inspect.getsource(llvm) + inspect.getsource(vectors)).encode())
    constants = json.dumps({**c, "TOGETHER": together, "SOURCE": source})

    def loop(numbers: Any, memory: Any, slots: Any, p: Any, offsets: Any) -> Any:
        vectors, live = len(offsets), 0
        for i in range(len(slots)):
            if slots[i] >= 0 and slots[i] < p.slots:
                live += 1
            elif reads:
                numbers[i * p.rows : i * p.rows + vectors * width] = 0
        odd, places = np.zeros(len(slots), np.bool_), np.empty((PLACES, 5), np.int64)
        factors = np.empty(2 * PLACES * groups, np.float32)
        i, vector, found, codes, scales, kept = -1, vectors - 1, 0, 0, 0, 0
        for first in range(-ahead if live else 0, live * vectors, together):
            for n in range(first + ahead, first + ahead + together):
                vector += 1
                if vector == vectors:
                    vector = 0
                    if found < live:
                        found, i = found + 1, i + 1
                        while slots[i] < 0 or slots[i] >= p.slots:
                            i += 1
                        page = np.int64(np.uint64(slots[i]) // np.uint64(p.page))  # faster than signed division
                        within = slots[i] - page * p.page
                        codes = p.at[0] + page * p.pages[0] + within * p.steps[0]
                        scales = p.at[1] + page * p.pages[1] + within * p.steps[1]
                        kept = p.at[2] + page * p.pages[2] + within * p.steps[2]
                place = n & PLACES - 1
                places[place, 0] = i * p.rows + vector * width
                places[place, 1] = codes + offsets[vector, 0]
                places[place, 2] = scales + offsets[vector, 1]
                places[place, 3] = kept + offsets[vector, 2]
                places[place, 4] = i
                ask(numbers, memory, factors, places, place, constants)
            place, following = first & PLACES - 1, first + together & PLACES - 1
            if reads:
                if first >= 0 and read_vectors(numbers, memory, factors, places, place, constants):
                    odd[places[place, 4]] = True
                continue
            if first + together >= 0 and write_scales(numbers, memory, factors, places, following, constants):
                odd[places[following : following + together, 4]] = True
            if first >= 0:
                write_codes(numbers, memory, factors, places, place, constants)
        return np.flatnonzero(odd)

    # loops that several processes cached on disk are told apart only by name once one process has loaded them
    loop.__name__ = loop.__qualname__ = f"loop_{blake2b(constants.encode(), digest_size=12).hexdigest()}"
    return compiled(loop)
