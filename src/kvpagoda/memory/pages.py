"""Host memory in whole pages."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
PAGE, LARGE = 4096, 4 << 20
"""Bytes of a page, and from which on memory is asked for in large ones."""


def pages(nbytes: int, *, large: bool = False) -> Bytes:
    """Zeroed page-aligned memory, uint8 ``[nbytes]``, taken from the system as it is touched. ``large``: in large pages, where
    the system gives them to who asks; rows that lie anywhere are found sooner there, and it may take long to get them."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if large and nbytes >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
