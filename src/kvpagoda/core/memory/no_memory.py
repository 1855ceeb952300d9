"""A cache without memory: requests run as usual, but no bytes are stored. Needs no torch.

For simulators. ``RemoteMemory`` is for a scheduler in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from math import ceil, gcd
from typing import TYPE_CHECKING, Any

from kvpagoda.arrays import Ids
from kvpagoda.core.memory.copies import Noted
from kvpagoda.core.memory.writes import Array, Writes
from kvpagoda.errors import OutOfBlocks
from kvpagoda.pages import Bytes, pages
from kvpagoda.schema import Layer
from kvpagoda.units import format_bytes

if TYPE_CHECKING:
    import torch

    from kvpagoda.core.memory.pool import Pool

_RECORD_NBYTES = 64  # at most, of the smallest block
Part = tuple[Ids, Bytes, Many[int]]
"""Block ids, a table of host memory, and the rows of the table that hold the bytes of these blocks."""


def host_pages(nbytes: int, *, large: bool = False) -> Bytes:
    """Return ``pages(nbytes)``. Raises OutOfBlocks."""
    try:
        return pages(nbytes, large=large)
    except (MemoryError, OSError) as error:
        raise OutOfBlocks(
            f"the host cannot allocate {format_bytes(nbytes)}; use a smaller swap or less staging", needed=nbytes
        ) from error


class HostArrays:
    """Index arrays that the host writes and kernels read. No kernels run here, so all arrays are numpy arrays.

    ``device``: the torch device of the kernels, or None. ``is_host``: whether host and kernels use the same memory.
    """

    device: torch.device | None = None
    is_host = True

    def twin(self, host: Array) -> Any:
        """Return the array that kernels read for ``host``: here ``host`` itself."""
        return host

    def on_host(self, host: Array) -> Any:
        """Return ``host``, which stays in host memory, as callers get arrays of a step."""
        return host

    def zeros(self, shape: tuple[int, ...], dtype: type) -> Any:
        """Return a new array of zeros that kernels read. Not called if ``is_host``."""

    def send(self, writes: Writes) -> None:
        """Do ``writes``, before what is launched afterwards. Not called if ``is_host``."""

    def flatten(self, table: Any, starts: Any, indptr: Any, block_size: int, out: Any) -> None:
        """Write the used cells of ``table``, row after row, to ``out``; see ``kernels.flatten_table``.

        All arrays are twins. Not called if ``is_host``.
        """


class NoMemory:
    """The interface of a cache's memory, and an implementation that stores nothing.

    ``group`` is the index of a group in the plan. ``page_offset``: where the blocks begin within a page of memory.
    ``arrays``: allocates the index arrays of a step.
    """

    page_offset = 0
    has_memory = False
    is_poisoning = False
    """Whether freed blocks are overwritten."""
    locks_pages = False
    """Whether host memory is page-locked ahead of its use."""
    is_copying = False
    """Whether copies of ``from_host_later`` are pending."""

    def __init__(self, widths: Many[int] = ()) -> None:
        """``widths``: bytes of a block of each group; below the device their ratios remain."""
        self.arrays = HostArrays()
        unit = max(gcd(*widths), min(widths, default=1) / _RECORD_NBYTES)
        self._records = [ceil(width / unit) for width in widths]

    # -- blocks ------------------------------------------------------------------------------------------------------

    def copy(self, group: int, sources: Ids, targets: Ids, rows: int | None = None) -> None:
        """Copy blocks ``sources`` of one group to blocks ``targets``, int32 ``[n]`` each. ``rows``: how many tokens' rows of
        them are used, from the first source on (None: all); whole blocks may be copied."""

    def move(self, group: int, sources: Ids, targets: Ids) -> None:
        """Copy blocks ``sources``, whose sectors another group gets, to blocks ``targets``, int32 ``[n]`` each."""
        self.copy(group, sources, targets)

    def convert(self, group: int, sources: Ids, other: int, targets: Ids) -> None:
        """Copy states in blocks ``sources`` of ``group`` to blocks ``targets`` of the group ``other``, which may be the same
        or keep them in another encoding, int32 ``[n]`` each."""

    def round(self, group: int, ids: Ids, other: int) -> None:
        """Round the states in blocks ``ids`` of ``group`` to what group ``other`` would give back."""

    def reset(self, group: int, ids: Ids) -> None:
        """Set blocks ``ids`` to the initial values of their fields: the states of a new request."""

    def clear_sectors(self, sectors: Ids) -> None:
        """Discard the data that another group left in ``sectors``."""

    def freed(self, group: int, ids: Ids) -> None:
        """Note that blocks ``ids`` are free now."""

    def poison_freed(self) -> None:
        """Overwrite the freed blocks, if that is enabled. If this raises, the others stay to be overwritten."""

    def give_back(self) -> int:
        """Give the physical memory of all blocks back; return how many bytes that are. Addresses stay; nothing is read or
        written until ``get_again``, and nothing is left to be overwritten then."""
        return 0

    def get_again(self) -> None:
        """Provide memory again, at the same addresses, as new memory is. May be repeated. Raises Exhausted."""

    def take(self) -> Noted | None:
        """Return what a worker must do to its memory before the step that begins now; None where no worker has it."""
        return None

    def restart(self) -> None:
        """Note that no block is held any more: what was to be done before needs no longer be done."""

    def warm_up(self) -> None:
        """Compile the kernels that steps launch."""

    # -- host memory -------------------------------------------------------------------------------------------------

    def record_nbytes(self, group: int) -> int:
        """Return the bytes of a block below the device: here, where nothing is stored or moved, small numbers with the
        ratios of the real ones, so that a checkpoint takes as many records as it would."""
        return self._records[group]

    def host_memory(self, nbytes: int) -> Bytes:
        """Allocate host memory to copy blocks to and from: page-aligned uint8 ``[nbytes]``.

        The system provides pages when they are first touched. Raises OutOfBlocks.
        """
        return host_pages(nbytes)

    def page_lock(self, memory: Bytes) -> None:
        """Have the memory that ``memory``, contiguous uint8, is or is a view of page-locked as it is used, where that makes
        copies faster."""

    @property
    def page_locked_nbytes(self) -> int:
        """Bytes of host memory that are page-locked now."""
        return 0

    def to_host(self, group: int, ids: Ids, table: Bytes, rows: Many[int], layer: int | None = None) -> None:
        """Copy blocks ``ids`` to ``rows`` of ``table``, laid out as in ``host_copy``. The blocks may be given away when this
        returns; the host may read the bytes after ``wait_for_copies``, or in ``when_copied``.

        ``table``: uint8 ``[M, width]`` host memory, whose rows may be strided. ``layer``: copy its bytes alone; None: all.
        """

    def from_host(self, group: int, ids: Ids, table: Bytes, rows: Many[int]) -> None:
        """Copy to blocks ``ids`` what ``to_host`` wrote to ``rows`` of ``table``. The host may write the rows again after
        ``wait_for_copies``, or in ``when_copied``."""

    def when_copied(self, call: Callable[[], None]) -> None:
        """Call ``call`` once when the copies that ``to_host`` and ``from_host`` started are over: now, or in a thread."""
        call()

    def wait_for_copies(self) -> None:
        """Wait until the copies that ``to_host`` and ``from_host`` started are over."""

    def close(self) -> None:
        """Wait for copies, and for what follows them, and unlock what is page-locked. The memory stays usable."""

    def run_of(self, group: int, ids: Ids) -> Bytes | None:
        """Return blocks ``ids`` of ``group`` as uint8 ``[n, record_nbytes]``, where they are records that follow each other in
        memory of the host; None where they are not. A view, to be written instead of ``from_host``."""
        return None

    def from_host_later(self, group: int, parts: Many[Part], done: Callable[[], None]) -> None:
        """Start copying ``parts`` back, layer by layer as layers are needed. Table rows are as wide as a block.

        ``done`` is called once, when the host memory is not needed any more.
        """
        for part in parts:
            self.from_host(group, *part)
        done()

    def finish_copies(self, group: int | None = None) -> None:
        """Wait for the pending copies of ``from_host_later`` to blocks of ``group``, or to all blocks (None).

        Needed before these blocks are copied or get another owner.
        """

    def forget_copies(self) -> None:
        """Discard the pending copies of ``from_host_later`` and the blocks still to be poisoned: all are free now."""

    # -- what kernels see --------------------------------------------------------------------------------------------

    def pools(self, layer: Layer) -> tuple[Pool | None, Pool | None]:
        """Return the pools (``Pool``) of the blocks and the states of ``layer``, None for what it does not keep.

        There are none here.
        """
        return None, None
