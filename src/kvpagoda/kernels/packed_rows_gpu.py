"""The Triton kernels of ``append_rows`` and ``gather_rows``, compiled for constants ``C``: the reference's bytes."""

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
def _scales(amax, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 bits of amax -> (s float32, s as stored, int32: a byte or the bits of a float32), as in ``scales_of``."""
    if C.POWER_OF_TWO:
        CARRY: tl.constexpr = 0x1FFFFF if C.CODES == "e4m3" else 0x3FFFFF  # of 448 = 1.75 * 2^8, 6 = 1.5 * 2^2
        LESS: tl.constexpr = 8 if C.CODES == "e4m3" else 2
        floored = tl.maximum(amax, 1 if C.FLOORS_SCALE else C.FLOOR)
        byte = ((tl.minimum(floored, 0x7F800000) + CARRY) >> 23) - LESS
        if C.FLOORS_SCALE:
            byte = tl.maximum(byte, (C.FLOOR + 0x7FFFFF) >> 23)
        byte = tl.maximum(byte, 0)
        bits = tl.where(byte == 0, 0x00400000, byte << 23)
        bits = tl.where(amax >= 0x7F800000, amax, bits)
        stored = bits
        if C.SCALE == "e8m0":
            stored = tl.where(amax >= 0x7F800000, 0xFF, byte)
    else:
        floored = amax if C.FLOORS_SCALE else tl.maximum(amax, C.FLOOR)
        bits = tl.div_rn(floored.to(tl.float32, bitcast=True), tl.full(amax.shape, C.TOP, tl.float32)).to(
            tl.int32, bitcast=True
        )
        if C.FLOORS_SCALE:
            bits = tl.maximum(bits, C.FLOOR)
        stored = bits
        if C.SCALE == "e4m3":
            stored = tl.where(bits > 0x7F800000, 0x7F, e4m3_magnitude(bits))
            if C.SCALE_UP:
                below = e4m3_value(stored).to(tl.int32, bitcast=True) < bits
                stored += tl.where(below & (stored < 0x7E), 1, 0)
            bits = e4m3_value(stored).to(tl.int32, bitcast=True)
    return bits.to(tl.float32, bitcast=True), stored


@jit()
def _codes(y, x, s, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 in units of their scale -> int32 codes, as in ``quantise``."""
    bits = y.to(tl.int32, bitcast=True)
    a = bits & 0x7FFFFFFF
    if C.CODES == "e4m3" or C.CODES == "e2m1":
        SIGN: tl.constexpr = 0x80 if C.CODES == "e4m3" else 8
        if C.TIES == "down":
            a -= tl.where((a > 0) & (a < 0x7F800000), 1, 0)
        code = e4m3_magnitude(a) if C.CODES == "e4m3" else e2m1_magnitude(a)
        code |= tl.where(bits < 0, SIGN, 0)
        if not C.MARKS:  # NaN gets the sign of x if x is NaN, + if the scale is NaN, - after 0 * inf or inf / inf
            negative = tl.where(x != x, x.to(tl.int32, bitcast=True) < 0, s == s)
            code = tl.where(y != y, tl.where(negative, SIGN, 0) | (0x7F if C.CODES == "e4m3" else 0), code)
        if not C.SIGNED_ZERO:
            code = tl.where(code == SIGN, 0, code)
    else:
        size = a.to(tl.float32, bitcast=True)
        whole = (size + 0.5).to(tl.int32) if C.TIES == "away" else (size + 8388608.0 - 8388608.0).to(tl.int32)
        LIMIT: tl.constexpr = 127 if C.CODES == "int8" else 7
        code = tl.where(bits < 0, -tl.minimum(whole, 128 if C.CODES == "int8" else 7), tl.minimum(whole, LIMIT))
        code &= 0xFF if C.CODES == "int8" else 0xF
    return code


@jit()
def _store_codes(target, code, group, inside, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store int32 codes [groups, elements] as bytes; codes of 4 bits two per byte, the even element low."""
    if C.CODES == "e2m1" or C.CODES == "int4":
        low, high = tl.split(tl.reshape(code, (C.GROUPS_BLOCK, C.GROUP // 2, 2)))
        index = group[:, None] * (C.GROUP // 2) + tl.arange(0, C.GROUP // 2)[None, :]
        tl.store(target + index, (low | (high << 4)).to(tl.uint8), mask=inside)
    else:
        index = group[:, None] * C.GROUP + tl.arange(0, C.GROUP)[None, :]
        tl.store(target + index, code.to(tl.uint8), mask=inside)


@jit()
def _store_scales(target, stored, group, live, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the scale of each group at its place, and zeros in the padding after them."""
    if C.SCALE == "float32":
        tl.store(target.to(tl.pointer_type(tl.int32)) + group, stored, mask=(group < C.GROUPS) & live)
    else:
        place = tl.where(group < C.GROUPS, group % C.LANES * (C.GROUPS // C.LANES) + group // C.LANES, group)
        value = tl.where(group < C.GROUPS, stored, 0)
        tl.store(target + place, value.to(tl.uint8), mask=(group < C.GROUPS + C.SCALE_PAD) & live)


@jit()
def _vector(numbers, slots, pages, num_slots, numbers_stride, page_stride, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a program's work: is its slot in range, pointers to its ``C.WIDTH`` numbers, its data and its scales."""
    i, vector = tl.program_id(0) // (C.HEADS * C.CELLS), tl.program_id(0) % (C.HEADS * C.CELLS)
    head, cell = vector // C.CELLS, vector % C.CELLS
    slot = tl.load(slots + i)
    # To int64 before multiplying by strides: a pool may be larger than 2 GiB.
    page = pages + (slot // C.PAGE).to(tl.int64) * page_stride + head * C.HEAD_STRIDE + cell * C.CELL_STRIDE
    row = (slot % C.PAGE).to(tl.int64)
    mine = numbers + i.to(tl.int64) * numbers_stride + (cell * C.HEADS + head) * C.WIDTH
    return (slot >= 0) & (slot < num_slots), mine, page + row * C.DATA_ROW, page + row * C.SCALES_ROW + C.SCALES_AT


@jit(do_not_specialize=["num_slots"])
def append_rows_kernel(rows, slots, pages, num_slots, rows_stride, page_stride, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write one row, head and cell per program; the bytes are those of the reference."""
    live, source, data, scales = _vector(rows, slots, pages, num_slots, rows_stride, page_stride, C)
    group = tl.arange(0, C.GROUPS_BLOCK)
    index = group[:, None] * C.GROUP + tl.arange(0, C.GROUP)[None, :]
    inside = (group < C.GROUPS)[:, None] & live

    loaded = tl.load(source + index, mask=inside, other=0.0)
    bits = loaded.to(tl.int16, bitcast=True).to(tl.int32) << 16
    sizes = bits & 0x7FFFFFFF
    if C.SKIPS_NAN:
        sizes = tl.where(sizes > 0x7F800000, 0, sizes)
    amax = tl.max(sizes, axis=1)
    s, stored = _scales(amax, C)
    x = bits.to(tl.float32, bitcast=True)
    if C.POWER_OF_TWO or C.RECIPROCAL:  # for a power of two, x * (1 / s) equals x / s
        y = x * tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)[:, None]
    else:
        y = tl.div_rn(x, tl.broadcast_to(s[:, None], x.shape))
    if C.APART:
        y = tl.where((amax == 0)[:, None], x, tl.where(y != y, float("inf"), y))
    if C.MARKS:
        broken = amax >= 0x7F800000
        y = tl.where(broken[:, None], 0.0, y)
        stored = tl.where(broken, 0x7FC00000 if C.SCALE == "float32" else 0xFF if C.SCALE == "e8m0" else 0x7F, stored)
    code = _codes(y, x, tl.broadcast_to(s[:, None], x.shape), C)

    _store_codes(data + C.CODES_AT, code, group, inside, C)
    _store_scales(scales, stored, group, live, C)
    if C.KEPT > 0:
        index = tl.arange(0, C.KEPT)
        kept = tl.load(source + C.GROUPS * C.GROUP + index, mask=live, other=0.0).to(tl.int16, bitcast=True)
        if C.KEPT_NBYTES == 2:
            tl.store((data + C.KEPT_AT).to(tl.pointer_type(tl.int16)) + index, kept, mask=live)
        else:
            a = (kept.to(tl.int32) << 16) & 0x7FFFFFFF
            code = tl.where(a > 0x7F800000, 0x7F, e4m3_magnitude(a)) | ((kept.to(tl.int32) >> 8) & 0x80)
            tl.store(data + C.KEPT_AT + index, code.to(tl.uint8), mask=live)


@jit(do_not_specialize=["num_slots"])
def gather_rows_kernel(out, slots, pages, num_slots, out_stride, page_stride, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read one row, head and cell per program, as the reference does. C.HALF: ``out`` is bfloat16 viewed as int16."""
    live, target, data, scales = _vector(out, slots, pages, num_slots, out_stride, page_stride, C)
    group = tl.arange(0, C.GROUPS_BLOCK)
    index = group[:, None] * C.GROUP + tl.arange(0, C.GROUP)[None, :]
    inside = (group < C.GROUPS)[:, None]

    if C.CODES == "e2m1" or C.CODES == "int4":
        pairs = group[:, None] * (C.GROUP // 2) + tl.arange(0, C.GROUP // 2)[None, :]
        byte = tl.load(data + C.CODES_AT + pairs, mask=inside & live, other=0).to(tl.int32)
        code = tl.reshape(tl.join(byte & 0xF, byte >> 4), (C.GROUPS_BLOCK, C.GROUP))
    else:
        code = tl.load(data + C.CODES_AT + index, mask=inside & live, other=0).to(tl.int32)
    if C.CODES == "e4m3":
        value = e4m3_value(code)
    elif C.CODES == "e2m1":
        value = e2m1_value(code)
    else:
        value = ((code << (24 if C.CODES == "int8" else 28)) >> (24 if C.CODES == "int8" else 28)).to(tl.float32)

    if C.SCALE == "float32":
        stored = tl.load(scales.to(tl.pointer_type(tl.int32)) + group, mask=(group < C.GROUPS) & live, other=0)
        s = stored.to(tl.float32, bitcast=True)
    else:
        lane = group % C.LANES * (C.GROUPS // C.LANES) + group // C.LANES
        stored = tl.load(scales + lane, mask=(group < C.GROUPS) & live, other=0).to(tl.int32)
        s = e8m0_value(stored) if C.SCALE == "e8m0" else e4m3_value(stored)
    value = value * s[:, None]
    if C.HALF:
        tl.store(target + index, bfloat16_bits(value).to(tl.int16), mask=inside)
    else:
        tl.store(target + index, value, mask=inside)
    if C.KEPT > 0:
        index = tl.arange(0, C.KEPT)
        if C.KEPT_NBYTES == 2:
            kept = tl.load((data + C.KEPT_AT).to(tl.pointer_type(tl.int16)) + index, mask=live, other=0)
            wide = (kept.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            wide = e4m3_value(tl.load(data + C.KEPT_AT + index, mask=live, other=0).to(tl.int32))
            kept = bfloat16_bits(wide).to(tl.int16)
        tl.store(target + C.GROUPS * C.GROUP + index, kept if C.HALF else wide)
