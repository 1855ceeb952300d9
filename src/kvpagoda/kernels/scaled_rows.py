"""Append rows to a field with one scale for a whole tensor, and gather rows from it.

    rows[i] / scale  ->  field[slots[i] // N, slots[i] mod N]  ->  codes * scale          N rows of a page

On a CPU one loop casts and copies (``lanes.scaled``). On a GPU these are torch operations: an engine's own kernel writes
such rows into the tensors of ``kernel_tensors`` itself, so this path serves views and tests, and needs no kernel of ours.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from kvpagoda.formats.encoding import TENSOR, Encoding
from kvpagoda.formats.tensor_scale import from_codes, to_codes
from kvpagoda.kernels.dispatch import backend

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
    """Write row i of ``rows`` into row ``slots[i]`` of ``field``, in place.

    ``rows``   floating point ``[n, heads, dim]``; may be strided
    ``slots``  int32 or int64 ``[n]``: page * N + row; no slot twice; negative ones count from the end
    ``field``  ``[pages, N, heads, dim]`` of the float8 dtype of ``encoding``; may be strided, as any page layout has it

    The bytes do not depend on the device or the loop. Raises IndexError for a slot out of range on a
    CPU. O(elements).

    >>> field = torch.zeros(2, 4, 1, 2, dtype=torch.float8_e4m3fn)
    >>> append_scaled(torch.tensor([[[1.0, 900.0]]]), torch.tensor([6]), field, Encoding("fp8_e4m3", scale=2.0))
    >>> field[1, 2].float().tolist()
    [[0.5, 448.0]]
    """
    if rows.dtype == torch.bfloat16 and (places := _places(rows, field, encoding)):
        assert encoding.scale is not None
        top = TENSOR[encoding.name][1]
        odd = _loop({"TOP": top}, rows.view(torch.int16), slots, field, encoding, encoding.scale, places)
        rows, slots = rows[odd], slots[odd]
    if len(slots):
        field.view(torch.uint8)[_cells(slots, field)] = to_codes(encoding, rows).view(torch.uint8)


def gather_scaled(field: Tensor, slots: Tensor, out: Tensor, encoding: Encoding) -> None:
    """Decode row ``slots[i]`` of ``field`` into row i of ``out``, in place.

    ``out``: bfloat16, float16 or float32 ``[n, heads, dim]``. The other arguments and errors are as for
    ``append_scaled``, but a slot may occur several times. Each number is code times scale in float32, rounded once to
    ``out``'s dtype. O(elements).
    """
    half = out.dtype == torch.bfloat16
    if (half or out.dtype == torch.float32) and (places := _places(out, field, encoding)):
        assert encoding.scale is not None
        factor = encoding.scale * TOO_SMALL[CODES[encoding.name]]
        odd = _loop({"HALF": half}, out.view(torch.int16) if half else out, slots, field, encoding, factor, places)
        if len(odd):
            out[odd] = _gathered(field, slots[odd], encoding, out.dtype)
        return
    out.copy_(_gathered(field, slots, encoding, out.dtype))


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
    from kvpagoda.lanes import Places, run_loop

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
