"""Append rows to packed pages and gather rows from them, for every packed format, in one launch each.

One program handles one vector: the row of one token, head and cell (K or V; formats of MLA and indexers have one cell).
The kernel is compiled for the places of the parts of a row in the page (``formats.dialects``):

    rows[i] -> codes, scales, kept  ->  pages[slots[i] // N]: row slots[i] mod N        a slot out of range: no row
"""

from __future__ import annotations

import json
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvpagoda.errors import BadInput
from kvpagoda.formats.dialects import Dialect, Rule
from kvpagoda.formats.encoding import Encoding, packed_row
from kvpagoda.kernels.copy_rows import flat_view
from kvpagoda.kernels.dispatch import backend
from kvpagoda.kernels.packed_rows_gpu import append_rows_kernel, gather_rows_kernel
from kvpagoda.layouts.packed import decode_rows, encode_rows, views

Tensor = torch.Tensor


def append_rows(
    rows: Tensor,
    slots: Tensor,
    pages: Tensor,
    format: str,
    *,
    page_size: int,
    dialect: str | None = None,
    head_dim: int | None = None,
) -> None:
    """Write row i of ``rows`` into slot ``slots[i]`` of ``pages``, in place; a slot out of range marks a padded row.

    ``rows``   bfloat16 ``[n, D]``, D as ``pack`` takes it; rows may be strided
    ``slots``  int32 or int64 ``[n]``: page * page_size + row; no slot twice
    ``pages``  uint8 ``[pages, stride]``: at least the payload; the stride and the start are multiples of 4 bytes

    All on one device. The bytes are those of ``pack`` with two differences. A row with inf or NaN that ``pack`` refuses
    gets codes 0 and NaN scales, because a launch cannot raise; and every bfloat16 is read exactly. Other bytes of
    ``pages`` stay as they are. With Triton the launch allocates nothing and does not synchronise with the host; a CUDA
    graph can capture it.

    Raises BadInput for an unknown format or dialect and a wrong shape, dtype, stride or device, before anything is
    written. O(n * D).

    >>> pages = torch.zeros(2, 1168, dtype=torch.uint8)
    >>> rows, slots = torch.ones(2, 512, dtype=torch.bfloat16), torch.tensor([3, -1])
    >>> append_rows(rows, slots, pages, "dsv4_584", page_size=2)
    >>> out = torch.zeros(2, 512)
    >>> gather_rows(pages, slots, out, "dsv4_584", page_size=2)
    >>> out.sum(1).tolist()
    [512.0, 0.0]
    """
    encoding = packed_row(format, dialect, head_dim)
    chosen = encoding.rules
    heads = _check("append_rows", rows, slots, pages, chosen, page_size)
    if rows.dtype != torch.bfloat16:
        raise BadInput(f"append_rows: rows must be bfloat16, got {rows.dtype}")
    if len(rows) == 0:
        return
    run = backend(rows.device.type, has_numba=chosen.packing.group % 2 == 0)
    if run == "triton":
        return _launch(append_rows_kernel, rows, slots, pages, append_constants(chosen, page_size, heads))
    if run == "numba":
        left = _loop(rows.view(torch.int16), slots, pages, *_compiled(chosen, page_size, heads))
        if not len(left):
            return
        rows, slots = rows[left], slots[left]
    live = ((slots >= 0) & (slots < len(pages) * page_size)).nonzero().squeeze(1)
    if not len(live):
        return
    slot = slots.index_select(0, live).long()
    places = views(pages, chosen.packing, page_size, heads)
    for part, values in encode_rows(rows.index_select(0, live), encoding).items():
        places[part][slot // page_size, slot % page_size] = values


def gather_rows(
    pages: Tensor,
    slots: Tensor,
    out: Tensor,
    format: str,
    *,
    page_size: int,
    dialect: str | None = None,
    head_dim: int | None = None,
) -> None:
    """Decode the row in slot ``slots[i]`` of ``pages`` into row i of ``out``, in place; zeros for a slot out of range.

    ``out`` bfloat16 or float32 ``[n, D]``; its rows may be strided. The other arguments and errors are as for
    ``append_rows``, but a slot may occur several times. Each number is code times scale in float32, rounded once to
    ``out``'s dtype. O(n * D).
    """
    encoding = packed_row(format, dialect, head_dim)
    chosen = encoding.rules
    heads = _check("gather_rows", out, slots, pages, chosen, page_size)
    if out.dtype not in (torch.bfloat16, torch.float32):
        raise BadInput(f"gather_rows: out must be bfloat16 or float32, got {out.dtype}")
    if len(out) == 0:
        return
    run, half = backend(out.device.type, has_numba=chosen.packing.group % 2 == 0), out.dtype == torch.bfloat16
    bits = out.view(torch.int16) if half else out
    if run == "triton":
        return _launch(gather_rows_kernel, bits, slots, pages, gather_constants(chosen, page_size, heads, half))
    if run == "numba":
        left = _loop(bits, slots, pages, *_compiled(chosen, page_size, heads, half))
        if len(left):
            out[left] = _gathered(slots[left], pages, page_size, encoding, heads, out.dtype)
        return
    out.copy_(_gathered(slots, pages, page_size, encoding, heads, out.dtype))


def _gathered(
    slots: Tensor, pages: Tensor, page_size: int, encoding: Encoding, heads: int, dtype: torch.dtype
) -> Tensor:
    """Return the rows in ``slots`` as a new tensor: the reference of ``gather_rows``."""
    live = (slots >= 0) & (slots < len(pages) * page_size)
    slot = torch.where(live, slots, 0).long()
    places = views(pages, encoding.rules.packing, page_size, heads)
    parts = {part: view[slot // page_size, slot % page_size] for part, view in places.items()}
    return decode_rows(parts, encoding, dtype).masked_fill_(~live[:, None], 0)


def _check(name: str, rows: Tensor, slots: Tensor, pages: Tensor, dialect: Dialect, page_size: int) -> int:
    """Return the number of heads. Raises BadInput unless operation ``name`` takes the arguments."""
    width, cells = dialect.packing.width, dialect.packing.cells
    if page_size < 1 or rows.ndim != 2 or rows.shape[1] < width or rows.shape[1] % width:
        raise BadInput(f"{name}: rows are [n, {width}], page_size at least 1; got {list(rows.shape)}, {page_size}")
    heads = rows.shape[1] // width
    if heads > 1 and cells == 1:
        raise BadInput(f"{name}: rows of this format are [n, {width}], got {list(rows.shape)}")
    if slots.dtype not in (torch.int32, torch.int64) or slots.shape != rows.shape[:1]:
        raise BadInput(f"{name}: slots must be int32 or int64 [{len(rows)}], got {slots.dtype} {list(slots.shape)}")
    payload = dialect.packing.payload_nbytes(page_size, heads)
    if pages.dtype != torch.uint8 or pages.ndim != 2 or pages.shape[1] < payload:
        raise BadInput(
            f"{name}: pages must be uint8 [pages, at least {payload}] for {page_size} rows, "
            f"got {pages.dtype} {list(pages.shape)}"
        )
    if not rows.device == slots.device == pages.device:
        raise BadInput(f"{name}: tensors must be on one device, got {rows.device}, {slots.device}, {pages.device}")
    steps = (pages.stride(0), pages.storage_offset())
    if any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in (rows, slots, pages)) or any(step % 4 for step in steps):
        raise BadInput(f"{name}: last axes must be contiguous, and pages begin at multiples of 4 bytes, got {steps}")
    return heads


@lru_cache(maxsize=256)
def _compiled(dialect: Dialect, page_size: int, heads: int, half: bool | None = None) -> tuple[Any, Any]:
    """Return the loop that numba compiles and the places of the parts. ``half``: None to append, else to gather."""
    from kvpagoda.lanes import Parts, vector_loop

    arguments = dialect, page_size, heads
    constants = vars(append_constants(*arguments) if half is None else gather_constants(*arguments, half))
    places = {name: constants.get(name.upper(), 0) for name in Parts._fields}
    of_loop = {name: constant for name, constant in constants.items() if name.lower() not in places}
    return vector_loop(json.dumps(of_loop)), Parts(**places)


def _loop(rows: Tensor, slots: Tensor, pages: Tensor, loop: Any, parts: Any) -> Tensor:
    """Run the loop of ``_compiled``. Return the int64 indices of the rows that the reference must process.

    ``rows``: float32, or bfloat16 viewed as int16.
    """
    numbers = flat_view(rows).numpy()
    numbers = numbers.view(np.uint16) if rows.dtype == torch.int16 else numbers
    places = parts._replace(rows=rows.stride(0), pages=pages.stride(0), slots=len(pages) * parts.page)
    return torch.from_numpy(loop(numbers, flat_view(pages).numpy(), slots.numpy(), places))


def _launch(kernel: Any, rows: Tensor, slots: Tensor, pages: Tensor, constants: Constants) -> None:
    """Launch ``kernel``, one program per row, head and cell. Raises BadInput if a float32 scale would be misaligned."""
    steps = (constants.SCALES_AT, constants.SCALES_ROW, constants.CELL_STRIDE, constants.HEAD_STRIDE)
    if constants.SCALE == "float32" and any(step % 4 for step in steps):
        raise BadInput(
            f"heads of {constants.WIDTH} elements: their scales do not begin at multiples of 4 bytes; set "
            f"KVPAGODA_KERNELS=reference for them"
        )
    vectors, num_slots = constants.HEADS * constants.CELLS, len(pages) * constants.PAGE
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        kernel[(len(rows) * vectors,)](
            rows, slots, pages, num_slots, rows.stride(0), pages.stride(0), constants, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


class Constants(SimpleNamespace):
    """The compile-time constants of a kernel. Hashable, so they must not change."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash((*vars(self).values(),))


@lru_cache(maxsize=256)
def append_constants(dialect: Dialect, page_size: int, heads: int) -> Constants:
    """Return the constants of ``append_rows_kernel``: the same object for the same arguments."""
    return Constants(**_geometry(dialect, page_size, heads), **_rule_constants(dialect.rule))


@lru_cache(maxsize=256)
def gather_constants(dialect: Dialect, page_size: int, heads: int, half: bool) -> Constants:
    """Return the constants of ``gather_rows_kernel``. ``half``: whether the output is bfloat16, else float32."""
    return Constants(**_geometry(dialect, page_size, heads), HALF=half)


def _geometry(dialect: Dialect, page_size: int, heads: int) -> dict[str, Any]:
    """Return the constants for the places of the parts of a row, and for its codes and scales."""
    packing, rule = dialect.packing, dialect.rule
    places = packing.places(page_size)
    codes, scales, kept = (places.get(part, places["codes"]) for part in ("codes", "scales", "kept"))
    return {
        "PAGE": page_size, "HEADS": heads, "CELLS": packing.cells, "WIDTH": packing.vector,
        "GROUP": packing.group, "GROUP_BLOCK": _block(packing.group),
        "GROUPS": packing.groups, "GROUPS_BLOCK": _block(packing.groups + packing.scale_pad),
        "LANES": packing.scale_lanes, "SCALE_PAD": packing.scale_pad,
        "KEPT": packing.kept, "KEPT_BLOCK": _block(packing.kept), "KEPT_NBYTES": packing.kept_nbytes,
        "HEAD_STRIDE": codes.head, "CELL_STRIDE": codes.cell, "DATA_ROW": codes.row, "SCALES_ROW": scales.row,
        "CODES_AT": codes.base, "SCALES_AT": scales.base, "KEPT_AT": kept.base, "CODES": rule.codes, "SCALE": rule.scale,
    }  # fmt: skip


def _block(size: int) -> int:
    """Return the least power of two that is not below ``size``: Triton has no other sizes."""
    return 1 << max(0, size - 1).bit_length()


def _rule_constants(rule: Rule) -> dict[str, Any]:
    """Return the constants that only writing needs: how scales and codes are computed."""
    return {
        "TOP": rule.top, "FLOOR": int(np.float32(rule.floor).view(np.int32)),
        "FLOORS_SCALE": rule.floor_on == "scale", "POWER_OF_TWO": rule.has_power_of_two_scales,
        "SCALE_UP": rule.scale_up, "RECIPROCAL": rule.by == "reciprocal", "INVERSE": rule.by == "inverse", "TIES": rule.ties,
        "SIGNED_ZERO": rule.signed_zero, "APART": rule.zero_groups == "apart", "MARKS": rule.non_finite == "marked",
        "SKIPS_NAN": rule.skips_nan,
    }  # fmt: skip
