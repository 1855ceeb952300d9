"""The Triton kernels that write and read encoded rows, compiled for constants ``C``: the reference's bytes.

Two kernels write: to slots of pages (``append_rows``), and to rings (``append_swa``). They differ in the addresses.
The casts are those of ``formats/small_floats.py``: integer arithmetic on the bits of a float32. Magnitudes are int32
bits without the sign. No cast rounds twice, and none depends on the architecture.
"""

from __future__ import annotations

from kvpagoda.kernels.dispatch import jit, tl


@jit()
def e4m3_magnitude(a):  # type: ignore[no-untyped-def]
    """int32 bits of |x| -> E4M3 code without its sign: nearest, ties to even, magnitudes above 448 to 448."""
    subnormal = (a.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = tl.minimum((a - 0x3BF80001 + ((a >> 20) & 1)) >> 20, 0x7E)
    return tl.where(a < 0x3C800000, subnormal, normal)


@jit()
def e2m1_magnitude(a):  # type: ignore[no-untyped-def]
    """int32 bits of |x| -> E2M1 code without its sign: nearest, ties to even, magnitudes above 6 to 6."""
    subnormal = (a.to(tl.float32, bitcast=True) + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    normal = tl.minimum((a - 0x3EE00001 + ((a >> 22) & 1)) >> 22, 7)
    return tl.where(a < 0x3F800000, subnormal, normal)


@jit()
def e4m3_value(code):  # type: ignore[no-untyped-def]
    """int32 E4M3 codes -> float32: the bits shifted to those of a float32, times 2^120, which is exact."""
    value = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    bits = value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)
    return tl.where((code & 0x7F) == 0x7F, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@jit()
def e2m1_value(code):  # type: ignore[no-untyped-def]
    """int32 E2M1 codes -> float32: the bits shifted as in ``e4m3_value``, times 2^126."""
    value = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return (value.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@jit()
def e8m0_value(byte):  # type: ignore[no-untyped-def]
    """int32 exponent bytes -> float32 2^(byte - 127), NaN for 255."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@jit()
def bfloat16_bits(x):  # type: ignore[no-untyped-def]
    """float32 -> int32 bits of the nearest bfloat16, ties to even; NaN to NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)


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
def _below(index, end, live):  # type: ignore[no-untyped-def]
    """Return ``index < end`` where ``live``, a scalar; False elsewhere."""
    return index < tl.where(
        live, end, 0
    )  # Triton 3.9's interpreter refuses masks in which a scalar condition is spread


@jit()
def _elements(group, live, SIZE: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (index of each element [groups, BLOCK] of groups of SIZE elements, whether it is there and ``live``)."""
    element = tl.arange(0, BLOCK)
    inside = _below(group, C.GROUPS, live)[:, None]
    if SIZE != BLOCK:
        inside = inside & (element < SIZE)[None, :]
    return group[:, None] * SIZE + element[None, :], inside


@jit()
def _store_codes(target, code, group, live, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store int32 codes [groups, elements] as bytes; codes of 4 bits two per byte, the even element low."""
    if C.CODES == "e2m1" or C.CODES == "int4":
        low, high = tl.split(tl.reshape(code, (C.GROUPS_BLOCK, C.GROUP_BLOCK // 2, 2)))
        index, inside = _elements(group, live, C.GROUP // 2, C.GROUP_BLOCK // 2, C)
        tl.store(target + index, (low | (high << 4)).to(tl.uint8), mask=inside)
    else:
        index, inside = _elements(group, live, C.GROUP, C.GROUP_BLOCK, C)
        tl.store(target + index, code.to(tl.uint8), mask=inside)


@jit()
def _store_scales(target, stored, group, live, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the scale of each group at its place, and zeros in the padding after them."""
    if C.SCALE == "float32":
        tl.store(target.to(tl.pointer_type(tl.int32)) + group, stored, mask=_below(group, C.GROUPS, live))
    else:
        place = tl.where(group < C.GROUPS, group % C.LANES * (C.GROUPS // C.LANES) + group // C.LANES, group)
        value = tl.where(group < C.GROUPS, stored, 0)
        tl.store(target + place, value.to(tl.uint8), mask=_below(group, C.GROUPS + C.SCALE_PAD, live))


@jit()
def _vector(  # type: ignore[no-untyped-def]
    numbers, slots, codes, scales, kept, num_slots, numbers_stride, codes_page, scales_page, kept_page, C: tl.constexpr
):
    """Return a program's work: is its slot in range, pointers to its ``C.WIDTH`` numbers, its codes, scales and kept."""
    i, vector = tl.program_id(0) // (C.HEADS * C.CELLS), tl.program_id(0) % (C.HEADS * C.CELLS)
    head, cell = vector // C.CELLS, vector % C.CELLS
    slot = tl.load(slots + i)
    # To int64 before multiplying by strides: a pool may be larger than 2 GiB.
    page, row = (slot // C.PAGE).to(tl.int64), (slot % C.PAGE).to(tl.int64)
    codes += page * codes_page + row * C.CODES_ROW + head * C.CODES_HEAD + cell * C.CODES_CELL
    scales += page * scales_page + row * C.SCALES_ROW + head * C.SCALES_HEAD + cell * C.SCALES_CELL
    kept += page * kept_page + row * C.KEPT_ROW + head * C.KEPT_HEAD + cell * C.KEPT_CELL
    mine = numbers + i.to(tl.int64) * numbers_stride + (cell * C.HEADS + head) * C.WIDTH
    return (slot >= 0) & (slot < num_slots), mine, codes, scales, kept


@jit()
def _write(source, codes, scales, kept, reads, writes, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Encode the vector at ``source`` and store its parts at ``codes``, ``scales`` and ``kept``, if ``writes``.

    Unless ``reads``, the vector counts as zeros.
    """
    group = tl.arange(0, C.GROUPS_BLOCK)
    index, inside = _elements(group, reads, C.GROUP, C.GROUP_BLOCK, C)
    loaded = tl.load(source + index, mask=inside, other=0.0)
    bits = loaded.to(tl.int16, bitcast=True).to(tl.int32) << 16
    sizes = bits & 0x7FFFFFFF
    if C.SKIPS_NAN:
        sizes = tl.where(sizes > 0x7F800000, 0, sizes)
    amax = tl.max(sizes, axis=1)
    s, stored = _scales(amax, C)
    x = bits.to(tl.float32, bitcast=True)
    if C.INVERSE:
        largest = tl.maximum(tl.minimum(amax, 0x7F800000), C.FLOOR).to(tl.float32, bitcast=True)
        y = x * tl.div_rn(tl.full(s.shape, C.TOP, tl.float32), largest)[:, None]
    elif C.POWER_OF_TWO or C.RECIPROCAL:  # for a power of two, x * (1 / s) equals x / s
        y = x * tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)[:, None]
    else:
        y = tl.div_rn(x, tl.broadcast_to(s[:, None], x.shape))
    if C.ZERO_GROUPS == "apart":
        y = tl.where((amax == 0)[:, None], x, tl.where(y != y, float("inf"), y))
    if C.ZERO_GROUPS == "zero":
        y = tl.where((s == 0)[:, None], x * 0.0, y)
    if C.MARKS:
        broken = amax >= 0x7F800000
        y = tl.where(broken[:, None], 0.0, y)
        stored = tl.where(broken, 0x7FC00000 if C.SCALE == "float32" else 0xFF if C.SCALE == "e8m0" else 0x7F, stored)
    code = _codes(y, x, tl.broadcast_to(s[:, None], x.shape), C)

    _store_codes(codes, code, group, writes, C)
    _store_scales(scales, stored, group, writes, C)
    if C.KEPT > 0:
        index = tl.arange(0, C.KEPT_BLOCK)
        there = _below(index, C.KEPT, reads)
        value = tl.load(source + C.GROUPS * C.GROUP + index, mask=there, other=0.0).to(tl.int16, bitcast=True)
        if C.KEPT_NBYTES == 2:
            tl.store(kept.to(tl.pointer_type(tl.int16)) + index, value, mask=_below(index, C.KEPT, writes))
        else:
            a = (value.to(tl.int32) << 16) & 0x7FFFFFFF
            code = tl.where(a > 0x7F800000, 0x7F, e4m3_magnitude(a)) | ((value.to(tl.int32) >> 8) & 0x80)
            tl.store(kept + index, code.to(tl.uint8), mask=_below(index, C.KEPT, writes))


@jit(do_not_specialize=["num_slots"])
def append_rows_kernel(  # type: ignore[no-untyped-def]
    rows, slots, codes, scales, kept, num_slots, rows_stride, codes_page, scales_page, kept_page, C: tl.constexpr
):
    """Write one row, head and cell per program; the bytes are those of the reference."""
    live, source, codes, scales, kept = _vector(
        rows, slots, codes, scales, kept, num_slots, rows_stride, codes_page, scales_page, kept_page, C
    )
    _write(source, codes, scales, kept, live, live, C)


@jit(do_not_specialize=["n"])
def append_swa_kernel(  # type: ignore[no-untyped-def]
    kv, slots, positions, fp8, rope, inv_scale, pos, head, n, rows, dummy, window,
    kv_stride, fp8_row, fp8_ring, rope_row, rope_ring, inv_row, inv_ring, pos_row, pos_ring, head_row,
    HAS_HEAD: tl.constexpr, SCAN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write one row of ``kv`` per program to its ring; the bytes are those of the reference."""
    i = tl.program_id(0)
    slot = tl.load(slots + i)
    position = tl.load(positions + i)
    in_launch = i + window < n
    later_slot = tl.load(slots + i + window, mask=in_launch, other=-1)
    later_position = tl.load(positions + i + window, mask=in_launch, other=-1)
    live = (slot >= 0) & (slot < rows) & (slot != dummy) & (position >= 0)
    live = live & ((later_slot != slot) | (later_position - window != position))
    is_newest = live.to(tl.int32)  # of its request, in this launch
    is_kept = is_newest
    if SCAN:
        first, stop = 0, tl.where(live, n, 0)
        while first < stop:
            other = first + tl.arange(0, SCAN)
            other_slot = tl.load(slots + other, mask=other < n, other=-1)
            ahead = tl.load(positions + other, mask=other < n, other=-1) - position
            is_newer = ((other_slot == slot) & ((ahead > 0) | ((ahead == 0) & (other > i)))).to(tl.int32)
            is_newest = tl.minimum(is_newest, 1 - tl.max(is_newer, axis=0))
            is_kept = tl.minimum(is_kept, 1 - tl.max(tl.where(ahead % window == 0, is_newer, 0), axis=0))
            first += SCAN
        live = is_kept > 0
    elif HAS_HEAD:
        next_slot = tl.load(slots + i + 1, mask=i + 1 < n, other=-1)
        is_newest = (live & (next_slot != slot)).to(tl.int32)
    # To int64 before multiplying by strides: a pool may be larger than 2 GiB.
    row = tl.where(live, slot, dummy).to(tl.int64)
    ring = tl.where(live, position % window, 0).to(tl.int64)
    source = kv + i.to(tl.int64) * kv_stride
    codes, scale = fp8 + row * fp8_row + ring * fp8_ring, inv_scale + row * inv_row + ring * inv_ring
    _write(source, codes, scale, rope + row * rope_row + ring * rope_ring, live, True, C)
    tl.store(pos + row * pos_row + ring * pos_ring, tl.where(live, position, -1))
    if HAS_HEAD:
        tl.store(head + row * head_row, position + 1, mask=is_newest > 0)


@jit(do_not_specialize=["num_slots"])
def gather_rows_kernel(  # type: ignore[no-untyped-def]
    out, slots, codes, scales, kept, num_slots, out_stride, codes_page, scales_page, kept_page, C: tl.constexpr
):
    """Read one row, head and cell per program, as the reference does. C.HALF: ``out`` is bfloat16 viewed as int16."""
    live, target, codes, scales, kept = _vector(
        out, slots, codes, scales, kept, num_slots, out_stride, codes_page, scales_page, kept_page, C
    )
    group = tl.arange(0, C.GROUPS_BLOCK)
    index, inside = _elements(group, True, C.GROUP, C.GROUP_BLOCK, C)

    if C.CODES == "e2m1" or C.CODES == "int4":
        pairs, there = _elements(group, live, C.GROUP // 2, C.GROUP_BLOCK // 2, C)
        byte = tl.load(codes + pairs, mask=there, other=0).to(tl.int32)
        code = tl.reshape(tl.join(byte & 0xF, byte >> 4), (C.GROUPS_BLOCK, C.GROUP_BLOCK))
    else:
        _, there = _elements(group, live, C.GROUP, C.GROUP_BLOCK, C)
        code = tl.load(codes + index, mask=there, other=0).to(tl.int32)
    if C.CODES == "e4m3":
        value = e4m3_value(code)
    elif C.CODES == "e2m1":
        value = e2m1_value(code)
    else:
        value = ((code << (24 if C.CODES == "int8" else 28)) >> (24 if C.CODES == "int8" else 28)).to(tl.float32)

    if C.SCALE == "float32":
        stored = tl.load(scales.to(tl.pointer_type(tl.int32)) + group, mask=_below(group, C.GROUPS, live), other=0)
        s = stored.to(tl.float32, bitcast=True)
    else:
        lane = group % C.LANES * (C.GROUPS // C.LANES) + group // C.LANES
        stored = tl.load(scales + lane, mask=_below(group, C.GROUPS, live), other=0).to(tl.int32)
        s = e8m0_value(stored) if C.SCALE == "e8m0" else e4m3_value(stored)
    value = value * s[:, None]
    if C.HALF:
        tl.store(target + index, bfloat16_bits(value).to(tl.int16), mask=inside)
    else:
        tl.store(target + index, value, mask=inside)
    if C.KEPT > 0:
        index = tl.arange(0, C.KEPT_BLOCK)
        inside = index < C.KEPT
        there = _below(index, C.KEPT, live)
        if C.KEPT_NBYTES == 2:
            half = tl.load(kept.to(tl.pointer_type(tl.int16)) + index, mask=there, other=0)
            wide = (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            wide = e4m3_value(tl.load(kept + index, mask=there, other=0).to(tl.int32))
            half = bfloat16_bits(wide).to(tl.int16)
        tl.store(target + C.GROUPS * C.GROUP + index, half if C.HALF else wide, mask=inside)
