"""Copy rows of bytes from one table to another, on one device or between two.

    pairs  (3, 7) (4, 8) (5, 9) (0, 2)   ->   runs  src[3:6] -> dst[7:10],  src[0:1] -> dst[2:3]

On a GPU one kernel reads and writes each byte once, also of many tables at once, and also if one of them is page-locked
memory of the host. Elsewhere long runs are copied as slices, each at the speed of one memcpy; on a CPU with numba, many
rows are copied faster, with stores that bypass the caches. Short runs are gathered and scattered as integer words, a few
hundred KiB at a time, because a slice copy has an overhead of about a microsecond on the CPU, and far more across devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvpagoda.core.kernels.dispatch import backend, jit, tl
from kvpagoda.errors import BadInput

Tensor = torch.Tensor
ToDevice = Callable[[NDArray[np.int64]], Tensor]
"""Returns a copy of an array on a device, for kernels of the current stream. The host may change the array then."""

RUN_NBYTES = 16 << 10
"""Mean bytes of a run from which slices are faster on a CPU (measured: 8 to 16 KiB on an AMD EPYC)."""
CROSSING_NBYTES = 28 << 10
"""Mean bytes of a run from which slices are used between a device and memory that is not page-locked (estimated)."""
LOCKED_CROSSING_NBYTES = 1 << 20
"""The same for page-locked memory, where the kernel takes what is shorter. Measured on an H100: with 64 KiB the kernel moves
51 GB/s and slices 5, with 1 MiB both 47 to 51; between these nothing was measured."""
FEW = 32
"""Programs that fill the bus to the host and leave the rest of the device to others (H100: 16 are a tenth slower inwards)."""
_WORDS, _LEAST_WORDS = 2048, 32
"""The most words, of 8 bytes or less, that a program moves at a time, and the fewest."""
PAST_CACHES_ROW, PAST_CACHES = 256, 8 << 20
"""Least bytes of a row, and of the whole copy, for which a CPU with numba bypasses its caches (measured, AMD EPYC)."""
STAGE_NBYTES = {"cpu": 512 << 10}
"""Device type of the source -> bytes that are gathered at a time; 64 MiB for other types."""


def copy_rows(src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    """Copy row ``src[s]`` to row ``dst[d]`` for every row (s, d) of ``pairs``, bit for bit.

    On a device, and between it and page-locked host memory, the copies are asynchronous on the current stream:
    synchronise before the host reads ``dst`` or reuses ``src``. O(n * nbytes); without Triton with at most 64 MiB of
    temporary memory.

    Args:
        src: uint8 ``[N, nbytes]``; rows may be strided, the bytes of a row are contiguous.
        dst: uint8 ``[M, nbytes]``, likewise.
        pairs: int64 ``[n, 2]`` on the CPU, or on the device of both tables (then there is no synchronisation with the
            host). The ids are not checked: the caller must give ids in range, no destination twice, and, if the tables
            share memory, no source row that is also a destination.

    Raises:
        BadInput: a tensor has a wrong shape, dtype, stride or device; nothing is written.

    Examples:
        >>> src, dst = torch.arange(12, dtype=torch.uint8).view(4, 3), torch.zeros(4, 3, dtype=torch.uint8)
        >>> copy_rows(src, dst, torch.tensor([[3, 0], [1, 2]]))
        >>> dst.tolist()
        [[9, 10, 11], [0, 0, 0], [3, 4, 5], [0, 0, 0]]
    """
    copy_tables([(src, dst)], pairs)


def copy_tables(
    tables: Sequence[tuple[Tensor, Tensor]], pairs: Tensor, programs: int = 0, to_device: ToDevice | None = None
) -> None:
    """Do what ``copy_rows(src, dst, pairs)`` does for every (src, dst) of ``tables``: on a GPU in one launch, or none.

    All sources are on one device, and so are all destinations. ``programs``: how many programs do the work on a GPU (0: as
    many as there are pieces of it; ``FEW`` leave most of the device to others). ``to_device``: sends where the rows lie to the
    device; default: from pageable memory, for which the host waits. Raises BadInput like ``copy_rows``.
    """
    for src, dst in tables:
        _check(src, dst, pairs)
    tables = [(src, dst) for src, dst in tables if src.shape[1]]
    if not tables or not pairs.numel():
        return
    if not _is_for_kernel(tables, pairs):
        for src, dst in tables:
            _copy(src, dst, pairs)
        return
    rows = [(*map(Tensor.data_ptr, pair), *(one.stride(0) for one in pair), pair[0].shape[1], 0) for pair in tables]
    device = next((one.device for one in tables[0] if one.device.type != "cpu"), pairs.device)
    there = pairs.device.type != "cpu"
    given = np.empty((0, 2), np.int64) if there else pairs.numpy()
    regions, placed = Regions.of(np.array(rows, np.int64), given, to_device or partial(on_device, device=device))
    copy_regions(regions, pairs.contiguous() if there else placed, programs)


def _is_for_kernel(tables: Sequence[tuple[Tensor, Tensor]], pairs: Tensor) -> bool:
    """Return whether the kernel reaches both sides of ``tables`` and is at least as fast as other ways."""
    src, dst = tables[0]
    device = src.device if src.device.type != "cpu" else dst.device
    if backend(device.type) != "triton":
        return False
    if src.device == dst.device:
        return True
    if not all(_is_locked(one) for pair in tables for one in pair if one.device.type == "cpu"):
        return False
    nbytes = max(src.shape[1] for src, _ in tables)
    return nbytes < LOCKED_CROSSING_NBYTES and len(pairs) * nbytes < len(_runs(pairs)) * LOCKED_CROSSING_NBYTES


def _is_locked(table: Tensor) -> bool:
    """Return whether ``table``, on the CPU, is page-locked: from its first byte to its last."""
    return table.is_pinned() and flat_view(table)[-1:].is_pinned()


def _copy(src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    """Do what ``copy_rows`` does without a kernel of our own: its reference."""
    crossing, nbytes = src.device != dst.device, src.shape[1]
    is_large = nbytes >= PAST_CACHES_ROW and len(pairs) * nbytes >= PAST_CACHES and not crossing
    if is_large and backend(src.device.type, has_numba=True) == "numba":
        from kvpagoda.core.lanes import copy_spans

        spans = pairs.numpy() * np.array([src.stride(0), dst.stride(0)])
        copy_spans(flat_view(src).numpy(), flat_view(dst).numpy(), spans, nbytes)
        return
    if pairs.device.type == "cpu" and (crossing or src.device.type == "cpu"):
        runs = _runs(pairs)
        if len(pairs) * nbytes >= len(runs) * (CROSSING_NBYTES if crossing else RUN_NBYTES):
            return _copy_slices(src, dst, runs)
    copy_gathered(src, dst, pairs)


def _check(src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    """Raise BadInput unless the arguments are what ``copy_rows`` takes."""
    for name, table in (("src", src), ("dst", dst)):
        if table.dtype != torch.uint8 or table.ndim != 2 or (table.shape[1] > 1 and table.stride(1) != 1):
            raise BadInput(
                f"copy_rows: {name} must be uint8 [rows, nbytes] with contiguous rows, "
                f"got {table.dtype} {list(table.shape)} with strides {table.stride()}"
            )
    if src.shape[1] != dst.shape[1]:
        raise BadInput(f"copy_rows: rows of {src.shape[1]} bytes cannot be copied to rows of {dst.shape[1]} bytes")
    if pairs.dtype != torch.int64 or pairs.ndim != 2 or pairs.shape[1] != 2:
        raise BadInput(f"copy_rows: pairs must be int64 [n, 2], got {pairs.dtype} {list(pairs.shape)}")
    if pairs.device.type != "cpu" and not src.device == dst.device == pairs.device:
        raise BadInput(f"copy_rows: pairs on {pairs.device} need src and dst there, got {src.device} and {dst.device}")


def _runs(pairs: Tensor) -> NDArray[np.int64]:
    """Return int64 ``[k, 3]``: first src row, first dst row and length of runs in which both ids increase by one."""
    ids: NDArray[np.int64] = pairs.numpy()
    unit_steps = (ids[1:, 0] - ids[:-1, 0] == 1) & (ids[1:, 1] - ids[:-1, 1] == 1)
    starts = np.concatenate([[0], np.flatnonzero(~unit_steps) + 1])
    return np.column_stack([ids[starts], np.diff(starts, append=len(ids))])


def _copy_slices(src: Tensor, dst: Tensor, runs: NDArray[np.int64]) -> None:
    """Copy each run (first src row, first dst row, length) as one slice."""
    if src.device.type == dst.device.type == "cpu":
        # NumPy's slice copy has a third of torch's overhead.
        source, target = src.numpy(), dst.numpy()
        for s, d, length in runs.tolist():
            target[d : d + length] = source[s : s + length]
        return
    pinned = any(table.is_pinned() for table in (src, dst) if table.device.type == "cpu")
    for s, d, length in runs.tolist():
        dst[d : d + length].copy_(src[s : s + length], non_blocking=pinned)


def copy_gathered(src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    """Gather rows of ``src``, at most ``STAGE_NBYTES`` at a time, and scatter them to ``dst``; as ``copy_rows`` does with
    short runs."""
    step = max(1, STAGE_NBYTES.get(src.device.type, 64 << 20) // src.shape[1])
    from_ids, to_ids = pairs[:, 0].contiguous().to(src.device), pairs[:, 1].contiguous().to(dst.device)
    source, target = as_ints(src, dst)
    for start in range(0, len(pairs), step):
        rows = source.index_select(0, from_ids[start : start + step])
        target.index_copy_(0, to_ids[start : start + step], rows.to(dst.device))


class Regions(NamedTuple):
    """Where parts of rows lie in two tables, in pieces that one program moves at a time.

    ``table``: int64 ``[pieces, 6]`` on the device: address of row 0 of the source and of the destination, bytes from row to
    row of each, bytes of the piece, and which list of pairs names its rows. ``width``: all of these are multiples of it, in
    bytes. ``chunk``: bytes that a program moves at a time, a power of two."""

    table: Tensor
    width: int
    chunk: int

    @classmethod
    def of(cls, rows: NDArray[np.int64], pairs: NDArray[np.int64], to_device: ToDevice) -> tuple[Regions, Tensor]:
        """Return int64 ``rows`` ``[n, 6]``, of any sizes, as regions on a device, and ``pairs`` there, in one call of
        ``to_device``."""
        width = int(np.gcd.reduce(np.append(rows[:, :5].ravel(), 16)))
        width = width & -width
        size = min(8, width)
        longest = 1 << (int(rows[:, 4].max()) - 1).bit_length()
        chunk = min(_WORDS * size, max(_LEAST_WORDS * size, longest))
        counts = -(-rows[:, 4] // chunk)
        pieces = np.repeat(rows, counts, axis=0)
        at = (np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)) * chunk
        pieces[:, :2] += at[:, None]
        pieces[:, 4] = np.minimum(pieces[:, 4] - at, chunk)
        placed = to_device(np.concatenate((pieces.ravel(), pairs.ravel())))
        return cls(placed[: pieces.size].view(-1, 6), width, chunk), placed[pieces.size :].view(pairs.shape)


def on_device(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return a copy of ``array`` on ``device``, for kernels of the current stream. Waits for that stream: a copy from pageable
    memory does. Where that costs something, send arrays through ``memory.staging``."""
    return torch.from_numpy(array).to(device)


