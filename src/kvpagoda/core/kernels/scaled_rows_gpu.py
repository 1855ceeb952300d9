"""The Triton kernels that write and read rows with one scale for a whole tensor: the bytes of ``formats/tensor_scale.py``."""

from __future__ import annotations

from kvpagoda.core.kernels.casts_gpu import bfloat16_bits, float8_codes, float8_values
from kvpagoda.core.kernels.dispatch import jit, tl


@jit()
def _places(slots, n, num_slots, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return of each vector of a program's tile: its row and head, does it exist, is its slot in range, where its codes are.

    Negative slots count from the end.
    """
    vector = tl.program_id(0) * C.TILE + tl.arange(0, C.TILE)
    i, head = vector // C.HEADS, vector % C.HEADS
    exists = i < n
    slot = tl.load(slots + i, mask=exists, other=0)
    slot = tl.where(slot < 0, slot + num_slots, slot)
    # To int64 before multiplying by strides: a pool may be larger than 2 GiB.
    page, row = (slot // C.PAGE).to(tl.int64), (slot % C.PAGE).to(tl.int64)
    place = page * C.FIELD_PAGE + row * C.FIELD_ROW + head * C.FIELD_HEAD
    return i, head, exists, exists & (slot >= 0) & (slot < num_slots), place


@jit()
def _inside(exists, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return bool ``[vectors, C.WIDTH_BLOCK]``: the elements of vectors that exist."""
    inside = exists[:, None] & tl.full((1, C.WIDTH_BLOCK), 1, tl.int1)
    if C.WIDTH != C.WIDTH_BLOCK:
        inside = inside & (tl.arange(0, C.WIDTH_BLOCK) < C.WIDTH)[None, :]
    return inside


@jit(do_not_specialize=["n", "num_slots"])
def append_scaled_kernel(rows, slots, field, n, num_slots, rows_stride, scale, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a tile of vectors per program. ``scale``: by which numbers are divided, or multiplied if C.IS_FACTOR."""
    i, head, exists, live, place = _places(slots, n, num_slots, C)
    element = tl.arange(0, C.WIDTH_BLOCK)[None, :]
    source = rows + (i.to(tl.int64) * rows_stride + head * C.ROWS_HEAD)
    # Not only what is live is loaded: so the numbers need not wait for the slots.
    loaded = tl.load(source[:, None] + element, mask=_inside(exists, C), other=0.0)
    bits = loaded.to(tl.int16, bitcast=True).to(tl.int32) << 16
    x = bits.to(tl.float32, bitcast=True)
    y = x * scale if C.IS_FACTOR else tl.div_rn(x, tl.full(x.shape, scale, tl.float32))
    CODES: tl.constexpr = C.CODES
    code = tl.where(x != x, ((bits >> 24) & 0x80) | 0x7F, float8_codes(y, CODES, C.CASTS))
    tl.store(field + place[:, None] + element, code.to(tl.uint8), mask=_inside(live, C))


@jit(do_not_specialize=["n", "num_slots"])
def gather_scaled_kernel(out, slots, field, n, num_slots, out_stride, scale, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read a tile of vectors per program. C.HALF: ``out`` is bfloat16, else float32."""
    i, head, exists, live, place = _places(slots, n, num_slots, C)
    element = tl.arange(0, C.WIDTH_BLOCK)[None, :]
    byte = tl.load(field + place[:, None] + element, mask=_inside(live, C), other=0)
    CODES: tl.constexpr = C.CODES
    value = float8_values(byte, CODES, C.CASTS) * scale
    if C.HALF:
        out = out.to(tl.pointer_type(tl.int16))
        value = bfloat16_bits(value, C.CASTS)
    target = out + (i.to(tl.int64) * out_stride + head * C.ROWS_HEAD)
    tl.store(target[:, None] + element, value, mask=_inside(exists, C))
