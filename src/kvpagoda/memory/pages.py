"""Page-aligned host memory."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
PAGE, LARGE = 4096, 4 << 20
"""Bytes of a page, and the size from which large pages are requested."""


def pages(nbytes: int, *, large: bool = False) -> Bytes:
    """Allocate zeroed page-aligned memory, uint8 ``[nbytes]``; the system provides pages when they are first touched.

    ``large``: request large pages, if the system offers them on request. Access to scattered rows is faster there, but
    allocation may be slow.
    """
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if large and nbytes >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
