"""Host memory in whole pages."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
PAGE, LARGE = 4096, 4 << 20
"""Bytes of a page, and from which on memory is asked for in large ones."""


def pages(nbytes: int) -> Bytes:
    """Zeroed page-aligned memory, uint8 ``[nbytes]``, taken from the system as it is touched; in large pages where the system
    gives them to who asks, for rows and blocks lie anywhere in it and are found sooner there."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
