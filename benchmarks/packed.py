"""The speed of packing rows and of copying blocks, on one thread of a CPU, as a share of the speed of copying memory.

The bytes of a case are those that it reads and writes: an append, its bfloat16 rows and the packed rows; a gather, the
packed rows and its result; a copy, its blocks twice. ``memcpy_percent``: the speed as a share of that of one
``np.copyto`` that reads and writes as many bytes; the two run in turns. Times are CPU time, the least of several
rounds, since other work may share the cores. Rows are in random order in pages of 64. All rows together take 100 MB,
more than the processor's caches hold. ``K``: the K rows of 8 heads of 128 elements, whose codes and scales are arrays of
their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.timing import Options, Row, tell
from kvpagoda.core.kernels.copy_rows import copy_rows
from kvpagoda.core.kernels.dispatch import backend
from kvpagoda.core.kernels.packed_rows import append_parts, append_rows, gather_parts, gather_rows
from kvpagoda.core.kernels.scaled_rows import append_scaled, gather_scaled
from kvpagoda.core.memory.arena import Arena
from kvpagoda.core.memory.host_copy import copy_to_host
from kvpagoda.core.memory.pool import Pool
from kvpagoda.formats.dialects import DIALECTS, dialect_for_heads, dialect_of
from kvpagoda.formats.encoding import MXFP4, NVFP4, TENSOR, Encoding
from kvpagoda.pages import pages
from kvpagoda.schema import FULL, Attention, Field, Group, Layer, RowLayout

QUESTION = "How much of the speed of copying memory do packed rows and blocks leave?"
PAGE, HEADS, DIM = 64, 8, 128
APART = (Encoding("fp8"), Encoding("int8"), Encoding("int8", group=64), MXFP4, NVFP4)
Case = tuple[str, int, Callable[[], object]]
"""(name, bytes that are read and written, the call)"""


def measure(options: Options) -> list[Row]:
    torch.set_num_threads(1)
    elements = 1 << (17 if options.quick else 25)
    formats = [(format, dialect, None) for format, dialects in DIALECTS.items() for dialect in dialects]
    formats += [(format, dialect, 128) for format, dialect, _ in formats if dialect_of(format).packing.has_heads]
    few = 1 if options.quick else None
    cases = [case for names in formats[:few] for case in rows_of(*names, elements)]
    cases += [case for encoding in APART[:few] for case in apart_of(encoding, elements)]
    scaled = [(name, layout, scale) for name in TENSOR for layout in ("", "trtllm") for scale in (1.0, 0.02)]
    cases += [case for each in scaled[:few] for case in scaled_of(*each, elements)]
    cases += blocks_of(elements // 2)
    cases += [case for nbytes in (elements // 2, 2 * elements) for case in records_of(nbytes)]
    return [_row(options, *case) for case in cases if options.only in case[0]]


def rows_of(format: str, dialect: str, head_dim: int | None, elements: int) -> Iterator[Case]:
    """Yield an append, and gathers to bfloat16 and to float32, of about ``elements`` elements."""
    packing = dialect_for_heads(format, dialect, head_dim).packing
    heads = HEADS if packing.has_heads else 1
    width, pages = packing.width * heads, max(1, elements // (packing.width * heads * PAGE))
    stride = packing.page_stride(PAGE, heads)
    memory = _written(stride, pages).layer(0)["k"].view(-1, stride)
    rows = torch.randn(pages * PAGE, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    slots = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).int()
    packed, how, name = (
        len(rows) * packing.row_nbytes * heads,
        {"page_size": PAGE, "dialect": dialect, "head_dim": head_dim},
        f"{format} {dialect}" + (f" {head_dim}" if head_dim else ""),
    )
    yield f"append {name}", rows.nbytes + packed, lambda: append_rows(rows, slots, memory, format, **how)
    append_rows(rows, slots, memory, format, **how)
    for out in (torch.zeros_like(rows), torch.zeros(rows.shape)):
        to = "" if out.dtype == torch.bfloat16 else " float32"
        gather = lambda out=out: gather_rows(memory, slots, out, format, **how)  # noqa: E731
        yield f"gather{to} {name}", out.nbytes + packed, gather


def apart_of(encoding: Encoding, elements: int) -> Iterator[Case]:
    """Yield an append, and gathers to bfloat16 and to float32, of about ``elements`` elements of K in a cache."""
    layer = Layer(0, "attention", (Attention(HEADS, 128, 128, "bfloat16", encoding=encoding),))
    blocks = max(1, elements // (128 * HEADS * PAGE))
    arena = Arena(Group(FULL, (layer,)).block_layout(PAGE), blocks, device="cpu")
    arena.buffer.fill_(1)
    keys = layer.block_rows()[0]
    parts, name = Pool(arena, 0, layer.block_rows()).encoded("k"), f"K {encoding.name} {encoding.group or 128}"
    rows = torch.randn(blocks * PAGE, HEADS * 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    slots, packed = (
        torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).int(),
        len(rows) * keys.row_nbytes,
    )
    yield f"append {name}", rows.nbytes + packed, lambda: append_parts(rows, slots, parts)
    append_parts(rows, slots, parts)
    for out in (torch.zeros_like(rows), torch.zeros(rows.shape)):
        to = "" if out.dtype == torch.bfloat16 else " float32"
        yield f"gather{to} {name}", out.nbytes + packed, lambda out=out: gather_parts(out, slots, parts)


def scaled_of(name: str, layout: str, scale: float, elements: int) -> Iterator[Case]:
    """Yield an append, and gathers to bfloat16 and to float32, of K heads with one scale a tensor in the pages of a
    ``layout``: "" has the heads of a token together, "trtllm" the tokens of a head."""
    encoding, count = Encoding(name, scale=scale), max(1, elements // (HEADS * DIM * PAGE))
    kind = Attention(HEADS, DIM, DIM, "bfloat16", encoding=encoding, layout=layout)
    arena = Arena(Group(kind.law, (Layer(0, "full", (kind,)),)).block_layout(PAGE), count, device="cpu")
    arena.buffer.fill_(1)
    field = arena.layer(0)["k"]
    rows = torch.randn(count * PAGE, HEADS, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    slots = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    case = f"{name} {'heads in tokens' if not layout else 'tokens in heads'}, scale {scale}"
    yield f"append {case}", rows.nbytes + rows.numel(), lambda: append_scaled(rows, slots, field, encoding)
    append_scaled(rows, slots, field, encoding)
    for out in (torch.zeros_like(rows), torch.zeros(rows.shape)):
        to = "" if out.dtype == torch.bfloat16 else " float32"
        gather = lambda out=out: gather_scaled(field, slots, out, encoding)  # noqa: E731
        yield f"gather{to} {case}", out.nbytes + rows.numel(), gather


def blocks_of(elements: int) -> Iterator[Case]:
    """Yield copies of blocks of 64 KiB and of 75 KB from one table to another, of about ``elements`` bytes in all."""
    for nbytes in (1 << 16, 75_008):
        blocks = max(2, elements // nbytes)
        source, target = (torch.full((blocks, nbytes), value, dtype=torch.uint8) for value in range(2))
        ids = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
        pairs = torch.stack((ids, ids.flip(0)), 1)
        yield (
            f"copy blocks of {nbytes:,}",
            2 * source.nbytes,
            lambda source=source, target=target, pairs=pairs: copy_rows(source, target, pairs),
        )


def records_of(nbytes: int) -> Iterator[Case]:
    """Yield packing of records of 64 KiB and of 75 KB, ``nbytes`` in all, from an arena to host memory, as tiers do.

    Each is measured with memory that was written before, and with new memory, whose pages the system clears first. The
    last case is one memcpy to new memory."""
    for width in (1 << 16, 75_008):
        count = max(2, nbytes // width)
        arena, table, moved = _written(width, count), pages(count * width), 2 * count * width
        table.fill(1)
        ids = torch.randperm(count, generator=torch.Generator().manual_seed(0)).numpy()

        def pack(table: np.ndarray, arena: Arena = arena, ids: np.ndarray = ids) -> None:
            copy_to_host(arena, ids, torch.from_numpy(table).view(len(ids), -1), range(len(ids)))

        name = f"pack records of {width:,}, {table.nbytes >> 20} MiB"
        yield name, moved, lambda table=table, pack=pack: pack(table)
        yield f"{name}, new memory", moved, lambda table=table, pack=pack: pack(pages(len(table)))
    yield f"memcpy of {nbytes >> 20} MiB to new memory", moved, lambda: np.copyto(pages(len(table)), table)


def _written(nbytes: int, many: int) -> Arena:
    """Return an arena of ``many`` rows of ``nbytes`` bytes that was written once. Memory that was never written is a
    single page of zeros, which the processor's cache holds."""
    arena = Arena(RowLayout.build([(0, Field("k", nbytes, (), "uint8"))]), many, device="cpu")
    arena.buffer.fill_(1)
    return arena


def _row(options: Options, case: str, nbytes: int, call: Callable[[], object]) -> Row:
    """Time ``call`` in turns with a plain copy of the same number of bytes, and return the row."""
    source, target = np.ones(nbytes // 2, np.uint8), np.zeros(nbytes // 2, np.uint8)
    call()  # compiles the kernel, or reads it from disk
    rounds = [(_cpu_seconds(call), _cpu_seconds(lambda: np.copyto(target, source))) for _ in range(2 * options.runs)]
    taken, copied = (min(times) for times in zip(*rounds))
    return {
        "case": case,
        "us": taken * 1e6,
        "MB": nbytes / 1e6,
        "memcpy_percent": 100 * copied / taken,
        "by": backend("cpu", has_numba=True),
    }


def _cpu_seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


if __name__ == "__main__":
    tell("packed", QUESTION, measure)
