"""Append rows to a field with one scale for a whole tensor, and gather rows from it.

    rows[i] / scale  ->  field[slots[i] // N, slots[i] mod N]  ->  codes * scale          N rows of a page

On a CPU one loop casts and copies (``lanes.scaled``), on a GPU one kernel (``scaled_rows_gpu``), of which a program takes a
tile of rows or heads. Engines' own kernels may write such rows into the tensors of ``kernel_tensors`` as well.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from kvpagoda.core.kernels.casts_gpu import casts
from kvpagoda.core.kernels.dispatch import backend
from kvpagoda.core.kernels.launch import LARGE, OPTIONS, Constants, block, tile, warm_ups
from kvpagoda.core.kernels.scaled_rows_gpu import append_scaled_kernel, gather_scaled_kernel
from kvpagoda.formats.encoding import TENSOR, Encoding
from kvpagoda.formats.tensor_scale import from_codes, to_codes

Tensor = torch.Tensor

MOST_SCALE = 2.0**100
"""The loops take scales from its inverse up to it."""
LONGEST_RUN, LEAST_WIDTH = 64, 16
"""The most elements that a loop casts at once, and the least elements of a head for which there is a loop."""
CACHE_LINE, FITS_CACHES = 64, 4 << 20
"""Bytes of a cache line, and of so many rows that they are stored past the caches: they would evict what is in them."""
CODES = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
"""Encoding -> the name of its codes in ``lanes``."""
TOO_SMALL = {"e4m3": 2.0**8, "e5m2": 1.0}
"""Codes -> the factor by which a loop reads them too small (``lanes.vectors.HALVES``)."""


def append_scaled(rows: Tensor, slots: Tensor, field: Tensor, encoding: Encoding) -> None:
    """Write row i of ``rows`` into row ``slots[i]`` of ``field``, in place. O(elements).

    The bytes do not depend on the device, the loop or the kernel. With Triton, bfloat16 rows are one launch, which
    allocates nothing and does not synchronise with the host: a CUDA graph can capture it, and a slot out of range marks
    a padded row, which is not written and reads as zeros. Elsewhere it raises IndexError.

    Args:
        rows: floating point ``[n, heads, dim]``; may be strided.
        slots: int32 or int64 ``[n]``, contiguous: page * N + row; no slot twice; negative ones count from the end.
        field: ``[pages, N, heads, dim]`` of the float8 dtype of ``encoding``; may be strided, as any page layout has
            it.
        encoding: of the rows.

    Raises:
        IndexError: a slot is out of range, where no Triton kernel runs.

    Examples:
        >>> field = torch.zeros(2, 4, 1, 2, dtype=torch.float8_e4m3fn)
        >>> append_scaled(torch.tensor([[[1.0, 900.0]]]), torch.tensor([6]), field, Encoding("fp8_e4m3", scale=2.0))
        >>> field[1, 2].float().tolist()
        [[0.5, 448.0]]
    """
    if rows.dtype == torch.bfloat16 and _launches(rows, slots, field):
        return launch("append", rows, slots, field, encoding)
    if rows.dtype == torch.bfloat16 and (places := _places(rows, field, encoding)):
        assert encoding.scale is not None
        top = TENSOR[encoding.name][1]
        odd = _loop({"TOP": top}, rows.view(torch.int16), slots, field, encoding, encoding.scale, places)
        rows, slots = rows[odd], slots[odd]
    if len(slots):
        field.view(torch.uint8)[_cells(slots, field)] = to_codes(encoding, rows).view(torch.uint8)


def gather_scaled(field: Tensor, slots: Tensor, out: Tensor, encoding: Encoding) -> None:
    """Decode row ``slots[i]`` of ``field`` into row i of ``out``, in place. O(elements).

    Each number is code times scale in float32, rounded once to ``out``'s dtype.

    Args:
        field: as ``append_scaled`` takes it.
        slots: as ``append_scaled``, but a slot may occur several times.
        out: bfloat16, float16 or float32 ``[n, heads, dim]``.
        encoding: of the rows.

    Raises:
        IndexError: as ``append_scaled``.
    """
    half = out.dtype == torch.bfloat16
    if (half or out.dtype == torch.float32) and _launches(out, slots, field):
        return launch("gather half" if half else "gather", out, slots, field, encoding)
    if (half or out.dtype == torch.float32) and (places := _places(out, field, encoding)):
        assert encoding.scale is not None
        factor = encoding.scale * TOO_SMALL[CODES[encoding.name]]
        odd = _loop({"HALF": half}, out.view(torch.int16) if half else out, slots, field, encoding, factor, places)
        if len(odd):
            out[odd] = _gathered(field, slots[odd], encoding, out.dtype)
        return
    out.copy_(_gathered(field, slots, encoding, out.dtype))


def _launches(numbers: Tensor, slots: Tensor, field: Tensor) -> bool:
    """Return whether there are rows for a kernel: it takes heads whose elements are contiguous, all on one device."""
    if not len(numbers) or not numbers.device == slots.device == field.device or backend(field.device.type) != "triton":
        return False
    return numbers.ndim == 3 and numbers.stride(2) == field.stride(3) == 1 and numbers.shape[1:] == field.shape[2:]


def launch(
    how: str, numbers: Tensor, slots: Tensor, field: Tensor, encoding: Encoding, is_large: bool | None = None
) -> None:
    """Launch the kernel of ``how``, "append", "gather" or "gather half" (to bfloat16), for at least one row.

    ``is_large``: how many vectors a program takes; None: what suits the rows.
    """
    n, (page, heads, width) = len(numbers), field.shape[1:]
    large = n * heads * width >= LARGE if is_large is None else is_large
    scale, is_factor = (encoding.scale, False) if how != "append" else _divisor(encoding)
    strides = field.stride(), numbers.stride(1)
    constants = constants_of(how, encoding.name, is_factor, (page, heads, width), *strides, casts(field.device), large)
    kernel = append_scaled_kernel if how == "append" else gather_scaled_kernel
    with torch.cuda.device_of(field):  # type: ignore[no-untyped-call]
        kernel[(-(-n * constants.HEADS // constants.TILE),)](
            numbers,
            slots,
            field.view(torch.uint8),
            n,
            len(field) * page,
            numbers.stride(0),
            scale,
            constants,
            **OPTIONS,
        )


def warm_up_scaled(field: Tensor, encoding: Encoding, how: str) -> None:
    """Compile the kernels of ``how`` that rows of any number need, with either dtype of slots. Writes nothing."""
    dtype = torch.float32 if how == "gather" else torch.bfloat16
    rows = torch.zeros(1, *field.shape[2:], dtype=dtype, device=field.device)
    for slots, is_large in warm_ups(len(field) * field.shape[1], field.device):
        if _launches(rows, slots, field):
            launch(how, rows, slots, field, encoding, is_large)


@lru_cache(maxsize=1024)
def constants_of(
    how: str, name: str, is_factor: bool, shape: tuple[int, ...], strides: tuple[int, ...], heads_apart: int, casts: int,
    is_large: bool,
) -> Constants:  # fmt: skip
    """Return the constants of the kernel of ``how`` for fields ``[pages, *shape]``: the same for the same arguments.

    ``heads_apart``: elements from head to head of the rows. Heads that are adjacent in both are one long head.
    """
    page, heads, width = shape
    if heads_apart == strides[2] == width:
        heads, width = 1, heads * width
    return Constants(
        CODES=CODES[name], IS_FACTOR=is_factor, HALF=how == "gather half", CASTS=casts, TILE=tile(block(width), 8, is_large),
        PAGE=page, HEADS=heads, WIDTH=width, WIDTH_BLOCK=block(width), ROWS_HEAD=heads_apart,
        FIELD_PAGE=strides[0], FIELD_ROW=strides[1], FIELD_HEAD=strides[2],
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _divisor(encoding: Encoding) -> tuple[float, bool]:
    """Return the scale, or its inverse and True if the product with it gives the codes of the division: for every bfloat16,
    which are so few that all are tried."""
    scale = np.float32(encoding.scale)
    with np.errstate(over="ignore"):
        inverse = float(np.float32(1) / scale)
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()
    product = to_codes(Encoding(encoding.name, scale=1.0), numbers * inverse)
    is_same = torch.equal(product.view(torch.uint8), to_codes(encoding, numbers).view(torch.uint8))
    return (inverse, True) if is_same else (float(scale), False)


def _gathered(field: Tensor, slots: Tensor, encoding: Encoding, dtype: torch.dtype) -> Tensor:
    """Return the rows ``slots`` as a new tensor: the reference of ``gather_scaled``."""
    return from_codes(encoding, field.view(torch.uint8)[_cells(slots, field)].view(field.dtype), dtype)


def _cells(slots: Tensor, field: Tensor) -> tuple[Tensor, Tensor]:
    """Return (page, row in it) of each slot; negative slots count from the end."""
    return torch.div(slots, field.shape[1], rounding_mode="floor").long(), (slots % field.shape[1]).long()


def _places(numbers: Tensor, field: Tensor, encoding: Encoding) -> dict[str, int] | None:
    """Return the places of rows for the loop (``lanes.Places``); None if the reference must process them."""
    _, *row = field.stride()
    assert encoding.scale is not None
    if (
        numbers.ndim != 3 or numbers.shape[1:] != field.shape[2:] or numbers.stride(2) != 1 or row[-1] != 1
        or not 1 / MOST_SCALE <= encoding.scale <= MOST_SCALE or backend(field.device.type, has_numba=True) != "numba"
    ):  # fmt: skip
        return None
    heads, width = field.shape[2:]
    if numbers.stride(1) == row[1] == width:
        heads, width = 1, heads * width
    if width < LEAST_WIDTH:
        return None
    return {
        "rows": numbers.stride(0), "numbers": numbers.stride(1), "heads": heads, "width": width, "page": field.shape[1],
        "pages": field.stride(0), "steps": row[0], "apart": row[1], "slots": len(field) * field.shape[1],
    }  # fmt: skip


def _loop(
    constants: dict[str, Any], numbers: Tensor, slots: Tensor, field: Tensor, encoding: Encoding, factor: float,
    places: dict[str, int],
) -> Tensor:  # fmt: skip
    """Run the loop. Return the int64 indices of the rows that the reference must process. Raises IndexError if a slot is
    out of range, and then nothing was done."""
    from kvpagoda.core.lanes import Places, run_loop

    written, width = field if "TOP" in constants else numbers, places["width"]
    starts = (written.data_ptr(), *(step * written.element_size() for step in written.stride()[:-1]))
    fills_lines = width % CACHE_LINE == 0 and all(start % CACHE_LINE == 0 for start in starts)
    streams = fills_lines and len(slots) * field[0, 0].numel() * written.element_size() > FITS_CACHES
    many = min(LONGEST_RUN, 1 << width.bit_length() - 1)
    loop = run_loop(json.dumps({"CODES": CODES[encoding.name], "MANY": many, "STREAMS": streams, **constants}))
    flat = _flat(numbers).numpy()
    flat = flat.view(np.uint16) if numbers.dtype == torch.int16 else flat
    memory = _flat(field.view(torch.uint8)).numpy()
    found = loop(flat, memory, slots.to(torch.int64).numpy(), np.float32(factor), Places(**places))
    if len(found) == 1 and found[0] < 0:
        outside = slots[(slots < -places["slots"]) | (slots >= places["slots"])]
        raise IndexError(f"slots {outside[:4].tolist()} are out of range for {places['slots']} rows")
    return torch.from_numpy(found)


def _flat(tensor: Tensor) -> Tensor:
    """Return a flat view of ``tensor`` from its first to its last element, gaps included."""
    length = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0
    return tensor.as_strided((length,), (1,))
