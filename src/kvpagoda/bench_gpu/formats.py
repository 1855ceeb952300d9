"""Appends to rows of every format and gathers from them, and copies of blocks, beside copies of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from kvpagoda import KVCache, Limits
from kvpagoda.bench_gpu.card import Call, Card
from kvpagoda.bench_gpu.rows import (
    BLOCKS,
    HEADS,
    INDEX_KEYS,
    LATENTS,
    NVFP4_ROWS,
    BenchCase,
    RowBound,
    RowSizes,
    at_least,
    at_most,
)
from kvpagoda.errors import CheckFailed
from kvpagoda.formats.dialects import dialect_for_heads
from kvpagoda.formats.encoding import MXFP4, NVFP4, TENSOR, Encoding
from kvpagoda.kernels import (
    append_parts,
    append_rows,
    append_scaled,
    copy_rows,
    gather_parts,
    gather_rows,
    gather_scaled,
)
from kvpagoda.schema import Attention, Layer, Schema

Tensor = torch.Tensor
Figures = tuple[dict[str, float], dict[str, RowBound]]

PAGE, NUM_HEADS = 64, 8
LEAST = {HEADS: 85, LATENTS: 85, INDEX_KEYS: 75, NVFP4_ROWS: 75}
"""Part -> the least share of a copy, in percent, of an append and of a gather."""
BLOCK_LEAST = 88
DEVICE_US, HOST_US = 6, 30
"""The most time of the device and of the host for a few rows."""
PACKED = {
    "gqa_fp8_head": HEADS, "gqa_int8_head": HEADS, "gqa_int4_group": HEADS, "gqa_nvfp4": HEADS,
    "v32_656": LATENTS, "dsv4_584": LATENTS, "v41_528": LATENTS, "v41fp4_288": LATENTS,
    "index_132": INDEX_KEYS, "index_68": INDEX_KEYS, "nvfp4_384": NVFP4_ROWS, "nvfp4_352": NVFP4_ROWS,
}  # fmt: skip
"""Packed format -> its part."""
_INLINE = (Encoding("fp8"), Encoding("int8"), MXFP4, NVFP4)
_CHECKED, _MOST_ERROR = 4096, 0.2
"""How many rows are read back and compared, and the most by which they may differ: rows in four bits differ by 0.12."""


class FormatRows(NamedTuple):
    """Encoded rows on a device. ``append(rows, slots)``, ``gather(out, slots)``: rows bfloat16 ``[n, width]``."""

    append: Callable[[Tensor, Tensor], None]
    gather: Callable[[Tensor, Tensor], None]


class Format(NamedTuple):
    """Rows of ``width`` elements in ``nbytes`` bytes. ``make``: takes a number of pages and a device."""

    part: str
    name: str
    width: int
    nbytes: int
    make: Callable[[int, torch.device], FormatRows]


def formats() -> Iterator[Format]:
    """Yield every format: heads of 128 and 64 elements, 8 of a token, and rows without heads."""
    for dim in (128, 64):
        width = NUM_HEADS * dim
        for name in TENSOR:
            make = partial(_scaled, Encoding(name, scale=0.02), dim)
            yield Format(HEADS, f"{name}, one scale, {dim}", width, width, make)
        for encoding in _INLINE:
            layer = _layer(encoding, dim)
            rows = layer.block_rows()[0]
            yield Format(HEADS, f"{encoding.name}, {dim}", width, rows.row_nbytes, partial(_inline, layer))
    for name, part in PACKED.items():
        for head_dim in (128, 64) if part == HEADS else (None,):
            packing, heads = dialect_for_heads(name, None, head_dim).packing, NUM_HEADS if head_dim else 1
            shown = name if head_dim is None else f"{name}, {head_dim}"
            make = partial(_packed, name, head_dim, packing.page_stride(PAGE, heads))
            yield Format(part, shown, packing.width * heads, packing.row_nbytes * heads, make)


def _layer(encoding: Encoding, dim: int) -> Layer:
    return Layer(0, "full_attention", (Attention(NUM_HEADS, dim, dim, "bfloat16", encoding=encoding),))


def _scaled(encoding: Encoding, dim: int, pages: int, device: torch.device) -> FormatRows:
    dtype = getattr(torch, TENSOR[encoding.name][0])
    field = torch.zeros(pages, PAGE, NUM_HEADS, dim, dtype=torch.uint8, device=device).view(dtype)

    def append(rows: Tensor, slots: Tensor) -> None:
        append_scaled(rows.view(-1, NUM_HEADS, dim), slots, field, encoding)

    def gather(out: Tensor, slots: Tensor) -> None:
        gather_scaled(field, slots, out.view(-1, NUM_HEADS, dim), encoding)

    return FormatRows(append, gather)


def _inline(layer: Layer, pages: int, device: torch.device) -> FormatRows:
    """Return the K rows of a cache with one layer; it has as many for V."""
    cache = KVCache(
        Schema((layer,)), num_blocks=pages, block_size=PAGE, max_requests=1, device=device, limits=Limits(swap=0)
    )
    pool = cache.layer(0).blocks
    assert pool is not None
    parts = pool.encoded("k")
    return FormatRows(partial(append_parts, parts=parts), lambda out, slots: gather_parts(out, slots, parts))


def _packed(name: str, head_dim: int | None, stride: int, pages: int, device: torch.device) -> FormatRows:
    memory = torch.zeros(pages, stride, dtype=torch.uint8, device=device)

    def append(rows: Tensor, slots: Tensor) -> None:
        append_rows(rows, slots, memory, name, page_size=PAGE, head_dim=head_dim)

    def gather(out: Tensor, slots: Tensor) -> None:
        gather_rows(memory, slots, out, name, page_size=PAGE, head_dim=head_dim)

    return FormatRows(append, gather)


def cases(card: Card, sizes: RowSizes) -> Iterator[BenchCase]:
    """Yield a case for each format, and for each size of blocks."""
    for one in formats():
        yield BenchCase(one.part, one.name, partial(measure_format, card, sizes, one))
    for kib in (8, 64, 1024):
        yield BenchCase(
            BLOCKS, f"{kib} KiB" if kib < 1024 else "1 MiB", partial(measure_blocks, card, sizes, kib << 10)
        )


def measure_format(card: Card, sizes: RowSizes, form: Format) -> Figures:
    """Append rows in random order, gather them, and do the same with a few; see that they are read as they were written."""
    moved = 2 * form.width + form.nbytes
    pages = max(-(-sizes.few // PAGE), sizes.moved // (PAGE * moved))
    kept = form.make(pages, card.device)
    n = pages * PAGE
    rows = torch.empty(n, form.width, dtype=torch.bfloat16, device=card.device).normal_()
    slots = torch.randperm(n, device=card.device).to(torch.int32)
    out = torch.zeros_like(rows)
    append, gather = partial(kept.append, rows, slots), partial(kept.gather, out, slots)
    append()
    gather()
    _compare(rows[:_CHECKED], out[:_CHECKED])
    percents = [share(card, sizes, call, n * moved) for call in (append, gather)]
    few = partial(kept.append, rows[: sizes.few].clone(), slots[: sizes.few].clone())
    figures = {
        "append_percent": percents[0],
        "gather_percent": percents[1],
        "few_host_us": card.host_seconds(few, rounds=sizes.rounds) * 1e6,
        "few_device_us": card.replayed_seconds(few, times=sizes.replays) * 1e6,
    }
    least = at_least(LEAST[form.part])
    bounds = {"append_percent": least, "gather_percent": least}
    return figures, bounds | {"few_host_us": at_most(HOST_US), "few_device_us": at_most(DEVICE_US)}


def _compare(rows: Tensor, back: Tensor) -> None:
    """Raise CheckFailed unless ``back`` is nearly ``rows``."""
    error = float((back.float() - rows.float()).norm() / rows.float().norm())
    if not error <= _MOST_ERROR:
        raise CheckFailed(f"rows are read back that differ by {100 * error:.0f} % from those that were written")


def share(card: Card, sizes: RowSizes, call: Call, nbytes: int) -> float:
    """Return the speed of ``call``, in percent of that of a copy on the device which reads and writes ``nbytes`` in all, like
    it. The two run in turns."""
    source = torch.zeros(nbytes // 2, dtype=torch.uint8, device=card.device)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    copy()
    ratios = [card.device_seconds(copy) / card.device_seconds(call) for _ in range(sizes.rounds)]
    return 100 * median(ratios)


def measure_blocks(card: Card, sizes: RowSizes, nbytes: int) -> Figures:
    """Copy blocks of ``nbytes`` from one table to another, in random order, with ids on the device; and one and 64 of them
    with ids of the host, as the cache has them."""
    count = max(2, sizes.moved // nbytes)
    words = torch.randint(-(2**62), 2**62, (count, nbytes // 8), device=card.device)
    source, target = words.view(torch.uint8), torch.zeros(count, nbytes, dtype=torch.uint8, device=card.device)
    ids = torch.randperm(count, device=card.device)
    pairs = torch.stack((ids, ids.flip(0)), 1)
    copy = partial(copy_rows, source, target, pairs)
    copy()
    sample = pairs[: max(1, min(count, (16 << 20) // nbytes))]
    if not torch.equal(target[sample[:, 1]], source[sample[:, 0]]):
        raise CheckFailed(f"blocks of {nbytes:,} bytes differ from those that they are copies of")
    percent = share(card, sizes, copy, 2 * source.nbytes)
    figures = {"copy_percent": percent}
    for many in (1, 64):
        few = partial(copy_rows, source, target, pairs[:many].cpu())
        figures[f"host_{many}_us"] = card.host_seconds(few, rounds=sizes.rounds) * 1e6
    return figures, {"copy_percent": at_least(BLOCK_LEAST), "host_1_us": at_most(HOST_US)}
