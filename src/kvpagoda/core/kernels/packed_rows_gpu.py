"""The Triton kernels that write and read encoded rows, compiled for constants ``C``: the reference's bytes.

Two kernels write: to slots of pages (``append_rows``), and to rings (``append_swa``). They differ in the addresses.
A program takes a tile of vectors, as lines of groups, so that every access is wide and neighbours are accessed together:

    line 0   | vector 0, group 0 |    numbers, codes: [lines, elements]    scales: [lines]    kept: [vectors, elements]
    line 1   | vector 0, group 1 |
    ..       | .. |                   a vector has a power of two of lines; those after its groups hold nothing

No cast rounds twice, and none depends on the architecture (``casts_gpu``).
"""

from __future__ import annotations

from kvpagoda.core.kernels.casts_gpu import (
    bfloat16_bits,
    e2m1_magnitude,
    e2m1_value,
    e4m3_magnitude,
    e4m3_value,
    e8m0_value,
    float8_codes,
    float8_values,
)
from kvpagoda.core.kernels.dispatch import jit, tl


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
def _codes(y, x, s, broken, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 ``y``, ``x`` in units of ``s``, the scale of each line -> int32 codes, as in ``quantise``.

    Of E2M1 ``y`` is a magnitude. If C.MARKS, lines that are ``broken`` get codes of 0.
    """
    bits, sign = y.to(tl.int32, bitcast=True), x.to(tl.int32, bitcast=True)
    if C.MARKS:
        bits = bits & tl.where(broken, 0, -1)[:, None]
    if C.CODES == "e4m3":
        code = float8_codes(bits.to(tl.float32, bitcast=True), "e4m3", C.CASTS)
        if not C.MARKS:
            code = tl.where(y != y, _sign_of_nan(sign, s, 0x80) | 0x7F, code)
    elif C.CODES == "e2m1":
        if C.TIES == "down":
            bits = tl.maximum(bits - 1, 0)  # between a code and the next midpoint are many float32
        code = e2m1_magnitude(bits)
        signed = code | ((sign >> 28) & (tl.where(broken, 0, 8)[:, None] if C.MARKS else 8))
        if not C.SIGNED_ZERO:
            code = tl.where(code == 0, 0, signed)
        elif not C.MARKS:
            code = tl.where(y != y, _sign_of_nan(sign, s, 8), signed)
        else:
            code = signed
    else:
        size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        whole = (size + 0.5).to(tl.int32) if C.TIES == "away" else (size + 8388608.0 - 8388608.0).to(tl.int32)
        LIMIT: tl.constexpr = 127 if C.CODES == "int8" else 7
        code = tl.where(bits < 0, -tl.minimum(whole, 128 if C.CODES == "int8" else 7), tl.minimum(whole, LIMIT))
        code &= 0xFF if C.CODES == "int8" else 0xF
    return code


@jit()
def _sign_of_nan(sign, s, SIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 bits of x -> the sign of a NaN: that of x if x is NaN, + if the scale is NaN, - after 0 * inf or inf / inf."""
    negative = tl.where((sign & 0x7FFFFFFF) > 0x7F800000, sign, tl.where(s == s, -1, 0)[:, None])
    return tl.where(negative < 0, SIGN, 0)


@jit()
def _places(vector, slots, n, num_slots, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 ``[k]`` vectors -> whether each is there, and its slot in range; row, head and cell; page and row in it."""
    i = vector // (C.HEADS * C.CELLS)
    # Not (vector % (HEADS * CELLS)) % CELLS: of that Triton 3.6 finds a wrong alignment, and stores misaligned vectors.
    head, cell = vector // C.CELLS % C.HEADS, vector % C.CELLS
    exists = i < n
    slot = tl.load(slots + i, mask=exists, other=-1)
    live = (slot >= 0) & (slot < num_slots)  # of no row that does not exist: its slot is -1
    # To int64 before multiplying by strides: a pool may be larger than 2 GiB.
    page, row = (slot // C.PAGE).to(tl.int64), (slot % C.PAGE).to(tl.int64)
    return exists, live, i, head, cell, page, row


@jit()
def _numbers(numbers, i, head, cell, stride, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return pointers to the first of the ``C.WIDTH`` numbers of vectors."""
    return numbers + (i.to(tl.int64) * stride + (cell * C.HEADS + head) * C.WIDTH)


@jit()
def _codes_at(codes, page, row, head, cell, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return pointers to the first byte of the codes of vectors."""
    return codes + (page * C.CODES_PAGE + row * C.CODES_ROW + head * C.CODES_HEAD + cell * C.CODES_CELL)


@jit()
def _scales_at(scales, page, row, head, cell, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return pointers to the first scale of vectors. ``scales`` is the first of all."""
    return scales + (page * C.SCALES_PAGE + row * C.SCALES_ROW + head * C.SCALES_HEAD + cell * C.SCALES_CELL)


@jit()
def _kept_at(kept, page, row, head, cell, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return pointers to the first kept element of vectors. ``kept`` is the first of all."""
    return kept + (page * C.KEPT_PAGE + row * C.KEPT_ROW + head * C.KEPT_HEAD + cell * C.KEPT_CELL)


@jit()
def _lines(C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (vector, group) of each line of a program: its tile of vectors, each with ``C.GROUPS_BLOCK`` lines."""
    line = tl.arange(0, C.TILE * C.GROUPS_BLOCK)
    return tl.program_id(0) * C.TILE + line // C.GROUPS_BLOCK, line % C.GROUPS_BLOCK


@jit()
def _elements(exists, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (int32 ``[1, BLOCK]``, bool ``[k, BLOCK]``: element, is it one of the ``SIZE`` of a line that exists)."""
    element = tl.arange(0, BLOCK)
    inside = exists[:, None] & tl.full((1, BLOCK), 1, tl.int1)
    if SIZE != BLOCK:
        inside = inside & (element < SIZE)[None, :]
    return element[None, :], inside


@jit()
def _store_codes(target, code, exists, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store int32 codes ``[lines, elements]`` as bytes; codes of 4 bits two per byte, the even element low."""
    if C.CODES == "e2m1" or C.CODES == "int4":
        low, high = tl.split(tl.reshape(code, (C.TILE * C.GROUPS_BLOCK, C.GROUP_BLOCK // 2, 2)))
        element, inside = _elements(exists, C.GROUP // 2, C.GROUP_BLOCK // 2)
        tl.store(target[:, None] + element, (low | (high << 4)).to(tl.uint8), mask=inside)
    else:
        element, inside = _elements(exists, C.GROUP, C.GROUP_BLOCK)
        tl.store(target[:, None] + element, code.to(tl.uint8), mask=inside)


@jit()
def _scale_place(group, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the place of the scale of ``group`` after the first of its vector."""
    if C.LANES == 1:
        place = group
    else:
        place = tl.where(group < C.GROUPS, group % C.LANES * (C.GROUPS // C.LANES) + group // C.LANES, group)
    return place


@jit()
def _store_scales(target, stored, group, live, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the scale of each group at its place, and zeros in the padding after them."""
    if C.SCALE == "float32":
        tl.store(target + group, stored, mask=live & (group < C.GROUPS))
    else:
        value = tl.where(group < C.GROUPS, stored, 0)
        inside = live & (group < C.GROUPS + C.SCALE_PAD)
        tl.store(target + _scale_place(group, C), value.to(tl.uint8), mask=inside)


@jit()
def _write(bits, codes, scales, group, live, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Encode numbers, int32 ``[lines, elements]`` of the bits of float32, a group in each line; store those of ``live``.

    ``codes``, ``scales`` ``[lines]``: where the codes of each group, and the scales of its vector, begin.
    """
    sizes = bits & 0x7FFFFFFF
    if C.SKIPS_NAN:
        sizes = tl.where(sizes > 0x7F800000, 0, sizes)
    amax = tl.max(sizes, axis=1)
    s, stored = _scales(amax, C)
    x = bits.to(tl.float32, bitcast=True)
    scaled = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True) if C.CODES == "e2m1" else x
    if C.INVERSE:
        largest = tl.maximum(tl.minimum(amax, 0x7F800000), C.FLOOR).to(tl.float32, bitcast=True)
        y = scaled * tl.div_rn(tl.full(s.shape, C.TOP, tl.float32), largest)[:, None]
    elif C.POWER_OF_TWO or C.RECIPROCAL:  # for a power of two, x * (1 / s) equals x / s
        factor = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)
        if C.ZERO_GROUPS == "zero":
            factor = tl.where(s == 0, 0.0, factor)
        if C.ZERO_GROUPS == "apart":
            factor = tl.where(amax == 0, 1.0, factor)
        y = scaled * factor[:, None]
    else:
        y = tl.div_rn(scaled, tl.broadcast_to(s[:, None], scaled.shape))
    if C.ZERO_GROUPS == "apart":  # 0 / 0: the largest code, with the sign +
        x, y = tl.where(y != y, 0.0, x), tl.where(y != y, float("inf"), y)
    broken = amax >= 0x7F800000
    if C.MARKS:
        stored = tl.where(broken, 0x7FC00000 if C.SCALE == "float32" else 0xFF if C.SCALE == "e8m0" else 0x7F, stored)
    code = _codes(y, x, s, broken, C)

    exists = live if C.GROUPS == C.GROUPS_BLOCK else live & (group < C.GROUPS)
    _store_codes(codes, code, exists, C)
    _store_scales(scales, stored, group, live, C)


@jit()
def _load(source, exists, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return ``SIZE`` bfloat16 from each of ``source`` as int32 bits of float32; zeros where one does not exist."""
    element, inside = _elements(exists, SIZE, BLOCK)
    loaded = tl.load(source[:, None] + element, mask=inside, other=0.0)
    return loaded.to(tl.int16, bitcast=True).to(tl.int32) << 16


@jit()
def _write_kept(bits, kept, live, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store int32 ``[vectors, elements]``, the bits of bfloat16 as float32, at ``kept`` ``[vectors]`` of those ``live``."""
    element, inside = _elements(live, C.KEPT, C.KEPT_BLOCK)
    if C.KEPT_NBYTES == 2:
        tl.store(kept[:, None] + element, (bits >> 16).to(tl.int16), mask=inside)
    else:
        a = bits & 0x7FFFFFFF
        code = tl.where(a > 0x7F800000, 0x7F, e4m3_magnitude(a)) | ((bits >> 24) & 0x80)
        tl.store(kept[:, None] + element, code.to(tl.uint8), mask=inside)


@jit()
def _pointers(memory, scales_at, kept_at, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return typed pointers to the first scale and kept element, so many bytes from ``memory``, the first code."""
    scales, kept = memory + scales_at, memory + kept_at
    if C.SCALE == "float32":
        scales = scales.to(tl.pointer_type(tl.int32))
    if C.KEPT_NBYTES == 2:
        kept = kept.to(tl.pointer_type(tl.int16))
    return scales, kept


@jit(do_not_specialize=["n", "num_slots"])
def append_rows_kernel(  # type: ignore[no-untyped-def]
    rows, slots, memory, n, num_slots, rows_stride, scales_at, kept_at, C: tl.constexpr
):
    """Write a tile of vectors per program; the bytes are those of the reference."""
    scales, kept = _pointers(memory, scales_at, kept_at, C)
    vector, group = _lines(C)
    exists, live, i, head, cell, page, row = _places(vector, slots, n, num_slots, C)
    # Not only what is live is loaded: so the numbers need not wait for the slots.
    source = _numbers(rows, i, head, cell, rows_stride, C) + group * C.GROUP
    bits = _load(source, exists & (group < C.GROUPS), C.GROUP, C.GROUP_BLOCK)
    codes = _codes_at(memory, page, row, head, cell, C) + group * C.GROUP_NBYTES
    _write(bits, codes, _scales_at(scales, page, row, head, cell, C), group, live, C)
    if C.KEPT > 0:
        vector = tl.program_id(0) * C.TILE + tl.arange(0, C.TILE)
        exists, live, i, head, cell, page, row = _places(vector, slots, n, num_slots, C)
        source = _numbers(rows, i, head, cell, rows_stride, C) + C.GROUPS * C.GROUP
        bits = _load(source, exists, C.KEPT, C.KEPT_BLOCK)
        _write_kept(bits, _kept_at(kept, page, row, head, cell, C), live, C)


@jit(do_not_specialize=["n"])
def append_swa_kernel(  # type: ignore[no-untyped-def]
    kv, slots, positions, fp8, rope, inv_scale, pos, head, n, rows, dummy, kv_stride, pos_row, pos_ring, head_row,
    HAS_HEAD: tl.constexpr, SCAN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write a tile of rows of ``kv`` per program to their rings; the bytes are those of the reference.

    A ring is a page of ``C.PAGE`` rows.
    """
    i = tl.program_id(0) * C.TILE + tl.arange(0, C.TILE)
    exists = i < n
    slot = tl.load(slots + i, mask=exists, other=-1)
    position = tl.load(positions + i, mask=exists, other=-1)
    source = kv + i.to(tl.int64) * kv_stride
    bits = _load(source, exists, C.GROUP, C.GROUP_BLOCK)
    kept = _load(source + C.GROUP, exists, C.KEPT, C.KEPT_BLOCK)
    in_launch = i + C.PAGE < n
    later_slot = tl.load(slots + i + C.PAGE, mask=in_launch, other=-1)
    later_position = tl.load(positions + i + C.PAGE, mask=in_launch, other=-1)
    live = (slot >= 0) & (slot < rows) & (slot != dummy) & (position >= 0)
    live = live & ((later_slot != slot) | (later_position - C.PAGE != position))
    is_newest = live.to(tl.int32)  # of its request, in this launch
    is_kept = is_newest
    if SCAN:
        first, stop = 0, tl.where(tl.max(is_newest, axis=0) > 0, n, 0)
        while first < stop:
            other = first + tl.arange(0, SCAN)
            other_slot = tl.load(slots + other, mask=other < n, other=-1)[None, :]
            ahead = tl.load(positions + other, mask=other < n, other=-1)[None, :] - position[:, None]
            is_newer = (ahead > 0) | ((ahead == 0) & (other[None, :] > i[:, None]))
            is_newer = ((other_slot == slot[:, None]) & is_newer).to(tl.int32)
            is_newest = tl.minimum(is_newest, 1 - tl.max(is_newer, axis=1))
            is_kept = tl.minimum(is_kept, 1 - tl.max(tl.where(ahead % C.PAGE == 0, is_newer, 0), axis=1))
            first += SCAN
        live = is_kept > 0
    elif HAS_HEAD:
        next_slot = tl.load(slots + i + 1, mask=i + 1 < n, other=-1)
        is_newest = (live & (next_slot != slot)).to(tl.int32)
    # To int64 before multiplying by strides: a pool may be larger than 2 GiB.
    row = tl.where(live, slot, dummy).to(tl.int64)
    ring = tl.where(live, position % C.PAGE, 0).to(tl.int64)
    bits, kept = tl.where(live[:, None], bits, 0), tl.where(live[:, None], kept, 0)
    scales = _scales_at(inv_scale.to(tl.pointer_type(tl.int32)), row, ring, 0, 0, C)
    _write(bits, _codes_at(fp8, row, ring, 0, 0, C), scales, tl.zeros_like(i), exists, C)
    _write_kept(kept, _kept_at(rope.to(tl.pointer_type(tl.int16)), row, ring, 0, 0, C), exists, C)
    tl.store(pos + (row * pos_row + ring * pos_ring), tl.where(live, position, -1), mask=exists)
    if HAS_HEAD:
        tl.store(head + row * head_row, position + 1, mask=is_newest > 0)


@jit()
def _store(target, value, exists, SIZE: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store float32 ``[k, elements]``, ``SIZE`` of each line, at ``target`` ``[k]``: as bfloat16 if C.HALF."""
    element, inside = _elements(exists, SIZE, value.shape[1])
    if C.HALF:
        tl.store(target[:, None] + element, bfloat16_bits(value, C.CASTS), mask=inside)
    else:
        tl.store(target[:, None] + element, value, mask=inside)


@jit(do_not_specialize=["n", "num_slots"])
def gather_rows_kernel(  # type: ignore[no-untyped-def]
    out, slots, memory, n, num_slots, out_stride, scales_at, kept_at, C: tl.constexpr
):
    """Read a tile of vectors per program, as the reference does. C.HALF: ``out`` is bfloat16, else float32."""
    scales, kept = _pointers(memory, scales_at, kept_at, C)
    if C.HALF:
        out = out.to(tl.pointer_type(tl.int16))
    vector, group = _lines(C)
    exists, live, i, head, cell, page, row = _places(vector, slots, n, num_slots, C)
    if C.GROUPS != C.GROUPS_BLOCK:
        exists, live = exists & (group < C.GROUPS), live & (group < C.GROUPS)
    codes = _codes_at(memory, page, row, head, cell, C) + group * C.GROUP_NBYTES
    if C.CODES == "e2m1" or C.CODES == "int4":
        element, there = _elements(live, C.GROUP // 2, C.GROUP_BLOCK // 2)
        byte = tl.load(codes[:, None] + element, mask=there, other=0).to(tl.int32)
        code = tl.reshape(tl.join(byte & 0xF, byte >> 4), (C.TILE * C.GROUPS_BLOCK, C.GROUP_BLOCK))
        value = e2m1_value(code) if C.CODES == "e2m1" else ((code << 28) >> 28).to(tl.float32)
    else:
        element, there = _elements(live, C.GROUP, C.GROUP_BLOCK)
        byte = tl.load(codes[:, None] + element, mask=there, other=0)
        value = (
            float8_values(byte, "e4m3", C.CASTS) if C.CODES == "e4m3" else byte.to(tl.int8, bitcast=True).to(tl.float32)
        )

    stored = tl.load(_scales_at(scales, page, row, head, cell, C) + _scale_place(group, C), mask=live, other=0)
    if C.SCALE == "float32":
        s = stored.to(tl.float32, bitcast=True)
    else:
        s = e8m0_value(stored.to(tl.int32)) if C.SCALE == "e8m0" else e4m3_value(stored.to(tl.int32))
    _store(_numbers(out, i, head, cell, out_stride, C) + group * C.GROUP, value * s[:, None], exists, C.GROUP, C)
    if C.KEPT > 0:
        vector = tl.program_id(0) * C.TILE + tl.arange(0, C.TILE)
        exists, live, i, head, cell, page, row = _places(vector, slots, n, num_slots, C)
        element, there = _elements(live, C.KEPT, C.KEPT_BLOCK)
        byte = tl.load(_kept_at(kept, page, row, head, cell, C)[:, None] + element, mask=there, other=0)
        target = _numbers(out, i, head, cell, out_stride, C) + C.GROUPS * C.GROUP
        if C.KEPT_NBYTES == 2 and C.HALF:
            element, inside = _elements(exists, C.KEPT, C.KEPT_BLOCK)
            tl.store(target[:, None] + element, byte, mask=inside)
        elif C.KEPT_NBYTES == 2:
            _store(target, (byte.to(tl.int32) << 16).to(tl.float32, bitcast=True), exists, C.KEPT, C)
        else:
            _store(target, float8_values(byte, "e4m3", C.CASTS), exists, C.KEPT, C)
