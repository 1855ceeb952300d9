"""Host memory in whole pages."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
PAGE = 4096


def pages(nbytes: int) -> Bytes:
    """Zeroed page-aligned memory, uint8 ``[nbytes]``, taken from the system as it is touched."""
    return np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
