"""What a layer's view gives to kernels: page tensors; block tables, index runs and flat indices in kernel pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvpagoda import KVCache, Schema
from kvpagoda.errors import BadInput
from kvpagoda.layouts import unpack
from kvpagoda.schema import Attention, Growth, Latent, Layer, Recurrent, Rows
from kvpagoda.schema.families.states import delta
from raises import raises

FULL, WINDOW = Attention(2, 8, 8, "float32"), Attention(1, 8, 8, "float32", Growth(window=20))
SCHEMA = Schema((Layer(0, "full", (FULL,)), Layer(1, "window", (WINDOW,)), Layer(2, "full", (FULL,))))


@pytest.mark.parametrize(
    ("layout", "order"),
    [
        *((layout, order) for layout in (None, "trtllm", "vllm-blhnc") for order in ("block", "layer")),
        ("vllm-lhbnc", None),
        ("vllm-bhlnc", None),
    ],
)
@pytest.mark.parametrize("kernel_page", [2, 4, 16])
def test_rows_are_found_by_tables_runs_and_slots_in_kernel_pages(
    layout: str | None, order: str | None, kernel_page: int
) -> None:
    """Every row is written through ``slot_mapping``, and must be where each of the other index arrays says it is."""
    schema = SCHEMA if layout is None else SCHEMA.laid_out(layout)
    cache = KVCache(
        schema, "256KiB", device="cpu", block_size=16, kernel_page=kernel_page, order=order, max_requests=3, poison=True
    )
    lengths = (5, 33, 48)
    sequences = [cache.open([100 * i]) for i in range(3)]
    written: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    source = torch.Generator().manual_seed(0)
    for at in range(max(lengths)):
        running = [sequence for sequence, length in zip(sequences, lengths) if at < length]
        for sequence in running:
            sequence.extend(1)
        batch = cache.batch(running, [1] * len(running), pad_to=3)
        for layer in written:
            rows = torch.randn(3, *cache.layer(layer)["k"].shape[2:], generator=source)
            batch.layer(layer).write(k=rows, v=-rows)
            written[layer].append(rows)
        for sequence in running:
            sequence.commit([100 * sequences.index(sequence) + at])
    batch = cache.batch([sequence for sequence in sequences if sequence.extend(1) or True], [1] * 3)
    for layer, rows_of in written.items():
        view = batch.layer(layer)
        assert view.page_size == kernel_page and view["k"].shape[1] == kernel_page
        table, indptr, indices = (getattr(view, name) for name in ("block_table", "kv_indptr", "kv_indices"))
        last, start = view.kv_last_page_len, view.kv_start
        for row, length in enumerate(lengths):
            first = int(start[row])
            run = indices[indptr[row] : indptr[row + 1]].long()
            tokens = (len(run) - 1) * kernel_page + int(last[row])
            assert first + tokens == length + 1 == int(view.cache_seqlens[row])
            number = {at: i for i, at in enumerate(range(length))}
            for at in range(first, length):
                if layer == 1 and at < length + 1 - 20:
                    continue
                alive = [i for i, n in enumerate(lengths) if number[at] < n]
                wanted = rows_of[at][alive.index(row)]
                page, within = table[row, at // kernel_page], at % kernel_page
                assert torch.equal(view["k"][page, within], wanted) and torch.equal(view["v"][page, within], -wanted)
                assert run[(at - first) // kernel_page] == page
        if layer == 1:
            continue
        flat = view.flat_indices(torch.tensor([[40, -1, 4]] * 3))
        assert (
            flat[:, 1].tolist() == [-1, -1, -1]
            and flat[2, 0] == table[2, 40 // kernel_page] * kernel_page + 40 % kernel_page
        )
    cache.check()


def test_packed_pages_are_handed_as_kernels_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGODA_KERNELS", "reference")
    schema = Schema((Layer(0, "latent", (Latent(512, 64, "bfloat16"),)),)).laid_out("flashmla-v32")
    cache = KVCache(schema, num_blocks=4, block_size=8, kernel_page=4, device="cpu", kernels="flashmla-sparse-sm100")
    sequence = cache.open(range(6))
    sequence.extend(6)
    view = cache.batch([sequence], [6]).layer(0)
    rows = torch.randn(6, 1, 576, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    view.write(latent=rows)
    pages = view.tensor("latent")
    assert (pages.shape, pages.dtype, pages.stride()[1:]) == ((10, 4, 1, 656), torch.uint8, (656, 656, 1))
    assert pages.stride(0) % 656 == 0 and pages.data_ptr() == view.blocks.pages("latent").data_ptr()
    back = unpack(pages.flatten(1), "v32_656", page_size=4, dtype=torch.bfloat16)
    flat = view.flat_indices(torch.arange(6, dtype=torch.int32)[None].expand(6, -1))[0]
    assert flat.dtype == torch.int32 and torch.equal(flat, view.slot_mapping)
    assert torch.equal(back.flatten(0, 1)[flat.long()], view.blocks.stored("latent", rows)[:, 0])


def test_fused_rows_and_states_in_the_order_of_memory() -> None:
    state = Recurrent((delta(4, 16, 8), Rows("conv", (12, 3), "float32", axes=("C", "W"))))
    schema = Schema(
        (Layer(0, "latent", (Latent(32, 8, "float32"),)), Layer(1, "delta", (state,)), Layer(2, "full", (FULL,)))
    )
    cache = KVCache(schema, "64KiB", max_requests=2, device="cpu")
    view = cache.layer(0)
    whole = view.tensor("k_rope")
    view["latent"][3, 5, 0], view["k_rope"][3, 5, 0] = 1, 2
    assert whole.shape[1:] == (16, 1, 40) and whole[3, 5, 0].tolist() == [1.0] * 32 + [2.0] * 8
    state_view = cache.layer(1)
    matrices = state_view.tensor("recurrent")
    assert matrices.shape[1:] == (4, 8, 16) and matrices[0].is_contiguous()
    state_view["recurrent"][1, 0, 2, 15, 7] = 5
    assert matrices[1, 2, 7, 15] == 5
    assert state_view.tensor("conv").shape[1:] == (12, 3)
    assert cache.layer(2).tensor("k").shape[1:] == (16, 2, 8)
    with raises(BadInput, needed="latent", available="layer 1 (delta)"):
        state_view.tensor("latent")
    both = KVCache(SCHEMA.laid_out("flashinfer-gqa-nhd"), num_blocks=3, device="cpu", order="layer")
    with raises(BadInput, needed=("k", "v")):
        both.layer(0).tensor("k")
    assert np.shares_memory(cache.layer(2)["k"].numpy(), cache.layer(2).tensor("k").numpy())
