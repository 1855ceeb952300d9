"""Flatten a block table: write its used cells row after row, as FlashInfer's ``kv_indices``, on the table's device.

table  | 0 0 7 9 |   starts 8, 0 tokens, blocks of 4   ->   out  7 9 3 ..
       | 3 . . . |   indptr 0, 2, 3
"""

from __future__ import annotations

import torch

from kvpagoda.core.kernels.dispatch import backend, jit, tl, triton
from kvpagoda.errors import BadInput

Tensor = torch.Tensor
CELLS = 1024
"""Number of cells that one program copies."""


def flatten_table(table: Tensor, starts: Tensor, indptr: Tensor, out: Tensor, block_size: int) -> None:
    """Write the used cells of row i of ``table`` to ``out[indptr[i] : indptr[i + 1]]``, in place.

    They begin at ``table[i, starts[i] // block_size]``; their number is ``indptr[i + 1] - indptr[i]``.

    ``table``   int32 ``[B, columns]``: rows may be strided, cells of a row are contiguous
    ``starts``  int32 ``[B]``: the position of the first token of each row's first cell
    ``indptr``  int32 ``[B + 1]``, ascending from 0
    ``out``     int32 ``[n]``, at least ``indptr[-1]`` long; the entries after that are undefined afterwards

    All on one device. There is no synchronisation with the host, and with Triton no allocation: the launch depends only
    on shapes, so a CUDA graph can capture it. Raises BadInput for a wrong shape, dtype, stride or device, before
    anything is written. The values are not checked. O(cells).

    >>> table = torch.tensor([[0, 0, 7, 9], [3, 0, 0, 0]], dtype=torch.int32)
    >>> starts, indptr = (torch.tensor(values, dtype=torch.int32) for values in ([8, 0], [0, 2, 3]))
    >>> out = torch.zeros(3, dtype=torch.int32)
    >>> flatten_table(table, starts, indptr, out, block_size=4)
    >>> out.tolist()
    [7, 9, 3]
    """
    rows = len(table) if table.ndim == 2 else -1
    for name, tensor, shape in (
        ("table", table, (rows, table.shape[-1])),
        ("starts", starts, (rows,)),
        ("indptr", indptr, (rows + 1,)),
        ("out", out, (out.numel(),)),
    ):
        if tensor.dtype != torch.int32 or tensor.shape != shape or tensor.device != table.device:
            raise BadInput(
                f"flatten_table: {name} must be int32 {list(shape)} on {table.device}, "
                f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}",
                field=name, needed=list(shape), available=list(tensor.shape),
            )  # fmt: skip
    if block_size < 1 or any(
        tensor.shape[-1] > 1 and tensor.stride(-1) != 1 for tensor in (table, starts, indptr, out)
    ):
        text = f"flatten_table needs contiguous cells and block_size >= 1, got {table.stride()} and {block_size}"
        raise BadInput(text, needed=table.stride(), available=block_size)
    if out.numel() and table.numel():
        run = _triton if backend(table.device.type) == "triton" else _reference
        run(table, starts, indptr, out, block_size)


def _reference(table: Tensor, starts: Tensor, indptr: Tensor, out: Tensor, block_size: int) -> None:
    """The definition of ``flatten_table``, in torch, on any device. Allocates temporaries."""
    place = torch.arange(len(out), dtype=torch.int32, device=out.device)
    row = torch.searchsorted(indptr[1:], place, right=True).clamp(max=len(table) - 1)
    column = place - indptr[row] + starts[row] // block_size
    out.copy_(table[row, column.clamp(max=table.shape[1] - 1).long()])


def _triton(table: Tensor, starts: Tensor, indptr: Tensor, out: Tensor, block_size: int) -> None:
    """Launch the kernel, one program for each row and ``CELLS`` of its columns."""
    grid = len(table), triton.cdiv(table.shape[1], CELLS)
    with torch.cuda.device_of(table):  # type: ignore[no-untyped-call]
        flatten_table_kernel[grid](table, starts, indptr, out, table.stride(0), block_size, CELLS=CELLS, num_warps=4)


@jit()
def flatten_table_kernel(table, starts, indptr, out, stride, block_size, CELLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy up to ``CELLS`` cells of one row per program."""
    row = tl.program_id(0)
    begin, end = tl.load(indptr + row), tl.load(indptr + row + 1)
    cells = tl.program_id(1) * CELLS + tl.arange(0, CELLS)
    here = cells < end - begin
    # To int64 before multiplying by the stride: a table may have more than 2^31 cells.
    source = table + row.to(tl.int64) * stride + tl.load(starts + row) // block_size
    tl.store(out + begin + cells, tl.load(source + cells, mask=here), mask=here)
