"""Copy rows of bytes from one table to another, on one device or between two.

    pairs  (3, 7) (4, 8) (5, 9) (0, 2)   ->   runs  src[3:6] -> dst[7:10],  src[0:1] -> dst[2:3]

Long runs are copied as slices, each at the speed of one memcpy. On a CPU with numba, many rows are copied faster, with
stores that bypass the caches. Short runs are gathered and scattered as integer words, a few hundred KiB at a time,
because a slice copy has an overhead of about a microsecond on the CPU, and far more across devices.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvpagoda.errors import BadInput
from kvpagoda.kernels.dispatch import backend

Tensor = torch.Tensor

RUN_NBYTES = 16 << 10
"""Mean bytes of a run from which slices are faster on a CPU (measured: 8 to 16 KiB on an AMD EPYC)."""
CROSSING_NBYTES = 28 << 10
"""Mean bytes of a run from which slices are used between two devices (estimated, not measured)."""
PAST_CACHES_ROW, PAST_CACHES = 256, 8 << 20
"""Least bytes of a row, and of the whole copy, for which a CPU with numba bypasses its caches (measured, AMD EPYC)."""
STAGE_NBYTES = {"cpu": 512 << 10}
"""Device type of the source -> bytes that are gathered at a time; 64 MiB for other types."""


def copy_rows(src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    """Copy row ``src[s]`` to row ``dst[d]`` for every row (s, d) of ``pairs``, bit for bit.

    ``src`` uint8 ``[N, nbytes]``, ``dst`` uint8 ``[M, nbytes]``: rows may be strided, the bytes of a row are
    contiguous. ``pairs`` int64 ``[n, 2]`` on the CPU, or on the device of both tables (then there is no synchronisation
    with the host, and all rows are gathered). The ids are not checked: the caller must give ids in range, no
    destination twice, and, if the tables share memory, no source row that is also a destination.

    Between a device and page-locked host memory the copies are asynchronous on the current stream: synchronise before
    the host reads ``dst`` or reuses ``src``. Raises BadInput for a wrong shape, dtype, stride or device, before
    anything is written. O(n * nbytes), with at most 64 MiB of temporary memory.

    >>> src, dst = torch.arange(12, dtype=torch.uint8).view(4, 3), torch.zeros(4, 3, dtype=torch.uint8)
    >>> copy_rows(src, dst, torch.tensor([[3, 0], [1, 2]]))
    >>> dst.tolist()
    [[9, 10, 11], [0, 0, 0], [3, 4, 5], [0, 0, 0]]
    """
    _check(src, dst, pairs)
    if pairs.numel() == 0 or src.shape[1] == 0:
        return
    crossing, nbytes = src.device != dst.device, src.shape[1]
    is_large = nbytes >= PAST_CACHES_ROW and len(pairs) * nbytes >= PAST_CACHES and not crossing
    if is_large and backend(src.device.type, has_numba=True) == "numba":
        from kvpagoda.lanes import copy_spans

        spans = pairs.numpy() * np.array([src.stride(0), dst.stride(0)])
        copy_spans(flat_view(src).numpy(), flat_view(dst).numpy(), spans, nbytes)
        return
    if pairs.device.type == "cpu" and (crossing or src.device.type == "cpu"):
        runs = _runs(pairs)
        if len(pairs) * nbytes >= len(runs) * (CROSSING_NBYTES if crossing else RUN_NBYTES):
            return _copy_slices(src, dst, runs)
    _copy_indexed(src, dst, pairs)


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


def _copy_indexed(src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    """Gather rows of ``src``, at most ``STAGE_NBYTES`` at a time, and scatter them to ``dst``."""
    step = max(1, STAGE_NBYTES.get(src.device.type, 64 << 20) // src.shape[1])
    from_ids, to_ids = pairs[:, 0].contiguous().to(src.device), pairs[:, 1].contiguous().to(dst.device)
    source, target = as_ints(src, dst)
    for start in range(0, len(pairs), step):
        rows = source.index_select(0, from_ids[start : start + step])
        target.index_copy_(0, to_ids[start : start + step], rows.to(dst.device))


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
