"""The Triton kernels of ``append_rows`` and ``gather_rows``: the bytes of the reference, compiled for its constants."""

from __future__ import annotations

from kvpagoda.kernels.dispatch import jit, tl
from kvpagoda.kernels.small_float_bits import (
    bfloat16_bits,
    e2m1_magnitude,
    e2m1_value,
    e4m3_magnitude,
    e4m3_value,
    e8m0_value,
)


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
    if CODES == "e4m3" or CODES == "e2m1":
        SIGN: tl.constexpr = 0x80 if CODES == "e4m3" else 8
        if TIES == "down":
            a -= tl.where((a > 0) & (a < 0x7F800000), 1, 0)
        code = e4m3_magnitude(a) if CODES == "e4m3" else e2m1_magnitude(a)
        code |= tl.where(bits < 0, SIGN, 0)
        if not MARKS:  # NaN: the sign of x's own, + of the scale's, - where 0 * inf or inf / inf made it
            negative = tl.where(x != x, x.to(tl.int32, bitcast=True) < 0, s == s)
            code = tl.where(y != y, tl.where(negative, SIGN, 0) | (0x7F if CODES == "e4m3" else 0), code)
        if not SIGNED_ZERO:
            code = tl.where(code == SIGN, 0, code)
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


@jit()
def _vector(  # type: ignore[no-untyped-def]
    numbers, slots, pages, num_slots, numbers_stride, page_stride,
    PAGE: tl.constexpr, HEADS: tl.constexpr, CELLS: tl.constexpr, WIDTH: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    CELL_STRIDE: tl.constexpr, DATA_ROW: tl.constexpr, SCALES_ROW: tl.constexpr, SCALES_AT: tl.constexpr,
):  # fmt: skip
    """What this program works on: whether its slot is one, its ``WIDTH`` numbers, and where its data and its scales begin."""
    i, head, cell = tl.program_id(0) // (HEADS * CELLS), tl.program_id(0) // CELLS % HEADS, tl.program_id(0) % CELLS
    slot = tl.load(slots + i)
    # int64 before any stride: a pool may be larger than 2 GiB.
    page = pages + (slot // PAGE).to(tl.int64) * page_stride + head * HEAD_STRIDE + cell * CELL_STRIDE
    row = (slot % PAGE).to(tl.int64)
    mine = numbers + i.to(tl.int64) * numbers_stride + (cell * HEADS + head) * WIDTH
    return (slot >= 0) & (slot < num_slots), mine, page + row * DATA_ROW, page + row * SCALES_ROW + SCALES_AT


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
    live, source, data, scales = _vector(
        rows, slots, pages, num_slots, rows_stride, page_stride, PAGE, HEADS, CELLS, GROUPS * GROUP + KEPT, HEAD_STRIDE,
        CELL_STRIDE, DATA_ROW, SCALES_ROW, SCALES_AT,
    )  # fmt: skip
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
    live, target, data, scales = _vector(
        out, slots, pages, num_slots, out_stride, page_stride, PAGE, HEADS, CELLS, GROUPS * GROUP + KEPT, HEAD_STRIDE,
        CELL_STRIDE, DATA_ROW, SCALES_ROW, SCALES_AT,
    )  # fmt: skip
    group = tl.arange(0, GROUPS_BLOCK)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (group < GROUPS)[:, None]

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
