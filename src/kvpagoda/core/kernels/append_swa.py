"""Append encoded rows to sliding-window rings, each to the ring of its request, in one launch.

It is the append of ``packed_rows`` with other addresses: ring slots, in pools of their own for each part.

One program handles a tile of rows of ``kv``. Each row has one destination, and each destination has one writer, in whatever
order the rows come:

    kv[i] = | coded (FP8) | rope (bfloat16) |  ->  pools[slots[i], positions[i] mod W]
    rows without a destination are written to one row of every pool, the dummy row

The FP8 codes are those of ``kvpagoda.formats``, encoding ``fp8`` with one inverse scale per row.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kvpagoda.core.kernels.casts_gpu import casts
from kvpagoda.core.kernels.copy_rows import as_ints
from kvpagoda.core.kernels.dispatch import backend
from kvpagoda.core.kernels.launch import LARGE, OPTIONS, Constants, block
from kvpagoda.core.kernels.packed_rows import Form, Grid, constants_of
from kvpagoda.core.kernels.packed_rows_gpu import append_swa_kernel
from kvpagoda.errors import BadInput
from kvpagoda.formats import encode
from kvpagoda.formats.dialects import Dialect
from kvpagoda.formats.encoding import Encoding

Tensor = torch.Tensor


def append_swa(
    kv: Tensor,
    slots: Tensor,
    positions: Tensor,
    swa_fp8: Tensor,
    swa_rope: Tensor,
    swa_inv_scale: Tensor,
    swa_pos: Tensor,
    dummy: int | None = None,
    swa_head: Tensor | None = None,
    is_ordered: bool = False,
) -> None:
    """Write row i of ``kv`` to ring slot ``positions[i] mod W`` of request ``slots[i]``, in place.

    All tensors are on one device. The pools may be strided in every axis but the last axis of ``swa_fp8`` and
    ``swa_rope``, and must not overlap. Of rows with one destination, the one with the highest position is kept, of
    equal positions the last row; so of a request with more than W rows the last W positions are kept. A row without a
    destination (padded, or overwritten within the launch) is written to the dummy row as zeros with position -1. The
    bytes of the pools therefore do not depend on the order in which programs run, and a replay writes the same bytes. A
    row whose coded part holds inf or NaN gets codes 0 and inverse scale NaN. With Triton the launch allocates nothing
    and does not synchronise with the host.

    O(n * dim); if not ``is_ordered``, O(n log n) more, or with Triton up to O(n * n) comparisons.

    Args:
        kv: bfloat16 ``[n, dim]``, RoPE dims last; rows may be strided.
        slots: int32 ``[n]``, the request's row of the pools; -1, the dummy or any id outside 0..R: a padded row.
        positions: int32 ``[n]``, in any order.
        swa_fp8: uint8 ``[R+1, W, dim - rope]``, E4M3 codes.
        swa_rope: bfloat16 ``[R+1, W, rope]``.
        swa_inv_scale: float32 ``[R+1, W]``.
        swa_pos: int32 ``[R+1, W]``.
        dummy: the dummy row; None: the last one, R.
        swa_head: int32 ``[R+1]``, one more than the highest position that this call writes for a request; or None.
        is_ordered: the rows of each request are adjacent, and their positions ascend without gaps: saves a search.

    Raises:
        BadInput: a tensor has a wrong shape, dtype, stride or device; nothing is written.

    Examples:
        >>> fp8, rope = torch.zeros(3, 4, 6, dtype=torch.uint8), torch.zeros(3, 4, 2, dtype=torch.bfloat16)
        >>> inv_scale, pos = torch.zeros(3, 4), torch.full((3, 4), -1, dtype=torch.int32)
        >>> slots, positions = torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([9, 3, 4], dtype=torch.int32)
        >>> append_swa(torch.ones(3, 8, dtype=torch.bfloat16), slots, positions, fp8, rope, inv_scale, pos)
        >>> pos.tolist()  # rings of 4: position 9 goes to index 1; the last row is the dummy
        [[-1, 9, -1, -1], [4, -1, -1, 3], [-1, -1, -1, -1]]
    """
    _check(kv, slots, positions, swa_fp8, swa_rope, swa_inv_scale, swa_pos, swa_head)
    if len(kv) == 0:
        return
    run = _triton if backend(kv.device.type) == "triton" else _reference
    last = len(swa_fp8) - 1
    if dummy is not None and not 0 <= dummy <= last:
        raise BadInput(f"append_swa: dummy row {dummy} is not one of 0..{last}")
    run(
        kv,
        slots,
        positions,
        swa_fp8,
        swa_rope,
        swa_inv_scale,
        swa_pos,
        last if dummy is None else dummy,
        swa_head,
        is_ordered,
    )


def warm_up_swa(
    fp8: Tensor, rope: Tensor, inv_scale: Tensor, pos: Tensor, dummy: int, head: Tensor | None = None
) -> None:
    """Compile what ``append_swa`` launches for some pools, for rows in order and in any, few and many: padded rows.

    Args:
        fp8: as ``append_swa`` takes it.
        rope: likewise.
        inv_scale: likewise.
        pos: likewise.
        dummy: the row to which they go.
        head: as ``append_swa`` takes it.
    """
    if backend(fp8.device.type) == "triton":
        coded = fp8.shape[2]
        slots = torch.full((1,), -1, dtype=torch.int32, device=fp8.device)
        kv = torch.zeros(1, coded + rope.shape[2], dtype=torch.bfloat16, device=fp8.device)
        for is_ordered in (False, True):
            for is_large in (False, True):
                _triton(kv, slots, slots, fp8, rope, inv_scale, pos, dummy, head, is_ordered, is_large)


def _check(
    kv: Tensor, slots: Tensor, positions: Tensor, fp8: Tensor, rope: Tensor, inv_scale: Tensor, pos: Tensor,
    head: Tensor | None,
) -> None:  # fmt: skip
    """Raise BadInput unless the arguments are what ``append_swa`` takes."""
    if kv.ndim != 2 or fp8.ndim != 3 or rope.ndim != 3:
        raise BadInput(
            f"append_swa takes kv [n, dim], swa_fp8 [R+1, W, coded], swa_rope [R+1, W, rope]; "
            f"got {list(kv.shape)}, {list(fp8.shape)}, {list(rope.shape)}"
        )
    n, (rows, window, coded) = len(kv), fp8.shape
    for name, tensor, dtype, shape in (
        ("kv", kv, torch.bfloat16, (n, coded + rope.shape[2])),
        ("slots", slots, torch.int32, (n,)),
        ("positions", positions, torch.int32, (n,)),
        ("swa_fp8", fp8, torch.uint8, (rows, window, coded)),
        ("swa_rope", rope, torch.bfloat16, (rows, window, rope.shape[2])),
        ("swa_inv_scale", inv_scale, torch.float32, (rows, window)),
        ("swa_pos", pos, torch.int32, (rows, window)),
        ("swa_head", head, torch.int32, (rows,)),
    ):
        if tensor is None:
            continue
        if tensor.dtype != dtype or tensor.shape != shape or tensor.device != kv.device:
            raise BadInput(
                f"append_swa: {name} must be {dtype} {list(shape)} on {kv.device}, "
                f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )
    if min(rows, window, coded, rope.shape[2]) < 1:
        raise BadInput(f"append_swa: pools need a dummy row, a ring and both halves, got {list(fp8.shape)}")
    if any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in (kv, slots, positions, fp8, rope)):
        raise BadInput("append_swa: the last axis of kv, slots, positions, swa_fp8 and swa_rope must be contiguous")


def _reference(
    kv: Tensor, slots: Tensor, positions: Tensor, fp8: Tensor, rope: Tensor, inv_scale: Tensor, pos: Tensor, dummy: int,
    head: Tensor | None, is_ordered: bool,
) -> None:  # fmt: skip
    """The definition of ``append_swa``, in torch, on any device. Allocates temporaries."""
    window = fp8.shape[1]
    live = (slots >= 0) & (slots < len(fp8)) & (slots != dummy) & (positions >= 0)
    if head is not None:
        newest = torch.full_like(head, -1)
        newest.scatter_reduce_(0, torch.where(live, slots, dummy).long(), torch.where(live, positions, -1), "amax")
        head.copy_(torch.where(newest >= 0, newest + 1, head))
    if is_ordered:
        live[:-window] &= slots[window:] != slots[:-window]
    else:
        place = torch.where(live, slots.long() * window + positions % window, -1)
        order = (place * 2**31 + positions.clamp(min=0)).argsort(stable=True)
        is_last = torch.ones_like(live)
        is_last[:-1] = place[order[1:]] != place[order[:-1]]
        live[order] &= is_last
    row = torch.where(live, slots, dummy).long()
    ring = torch.where(live, positions % window, 0).long()
    rows = torch.where(live[:, None], kv, 0)
    codes, kept, inverse = encode(Encoding("fp8", kept=rope.shape[2]), rows)
    for pool, values in ((fp8, codes), (rope, kept)):
        wide, words = as_ints(pool, values)
        wide[row, ring] = words
    inv_scale[row, ring] = inverse
    pos[row, ring] = torch.where(live, positions, -1)


def _triton(
    kv: Tensor, slots: Tensor, positions: Tensor, fp8: Tensor, rope: Tensor, inv_scale: Tensor, pos: Tensor, dummy: int,
    head: Tensor | None, is_ordered: bool, is_large: bool | None = None,
) -> None:  # fmt: skip
    """Launch the kernel. ``is_large``: how many rows a program takes; None: what suits the rows."""
    n, coded, heads = len(kv), fp8.shape[2], pos if head is None else head
    large = n * block(coded) >= LARGE if is_large is None else is_large
    strides = fp8.stride()[:2], inv_scale.stride(), rope.stride()[:2]
    constants = ring_constants(coded, rope.shape[2], fp8.shape[1], *strides, casts(kv.device), large)
    with torch.cuda.device_of(kv):  # type: ignore[no-untyped-call]
        append_swa_kernel[(-(-n // constants.TILE),)](
            kv, slots, positions, fp8, rope, inv_scale, pos, heads, n, len(fp8), dummy,
            kv.stride(0), *pos.stride(), heads.stride(0),
            HAS_HEAD=head is not None, SCAN=0 if is_ordered else 512, C=constants, **OPTIONS,
        )  # fmt: skip


@lru_cache(maxsize=256)
def ring_constants(
    coded: int, rope: int, window: int, codes: tuple[int, ...], scales: tuple[int, ...], kept: tuple[int, ...],
    casts: int = 0, is_large: bool = False,
) -> Constants:  # fmt: skip
    """Return the constants with which ``append_swa_kernel`` is compiled: the same object for the same arguments.

    ``codes``, ``scales``, ``kept``: elements from ring to ring and from row to row of the pools.
    """
    encoding = Encoding("fp8", kept=rope)
    rules = Dialect(encoding.packing(coded + rope), encoding.rule, "kvpagoda")
    steps = ((nbytes * ring, nbytes * row, 0, 0) for nbytes, (ring, row) in zip((1, 4, 2), (codes, scales, kept)))
    return constants_of(Form(encoding, rules, Grid(window, 1, 1, *steps), 0, 0), "append", casts, is_large)
