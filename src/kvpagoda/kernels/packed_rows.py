"""Append rows to packed pages and gather them back, for every packed format: one launch each.

One program handles one vector: the row of one token, head and cell (K or V; formats of MLA and indexers have one). Each part
of a row has its place in the page (``layouts.packings``), which the kernel is compiled for:

    rows[i] -> codes, scales, kept  ->  pages[slots[i] // N]: row slots[i] mod N        a slot out of range: no row
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from kvpagoda.errors import BadInput
from kvpagoda.formats.rule import Rule
from kvpagoda.kernels.dispatch import backend, jit, tl, triton
from kvpagoda.kernels.small_float_bits import (
    bfloat16_bits,
    e2m1_magnitude,
    e2m1_value,
    e4m3_magnitude,
    e4m3_value,
    e8m0_value,
)
from kvpagoda.layouts.dialects import Dialect, dialect_for_heads
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

    All on one device. The bytes are those of ``pack``, with two differences, because a launch can refuse nothing: a row with
    inf or NaN that ``pack`` refuses gets codes 0 and NaN scales, and every bfloat16 is read exactly. Other bytes of ``pages``
    stay as they are. With Triton the launch allocates nothing and reads nothing back; it can be captured and replayed.

    Raises BadInput for an unknown format or dialect and a wrong shape, dtype, stride or device, before anything is written.
    O(n * D).

    >>> pages = torch.zeros(2, 1168, dtype=torch.uint8)
    >>> rows, slots = torch.ones(2, 512, dtype=torch.bfloat16), torch.tensor([3, -1])
    >>> append_rows(rows, slots, pages, "dsv4_584", page_size=2)
    >>> out = torch.zeros(2, 512)
    >>> gather_rows(pages, slots, out, "dsv4_584", page_size=2)
    >>> out.sum(1).tolist()
    [512.0, 0.0]
    """
    chosen = _as_written(format, dialect, head_dim)
    heads = _check("append_rows", rows, slots, pages, chosen, page_size)
    if rows.dtype != torch.bfloat16:
        raise BadInput(f"append_rows: rows must be bfloat16, got {rows.dtype}")
    if len(rows) == 0:
        return
    if backend(rows.device.type) == "triton":
        return _launch(append_rows_kernel, rows, slots, pages, append_constants(chosen, page_size, heads))
    live = ((slots >= 0) & (slots < len(pages) * page_size)).nonzero().squeeze(1)
    slot = slots.index_select(0, live).long()
    places = views(pages, chosen.packing, page_size, heads)
    for part, values in encode_rows(rows.index_select(0, live), chosen, heads).items():
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
    """Write the numbers in slot ``slots[i]`` of ``pages`` to row i of ``out``, in place; zeros for a slot out of range.

    ``out`` bfloat16 or float32 ``[n, D]``; its rows may be strided. The rest is as for ``append_rows``; a slot may stand there
    several times. Each number is code times scale in float32, rounded once to ``out``'s dtype. O(n * D).
    """
    chosen = _as_written(format, dialect, head_dim)
    heads = _check("gather_rows", out, slots, pages, chosen, page_size)
    if out.dtype not in (torch.bfloat16, torch.float32):
        raise BadInput(f"gather_rows: out must be bfloat16 or float32, got {out.dtype}")
    if len(out) == 0:
        return
    if backend(out.device.type) == "triton":
        half = out.dtype == torch.bfloat16
        bits = out.view(torch.int16) if half else out
        return _launch(gather_rows_kernel, bits, slots, pages, gather_constants(chosen, page_size, heads, half))
    live = (slots >= 0) & (slots < len(pages) * page_size)
    slot = torch.where(live, slots, 0).long()
    places = views(pages, chosen.packing, page_size, heads)
    parts = {part: view[slot // page_size, slot % page_size] for part, view in places.items()}
    out.copy_(decode_rows(parts, chosen, out.dtype).masked_fill_(~live[:, None], 0))


@lru_cache(maxsize=64)
def _as_written(format: str, dialect: str | None, head_dim: int | None) -> Dialect:
    """The dialect as a launch can write it: nothing is refused, and bfloat16 are read as every device reads them."""
    chosen = dialect_for_heads(format, dialect, head_dim)
    marks = "marked" if chosen.rule.non_finite == "refused" else chosen.rule.non_finite
    return replace(chosen, rule=replace(chosen.rule, non_finite=marks, subnormals="exact"))


def _check(name: str, rows: Tensor, slots: Tensor, pages: Tensor, dialect: Dialect, page_size: int) -> int:
    """The number of heads; raises BadInput unless the arguments are what ``name`` takes."""
    width, cells = dialect.packing.width, dialect.packing.cells
    if page_size < 1 or rows.ndim != 2 or rows.shape[1] < width or rows.shape[1] % width:
        raise BadInput(f"{name}: rows of this format are [n, {width}], pages hold at least one; got {list(rows.shape)}")
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
        raise BadInput(f"{name}: one device, got {rows.device}, {slots.device}, {pages.device}")
    steps = (pages.stride(0), pages.storage_offset())
    if any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in (rows, slots, pages)) or any(step % 4 for step in steps):
        raise BadInput(f"{name}: last axes must be contiguous, and pages begin at multiples of 4 bytes, got {steps}")
    return heads


def _launch(kernel: Any, rows: Tensor, slots: Tensor, pages: Tensor, constants: dict[str, Any]) -> None:
    """One program for each row, head and cell."""
    vectors, num_slots = constants["HEADS"] * constants["CELLS"], len(pages) * constants["PAGE"]
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        kernel[(len(rows) * vectors,)](
            rows, slots, pages, num_slots, rows.stride(0), pages.stride(0),
            **constants, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


@lru_cache(maxsize=256)
def append_constants(dialect: Dialect, page_size: int, heads: int) -> dict[str, Any]:
    """What ``append_rows_kernel`` is compiled for. The same object each time: do not change it."""
    return _geometry(dialect, page_size, heads) | _rule_constants(dialect.rule)


@lru_cache(maxsize=256)
def gather_constants(dialect: Dialect, page_size: int, heads: int, half: bool) -> dict[str, Any]:
    """The same of ``gather_rows_kernel``; ``half``: to bfloat16."""
    return _geometry(dialect, page_size, heads) | {"HALF": half}


def _geometry(dialect: Dialect, page_size: int, heads: int) -> dict[str, Any]:
    """Where the parts of a row lie, and what they are."""
    packing, rule = dialect.packing, dialect.rule
    if triton.next_power_of_2(packing.group) != packing.group:
        raise BadInput(f"groups of {packing.group} elements are no power of two; KVPAGODA_KERNELS=reference takes them")
    places = packing.places(page_size)
    codes, scales, kept = (places.get(part, places["codes"]) for part in ("codes", "scales", "kept"))
    return {
        "PAGE": page_size, "HEADS": heads, "CELLS": packing.cells, "GROUP": packing.group, "GROUPS": packing.groups,
        "GROUPS_BLOCK": triton.next_power_of_2(packing.groups + packing.scale_pad), "LANES": packing.scale_lanes,
        "SCALE_PAD": packing.scale_pad, "KEPT": packing.kept, "KEPT_NBYTES": packing.kept_nbytes,
        "HEAD_STRIDE": codes.head, "CELL_STRIDE": codes.cell, "DATA_ROW": codes.row, "SCALES_ROW": scales.row,
        "CODES_AT": codes.base, "SCALES_AT": scales.base, "KEPT_AT": kept.base, "CODES": rule.codes, "SCALE": rule.scale,
    }  # fmt: skip


def _rule_constants(rule: Rule) -> dict[str, Any]:
    """What only writing depends on."""
    return {
        "TOP": rule.top, "FLOOR": int(torch.tensor(rule.floor, dtype=torch.float32).view(torch.int32)),
        "FLOORS_SCALE": rule.floor_on == "scale", "POWER_OF_TWO": rule.has_power_of_two_scales,
        "SCALE_UP": rule.scale_up, "RECIPROCAL": rule.by == "reciprocal", "TIES": rule.ties,
        "SIGNED_ZERO": rule.signed_zero, "APART": rule.zero_groups == "apart", "MARKS": rule.non_finite == "marked",
        "SKIPS_NAN": rule.skips_nan,
    }  # fmt: skip


@jit()
def _scales(  # type: ignore[no-untyped-def]
    amax, CODES: tl.constexpr, SCALE: tl.constexpr, TOP: tl.constexpr, FLOOR: tl.constexpr,
    FLOORS_SCALE: tl.constexpr, POWER_OF_TWO: tl.constexpr, SCALE_UP: tl.constexpr,
):  # fmt: skip
    """int32 bits of amax -> (s float32, what is stored as int32: a byte or the bits of a float32), as ``scales_of``."""
    if POWER_OF_TWO:
        CARRY: tl.constexpr = 0x1FFFFF if CODES == "e4m3" else 0x3FFFFF  # of 448 = 1.75 * 2^8, 6 = 1.5 * 2^2
        LESS: tl.constexpr = 8 if CODES == "e4m3" else 2
        floored = tl.maximum(amax, 1 if FLOORS_SCALE else FLOOR)
        byte = ((tl.minimum(floored, 0x7F800000) + CARRY) >> 23) - LESS
        if FLOORS_SCALE:
            byte = tl.maximum(byte, (FLOOR + 0x7FFFFF) >> 23)
        byte = tl.maximum(byte, 0)
        bits = tl.where(byte == 0, 0x00400000, byte << 23)
        bits = tl.where(amax >= 0x7F800000, amax, bits)
        stored = bits
        if SCALE == "e8m0":
            stored = tl.where(amax >= 0x7F800000, 0xFF, byte)
    else:
        floored = amax if FLOORS_SCALE else tl.maximum(amax, FLOOR)
        bits = tl.div_rn(floored.to(tl.float32, bitcast=True), tl.full(amax.shape, TOP, tl.float32)).to(
            tl.int32, bitcast=True
        )
        if FLOORS_SCALE:
            bits = tl.maximum(bits, FLOOR)
        stored = bits
        if SCALE == "e4m3":
            stored = tl.where(bits > 0x7F800000, 0x7F, e4m3_magnitude(bits))
            if SCALE_UP:
                below = e4m3_value(stored).to(tl.int32, bitcast=True) < bits
                stored += tl.where(below & (stored < 0x7E), 1, 0)
            bits = e4m3_value(stored).to(tl.int32, bitcast=True)
    return bits.to(tl.float32, bitcast=True), stored


@jit()
def _codes(  # type: ignore[no-untyped-def]
    y, x, s, CODES: tl.constexpr, TIES: tl.constexpr, SIGNED_ZERO: tl.constexpr, MARKS: tl.constexpr,
):  # fmt: skip
    """float32 in units of their scale -> int32 codes, as ``quantise``."""
    bits = y.to(tl.int32, bitcast=True)
    a = bits & 0x7FFFFFFF
    if CODES == "e4m3":
        code = e4m3_magnitude(a) | ((bits >> 24) & 0x80)
        if not MARKS:  # NaN: the sign of x's own, + of the scale's, - where 0 * inf or inf / inf made it
            negative = tl.where(x != x, x.to(tl.int32, bitcast=True) < 0, s == s)
            code = tl.where(y != y, tl.where(negative, 0xFF, 0x7F), code)
    elif CODES == "e2m1":
        if TIES == "down":
            a -= tl.where((a > 0) & (a < 0x7F800000), 1, 0)
        code = e2m1_magnitude(a) | ((bits >> 28) & 8)
        if not MARKS:
            negative = tl.where(x != x, x.to(tl.int32, bitcast=True) < 0, s == s)
            code = tl.where(y != y, tl.where(negative, 8, 0), code)
        if not SIGNED_ZERO:
            code = tl.where(code == 8, 0, code)
    else:
        size = a.to(tl.float32, bitcast=True)
        whole = (size + 0.5).to(tl.int32) if TIES == "away" else (size + 8388608.0 - 8388608.0).to(tl.int32)
        LIMIT: tl.constexpr = 127 if CODES == "int8" else 7
        code = tl.where(bits < 0, -tl.minimum(whole, 128 if CODES == "int8" else 7), tl.minimum(whole, LIMIT))
        code &= 0xFF if CODES == "int8" else 0xF
    return code


@jit()
def _store_codes(  # type: ignore[no-untyped-def]
    target, code, group, inside, CODES: tl.constexpr, GROUP: tl.constexpr, GROUPS_BLOCK: tl.constexpr,
):  # fmt: skip
    """int32 codes [groups, elements] as bytes; two a byte where they have 4 bits, the even element low."""
    if CODES == "e2m1" or CODES == "int4":
        low, high = tl.split(tl.reshape(code, (GROUPS_BLOCK, GROUP // 2, 2)))
        at = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        tl.store(target + at, (low | (high << 4)).to(tl.uint8), mask=inside)
    else:
        at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        tl.store(target + at, code.to(tl.uint8), mask=inside)


@jit()
def _store_scales(  # type: ignore[no-untyped-def]
    target, stored, group, live, SCALE: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, SCALE_PAD: tl.constexpr,
):  # fmt: skip
    """One scale a group at its place, and zeros where the format pads them."""
    if SCALE == "float32":
        tl.store(target.to(tl.pointer_type(tl.int32)) + group, stored, mask=(group < GROUPS) & live)
    else:
        place = tl.where(group < GROUPS, group % LANES * (GROUPS // LANES) + group // LANES, group)
        value = tl.where(group < GROUPS, stored, 0)
        tl.store(target + place, value.to(tl.uint8), mask=(group < GROUPS + SCALE_PAD) & live)


@jit(do_not_specialize=["num_slots"])
def append_rows_kernel(  # type: ignore[no-untyped-def]
    rows, slots, pages, num_slots, rows_stride, page_stride,
    PAGE: tl.constexpr, HEADS: tl.constexpr, CELLS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr, LANES: tl.constexpr, SCALE_PAD: tl.constexpr, KEPT: tl.constexpr, KEPT_NBYTES: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, CELL_STRIDE: tl.constexpr, DATA_ROW: tl.constexpr, SCALES_ROW: tl.constexpr,
    CODES_AT: tl.constexpr, SCALES_AT: tl.constexpr, KEPT_AT: tl.constexpr, CODES: tl.constexpr, SCALE: tl.constexpr,
    TOP: tl.constexpr, FLOOR: tl.constexpr, FLOORS_SCALE: tl.constexpr, POWER_OF_TWO: tl.constexpr, SCALE_UP: tl.constexpr,
    RECIPROCAL: tl.constexpr, TIES: tl.constexpr, SIGNED_ZERO: tl.constexpr, APART: tl.constexpr, MARKS: tl.constexpr,
    SKIPS_NAN: tl.constexpr,
):  # fmt: skip
    """One program for each row, head and cell; the same bytes as the reference."""
    i, head, cell = tl.program_id(0) // (HEADS * CELLS), tl.program_id(0) // CELLS % HEADS, tl.program_id(0) % CELLS
    slot = tl.load(slots + i)
    live = (slot >= 0) & (slot < num_slots)
    # int64 before any stride: a pool may be larger than 2 GiB.
    page = pages + (slot // PAGE).to(tl.int64) * page_stride + head * HEAD_STRIDE + cell * CELL_STRIDE
    row = (slot % PAGE).to(tl.int64)
    source = rows + i.to(tl.int64) * rows_stride + (cell * HEADS + head) * (GROUPS * GROUP + KEPT)
    group = tl.arange(0, GROUPS_BLOCK)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (group < GROUPS)[:, None] & live

    loaded = tl.load(source + at, mask=inside, other=0.0)
    bits = loaded.to(tl.int16, bitcast=True).to(tl.int32) << 16
    sizes = bits & 0x7FFFFFFF
    if SKIPS_NAN:
        sizes = tl.where(sizes > 0x7F800000, 0, sizes)
    amax = tl.max(sizes, axis=1)
    s, stored = _scales(amax, CODES, SCALE, TOP, FLOOR, FLOORS_SCALE, POWER_OF_TWO, SCALE_UP)
    x = bits.to(tl.float32, bitcast=True)
    if POWER_OF_TWO or RECIPROCAL:  # x times the reciprocal of a power of two is x divided by it
        y = x * tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)[:, None]
    else:
        y = tl.div_rn(x, tl.broadcast_to(s[:, None], x.shape))
    if APART:
        y = tl.where((amax == 0)[:, None], x, tl.where(y != y, float("inf"), y))
    if MARKS:
        broken = amax >= 0x7F800000
        y = tl.where(broken[:, None], 0.0, y)
        stored = tl.where(broken, 0x7FC00000 if SCALE == "float32" else 0xFF if SCALE == "e8m0" else 0x7F, stored)
    code = _codes(y, x, tl.broadcast_to(s[:, None], x.shape), CODES, TIES, SIGNED_ZERO, MARKS)

    data, scales = page + row * DATA_ROW, page + row * SCALES_ROW + SCALES_AT
    _store_codes(data + CODES_AT, code, group, inside, CODES, GROUP, GROUPS_BLOCK)
    _store_scales(scales, stored, group, live, SCALE, GROUPS, LANES, SCALE_PAD)
    if KEPT > 0:
        at = tl.arange(0, KEPT)
        kept = tl.load(source + GROUPS * GROUP + at, mask=live, other=0.0).to(tl.int16, bitcast=True)
        if KEPT_NBYTES == 2:
            tl.store((data + KEPT_AT).to(tl.pointer_type(tl.int16)) + at, kept, mask=live)
        else:
            a = (kept.to(tl.int32) << 16) & 0x7FFFFFFF
            code = tl.where(a > 0x7F800000, 0x7F, e4m3_magnitude(a)) | ((kept.to(tl.int32) >> 8) & 0x80)
            tl.store(data + KEPT_AT + at, code.to(tl.uint8), mask=live)


@jit(do_not_specialize=["num_slots"])
def gather_rows_kernel(  # type: ignore[no-untyped-def]
    out, slots, pages, num_slots, out_stride, page_stride,
    PAGE: tl.constexpr, HEADS: tl.constexpr, CELLS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr, LANES: tl.constexpr, SCALE_PAD: tl.constexpr, KEPT: tl.constexpr, KEPT_NBYTES: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, CELL_STRIDE: tl.constexpr, DATA_ROW: tl.constexpr, SCALES_ROW: tl.constexpr,
    CODES_AT: tl.constexpr, SCALES_AT: tl.constexpr, KEPT_AT: tl.constexpr, CODES: tl.constexpr, SCALE: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """One program for each row, head and cell; the same numbers as the reference. HALF: ``out`` is bfloat16 as int16."""
    i, head, cell = tl.program_id(0) // (HEADS * CELLS), tl.program_id(0) // CELLS % HEADS, tl.program_id(0) % CELLS
    slot = tl.load(slots + i)
    live = (slot >= 0) & (slot < num_slots)
    page = pages + (slot // PAGE).to(tl.int64) * page_stride + head * HEAD_STRIDE + cell * CELL_STRIDE
    row = (slot % PAGE).to(tl.int64)
    target = out + i.to(tl.int64) * out_stride + (cell * HEADS + head) * (GROUPS * GROUP + KEPT)
    group = tl.arange(0, GROUPS_BLOCK)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (group < GROUPS)[:, None]

    data = page + row * DATA_ROW
    if CODES == "e2m1" or CODES == "int4":
        pairs = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        byte = tl.load(data + CODES_AT + pairs, mask=inside & live, other=0).to(tl.int32)
        code = tl.reshape(tl.join(byte & 0xF, byte >> 4), (GROUPS_BLOCK, GROUP))
    else:
        code = tl.load(data + CODES_AT + at, mask=inside & live, other=0).to(tl.int32)
    if CODES == "e4m3":
        value = e4m3_value(code)
    elif CODES == "e2m1":
        value = e2m1_value(code)
    else:
        value = ((code << (24 if CODES == "int8" else 28)) >> (24 if CODES == "int8" else 28)).to(tl.float32)

    scales = page + row * SCALES_ROW + SCALES_AT
    if SCALE == "float32":
        stored = tl.load(scales.to(tl.pointer_type(tl.int32)) + group, mask=(group < GROUPS) & live, other=0)
        s = stored.to(tl.float32, bitcast=True)
    else:
        lane = group % LANES * (GROUPS // LANES) + group // LANES
        stored = tl.load(scales + lane, mask=(group < GROUPS) & live, other=0).to(tl.int32)
        s = e8m0_value(stored) if SCALE == "e8m0" else e4m3_value(stored)
    value = value * s[:, None]
    if HALF:
        tl.store(target + at, bfloat16_bits(value).to(tl.int16), mask=inside)
    else:
        tl.store(target + at, value, mask=inside)
    if KEPT > 0:
        at = tl.arange(0, KEPT)
        if KEPT_NBYTES == 2:
            kept = tl.load((data + KEPT_AT).to(tl.pointer_type(tl.int16)) + at, mask=live, other=0)
            wide = (kept.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            wide = e4m3_value(tl.load(data + KEPT_AT + at, mask=live, other=0).to(tl.int32))
            kept = bfloat16_bits(wide).to(tl.int16)
        tl.store(target + GROUPS * GROUP + at, kept if HALF else wide)
