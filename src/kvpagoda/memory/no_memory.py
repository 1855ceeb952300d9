"""A cache without memory: the same life of requests, no bytes behind it. For simulators, and a scheduler in a process of its
own. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import OutOfBlocks
from kvpagoda.memory.pages import Bytes, pages
from kvpagoda.schema import Layer
from kvpagoda.units import format_bytes

Array = np.ndarray[Any, np.dtype[Any]]
Part = tuple[Ids, Bytes, Many[int]]
"""Blocks, a table of host memory, and the rows of it that their bytes come from."""


class HostArrays:
    """Arrays that are written on the host and read by kernels: here by nobody, so they are numpy arrays.

    ``device``: None, or the torch device where they are read. ``is_host``: whether both sides are the same memory.
    """

    device: Any = None
    is_host = True

    def twin(self, host: Array) -> Any:
        """What kernels read of ``host``: the array itself."""
        return host

    def upload(self, target: Any, source: npt.NDArray[Any], index: Any = ...) -> None:
        """Copy ``source`` to ``target[index]``, where ``target`` is part of a twin. Not called where ``is_host``."""

    def flatten(self, table: Any, starts: Any, indptr: Any, block_size: int, out: Any) -> None:
        """The cells of ``table`` that are in use, row behind row, into ``out``: all of them twins, see
        ``kernels.flatten_table``. Not called where ``is_host``."""


class NoMemory:
    """What moves the bytes of a cache's blocks: here, nothing. ``group`` is the index of a group in the plan.

    ``page_offset``: where within a page of memory the blocks begin. ``arrays``: where the index arrays of a step lie.
    """

    page_offset = 0
    has_memory = False
    is_poisoning = False
    """Whether what was freed is overwritten."""
    is_copying = False
    """Whether ``from_host_later`` has something left to copy."""

    def __init__(self) -> None:
        self.arrays = HostArrays()

    # -- blocks ------------------------------------------------------------------------------------------------------

    def copy(self, group: int, sources: Ids, targets: Ids) -> None:
        """Copy blocks ``sources`` of one group to blocks ``targets``, int32 ``[n]`` each."""

    def reset(self, group: int, ids: Ids) -> None:
        """Set blocks to the initial values of their fields: states of a request that begins."""

    def clear_sectors(self, sectors: Ids) -> None:
        """What another group left in ``sectors`` means nothing."""

    def freed(self, group: int, ids: Ids) -> None:
        """Nobody holds blocks ``ids`` any more."""

    def poison_freed(self) -> None:
        """Overwrite what was freed, where that is asked for; what raises is still to be done."""

    # -- host memory -------------------------------------------------------------------------------------------------

    def record_nbytes(self, group: int) -> int:
        """Bytes of a block below the device: few where there is no memory behind it, and nothing is moved."""
        return 64

    def host_memory(self, nbytes: int) -> Bytes:
        """Host memory to copy blocks to and from, page-aligned uint8 ``[nbytes]``, taken from the system as it is touched.
        Raises OutOfBlocks."""
        try:
            return pages(nbytes)
        except (MemoryError, OSError) as error:
            raise OutOfBlocks(
                f"the host has no {format_bytes(nbytes)}; give a smaller swap, or less staging", needed=nbytes
            ) from error

    def to_host(self, group: int, ids: Ids, table: Bytes, rows: Many[int]) -> None:
        """Copy blocks ``ids`` to ``rows`` of ``table``, uint8 ``[M, width]`` host memory whose rows may be strided, as
        ``host_copy`` lays them out. Waits until the bytes are there."""

    def from_host(self, group: int, ids: Ids, table: Bytes, rows: Many[int]) -> None:
        """Copy back what ``to_host`` copied, to blocks ``ids``."""

    def from_host_later(self, group: int, parts: Many[Part], done: Callable[[], None]) -> None:
        """Copy back ``parts``, with rows as wide as a block, a layer when it is asked for; call ``done`` once, when the host
        memory is not needed any more."""
        for part in parts:
            self.from_host(group, *part)
        done()

    def finish_copies(self, group: int | None = None) -> None:
        """Wait for what ``from_host_later`` has not copied yet, to blocks of ``group`` or of all: they are about to be copied,
        or to be somebody else's."""

    def forget_copies(self) -> None:
        """Give up what ``from_host_later`` has not copied yet, and what is to be poisoned: nobody holds these blocks now."""

    # -- what kernels see --------------------------------------------------------------------------------------------

    def pools(self, layer: Layer) -> tuple[Any, Any]:
        """The blocks and the states of ``layer`` (``Pool``), None for what it does not keep: nothing, here."""
        return None, None
