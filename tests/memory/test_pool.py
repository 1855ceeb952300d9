"""Pools of packed rows hold the bytes that ``pack`` returns, in either order of the arena and with any kernel page."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kvpagoda.core.memory.arena import Arena
from kvpagoda.core.memory.pool import Pool
from kvpagoda.formats import decode, encode
from kvpagoda.formats.dialects import DIALECTS
from kvpagoda.formats.encoding import Encoding
from kvpagoda.layouts import pack
from kvpagoda.schema import FULL, Attention, Compressed, Group, IndexKeys, Latent, Layer, Rows
from records import put_records, records_of

HEADS, HEAD_DIM, BLOCKS = 3, 64, 4
CASES = [(name, dialect) for name, dialects in DIALECTS.items() for dialect in dialects]


def layer_of(name: str, dialect: str) -> tuple[Layer, Rows]:
    """Return a layer that keeps rows of format ``name`` in ``dialect``, and these rows. If the format is for an
    indexer, the layer keeps other rows too."""
    if name.startswith("gqa"):
        layer = Layer(
            0,
            "gqa",
            (
                Attention(
                    HEADS, HEAD_DIM, HEAD_DIM, "bfloat16", encoding=Encoding(name, dialect=dialect, head_dim=HEAD_DIM)
                ),
            ),
        )
        return layer, layer.block_rows()[0]
    encoding = Encoding(name, dialect=dialect)
    width = encoding.rules.packing.width
    if width == 576:
        layer = Layer(0, "latent", (Latent(512, 64, "bfloat16", encoding=encoding),))
    elif name.startswith("index"):
        layer = Layer(0, "indexer", (Latent(512, 64, "bfloat16", indexer=IndexKeys(128, encoding)),))
    else:
        layer = Layer(0, "entries", (Compressed(512, 8, "bfloat16", 2, encoding=encoding),))
    return layer, layer.block_rows()[-1]


@pytest.mark.parametrize(("name", "dialect"), CASES)
def test_rows_of_a_pool_are_the_bytes_that_pack_gives(name: str, dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGODA_KERNELS", "reference")
    layer, rows = layer_of(name, dialect)
    source = torch.Generator().manual_seed(1)
    per_block = 8
    values = torch.randn(BLOCKS, per_block, *rows.shape, generator=source).to(torch.bfloat16)
    block, row = torch.arange(BLOCKS)[:, None], torch.arange(per_block)
    for order, kernel_pages in product(("block", "layer"), (1, 2)):
        size = per_block * rows.tokens_per_row
        layout = Group(FULL, (layer,)).block_layout(size, size // kernel_pages, order)
        arena = Arena(layout, BLOCKS, device="cpu", order=order)
        assert arena.nbytes == BLOCKS * layout.nbytes and layout.kernel_pages == kernel_pages
        pool = Pool(arena, 0, layer.block_rows())
        pool.write(rows.name, (block, row), values)
        count = per_block // kernel_pages
        wanted = pack(
            values.reshape(BLOCKS * kernel_pages, count, -1), name, page_size=count, dialect=dialect,
            head_dim=HEAD_DIM if name.startswith("gqa") else None,
        )  # fmt: skip
        pages = pool.pages(rows.name)
        assert torch.equal(pages[:, : wanted.shape[1]], wanted) and not pages[:, wanted.shape[1] :].any()
        read = pool.read(rows.name, (torch.arange(BLOCKS * kernel_pages),)).view(values.shape)
        assert read.shape == values.shape and torch.equal(read, pool.read(rows.name, (block, row)))
        assert torch.equal(read, pool.stored(rows.name, values))
        shown = decode(rows.encoding, pool.parts(rows.name), torch.bfloat16)
        assert torch.equal(shown.reshape(values.shape), read)
        apart = encode(rows.encoding, values.flatten(0, 1))
        assert all(map(torch.equal, apart, (part.flatten(0, 1) for part in pool.parts(rows.name))))


@pytest.mark.parametrize("layout", ["trtllm", "vllm-blhnc", "sglang-mha", "transformers", "flashinfer-gqa-nhd"])
def test_records_are_the_same_bytes_in_either_order(layout: str) -> None:
    layer = Layer(0, "attention", (Attention(HEADS, 8, 16, "bfloat16", layout=layout),))
    plain = Layer(0, "attention", (Attention(HEADS, 8, 16, "bfloat16"),))
    block, row, source = torch.arange(BLOCKS)[:, None], torch.arange(8), torch.Generator().manual_seed(1)
    values = {
        name: torch.randn(BLOCKS, 8, HEADS, n, generator=source).to(torch.bfloat16) for name, n in (("k", 8), ("v", 16))
    }
    for kernel_page in (8, 4):
        records = []
        for order in ("block", "layer"):
            arena = Arena(Group(FULL, (layer,)).block_layout(8, kernel_page, order), BLOCKS, device="cpu", order=order)
            pool = Pool(arena, 0, layer.block_rows())
            reference = Pool(Arena(Group(FULL, (plain,)).block_layout(8), BLOCKS, device="cpu"), 0, plain.block_rows())
            for name, rows in values.items():
                pool.write(name, (block, row), rows)
                reference.write(name, (block, row), rows)
                pages = pool.read(name, (torch.arange(arena.num_pages),)).flatten(0, 1)
                assert torch.equal(pages, reference.read(name, (torch.arange(BLOCKS),)).flatten(0, 1))
            records.append(records_of(arena, range(BLOCKS)))
            copied = Arena(arena.layout, BLOCKS, device="cpu", order=order)
            put_records(copied, [2, 0, 1, 3], records[-1])
            copied.copy(torch.tensor([2]), torch.tensor([3]))
            assert torch.equal(records_of(copied, [2, 0, 1, 3]), records[-1][[0, 1, 2, 0]])
        assert torch.equal(*records)