def copy_regions(regions: Regions, pairs: Tensor, programs: int = 0) -> None:
    """Copy rows (s, d) of ``pairs`` in every region of ``regions``, in one launch on the current stream.

    ``pairs``: int64 ``[n, 2]`` on the device, or ``[lists, n, 2]`` where regions name different rows; (-1, -1) is skipped.
    Both tables of each region must be in memory that the device reaches: its own, or page-locked. Nothing is checked.
    ``programs``: see ``copy_tables``.
    """
    n, size = pairs.shape[-2], min(8, regions.width)
    num_pieces = n * len(regions.table)
    words = regions.chunk // size
    word = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[size]
    with torch.cuda.device_of(pairs):  # type: ignore[no-untyped-call]
        copy_regions_kernel[(min(num_pieces, programs or num_pieces),)](
            regions.table, pairs, n, len(regions.table),
            WORDS=words, WORD=word, SIZE=size, WIDTH=regions.width, num_warps=max(1, min(8, words // 256)),
        )  # fmt: skip


@jit(do_not_specialize=["n", "num_regions"])
def copy_regions_kernel(regions, pairs, n, num_regions, WORDS: tl.constexpr, WORD: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip # noqa: E501
    """Copy piece after piece, ``tl.num_programs(0)`` apart: neighbouring programs move neighbouring bytes of a row."""
    at = tl.arange(0, WORDS)
    for piece in range(tl.program_id(0), n * num_regions, tl.num_programs(0)):
        region = regions + 6 * (piece % num_regions)
        pair = pairs + 2 * (tl.load(region + 5) * n + piece // num_regions)
        row = tl.load(pair)
        if row >= 0:
            # Addresses are numbers: told that they are multiples of 16, the compiler joins two words into one access.
            source = (tl.load(region) + row * tl.load(region + 2)).to(tl.pointer_type(WORD))
            target = (tl.load(region + 1) + tl.load(pair + 1) * tl.load(region + 3)).to(tl.pointer_type(WORD))
            source, target = tl.multiple_of(source, WIDTH), tl.multiple_of(target, WIDTH)
            inside = at < tl.load(region + 4) // WIDTH * (WIDTH // SIZE)
            tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


def as_ints(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views of ``tensors`` in the widest integer dtype that fits the length, strides and start of all of them.

    Copying int64 words is up to eight times faster than copying bytes. The last axes of ``tensors`` must be contiguous
    and equally long in bytes. The views share memory and bits with ``tensors``; their last axis is shorter.

    >>> [(view.dtype, view.shape) for view in as_ints(torch.zeros(3, 24, dtype=torch.uint8))]
    [(torch.int64, torch.Size([3, 3]))]
    """
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(_fits(tensor, dtype.itemsize) for tensor in tensors):
            return tuple(tensor.view(dtype) for tensor in tensors)
    return tuple(tensor.view(torch.uint8) for tensor in tensors)


def _fits(tensor: Tensor, width: int) -> bool:
    """Return whether every row of ``tensor`` starts and ends at a multiple of ``width`` bytes."""
    size = tensor.element_size()
    steps = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return width >= size and all(step * size % width == 0 for step in steps)


def flat_view(table: Tensor) -> Tensor:
    """Return a flat view of ``table`` ``[n, k]`` from its first to its last element, gaps between rows included."""
    length = (len(table) - 1) * table.stride(0) + table.shape[1] if len(table) else 0
    return table.as_strided((length,), (1,))
