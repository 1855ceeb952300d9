"""Page-aligned host memory, which can be given back to the system while its addresses stay."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import Exhausted
from kvpagoda.units import format_bytes

__all__ = ["PAGE", "Bytes", "give_back", "pages"]

Bytes = npt.NDArray[np.uint8]
PAGE, LARGE = 4096, 4 << 20
"""Bytes of a page, and the size from which large pages are requested."""


def pages(nbytes: int, *, large: bool = False) -> Bytes:
    """Allocate zeroed page-aligned memory; the system provides pages when they are first touched.

    Args:
        nbytes: bytes.
        large: request large pages, if the system offers them on request. Access to scattered rows is faster there, but
            allocation may be slow.

    Returns:
        uint8 ``[nbytes]``.

    Raises:
        Exhausted: the system has no such memory.
    """
    try:
        memory = mmap.mmap(-1, max(1, nbytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        text = f"the system cannot allocate {format_bytes(nbytes)} ({error})"
        raise Exhausted.with_hint(text, "ask for less", needed=nbytes) from None
    if large and nbytes >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, nbytes)


def give_back(memory: Bytes) -> int:
    """Give physical memory back to the system.

    The addresses stay, and read as zero from then on; the system provides pages again when they are touched.

    Args:
        memory: what ``pages`` returned.

    Returns:
        The bytes given back: 0, changing nothing, where the system has no such call (on Linux ``madvise`` with
        ``MADV_DONTNEED``).

    Raises:
        OSError: the call failed.
    """
    if sys.platform != "linux" or not memory.nbytes:
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    if advise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memory.nbytes
