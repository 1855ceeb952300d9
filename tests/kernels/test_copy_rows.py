"""``copy_rows`` and the word views under it, against a loop over the pairs."""

import importlib

import pytest
import torch

from kvpagoda.core.kernels import copy_rows
from kvpagoda.core.kernels.copy_rows import as_ints
from kvpagoda.errors import BadInput


def table(rows, nbytes, padding=0, seed=0):
    """uint8 ``[rows, nbytes]`` inside rows ``padding`` bytes longer, and the whole buffer."""
    whole = torch.randint(
        256, (rows, nbytes + padding), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return whole[:, :nbytes], whole


def pairs_of(kind, rows):
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    if kind == "scattered":
        return torch.stack([order[: rows // 2], order.flip(0)[: rows // 2]], 1)
    if kind == "runs":
        source = torch.cat([torch.arange(20, 30), torch.arange(3, 9), torch.tensor([1])])
        target = torch.cat([torch.arange(5, 15), torch.arange(15, 21), torch.tensor([0])])
        return torch.stack([source, target], 1)
    if kind == "repeated_source":
        return torch.tensor([[4, 0], [4, 1], [4, 2], [5, 3]])
    return torch.empty(0, 2, dtype=torch.int64)


@pytest.mark.parametrize("nbytes", [1, 7, 8, 63, 584, 2050, 5000])
@pytest.mark.parametrize(("source_padding", "target_padding"), [(0, 0), (8, 0), (0, 24), (3, 5)])
@pytest.mark.parametrize("kind", ["scattered", "runs", "repeated_source", "none"])
def test_rows_arrive_and_nothing_else_changes(nbytes, source_padding, target_padding, kind):
    src, _ = table(40, nbytes, source_padding)
    dst, whole = table(40, nbytes, target_padding, seed=1)
    pairs, before = pairs_of(kind, 40), whole.clone()
    for s, d in pairs.tolist():
        before[d, :nbytes] = src[s]
    copy_rows(src, dst, pairs)
    assert torch.equal(whole, before)


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_rows_that_start_anywhere(offset):
    src = torch.arange(256, dtype=torch.uint8).repeat(5)[offset : offset + 1024].view(16, 64)
    dst = torch.zeros(8, 64, dtype=torch.uint8)
    pairs = torch.tensor([[15, 0], [0, 7], [3, 3]])
    copy_rows(src, dst, pairs)
    assert torch.equal(dst[[0, 7, 3]], src[[15, 0, 3]])


def test_gathering_in_several_stages(monkeypatch):
    from kvpagoda.core.kernels.copy_rows import STAGE_NBYTES

    monkeypatch.setitem(STAGE_NBYTES, "cpu", 100)
    src, dst = table(200, 16)[0], table(300, 16, seed=2)[0]
    pairs = torch.stack([torch.randperm(200), torch.randperm(300)[:200]], 1)
    copy_rows(src, dst, pairs)
    assert torch.equal(dst[pairs[:, 1]], src[pairs[:, 0]])


@pytest.mark.parametrize(
    ("src", "dst", "pairs"),
    [
        (torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(1, 2, dtype=torch.int64)),
        (torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 9, dtype=torch.uint8), torch.zeros(1, 2).long()),
        (torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 2, 4, dtype=torch.uint8), torch.zeros(1, 2).long()),
        (torch.zeros(8, 4, dtype=torch.uint8).t(), torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(1, 2).long()),
        (torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(1, 2).int()),
        (torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(2).long()),
        (
            torch.zeros(4, 8, dtype=torch.uint8),
            torch.zeros(4, 8, dtype=torch.uint8),
            torch.zeros(1, 2).long().to("meta"),
        ),
    ],
)
def test_wrong_arguments_are_refused(src, dst, pairs):
    with pytest.raises(BadInput):
        copy_rows(src, dst, pairs)


def test_words_are_as_wide_as_everything_allows():
    def widths(*tensors):
        return [word.dtype for word in as_ints(*tensors)]

    rows = torch.zeros(4, 64, dtype=torch.uint8)
    assert widths(rows) == [torch.int64]
    assert widths(rows[:, :12], rows[:, :12]) == [torch.int32] * 2
    assert widths(rows[:, 2:10]) == [torch.int16]
    assert widths(rows[:, 1:9], rows[:, :8]) == [torch.uint8] * 2
    assert widths(torch.zeros(4, 8, dtype=torch.bfloat16)) == [torch.int64]
    assert as_ints(rows)[0].data_ptr() == rows.data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("nbytes", [7, 584, 40000])
@pytest.mark.parametrize("kind", ["scattered", "runs"])
def test_rows_cross_between_host_and_device(nbytes, kind, pinned):
    host, back = table(40, nbytes)[0].contiguous(), torch.zeros(40, nbytes, dtype=torch.uint8)
    if pinned:
        host, back = host.pin_memory(), back.pin_memory()
    device, other = torch.zeros(2, 40, nbytes, dtype=torch.uint8, device="cuda")
    pairs = pairs_of(kind, 40)
    copy_rows(host, device, pairs)
    copy_rows(device, other, (same := pairs[:, 1:].repeat(1, 2)))
    copy_rows(other, device, same.to("cuda"))
    copy_rows(device, back, same)
    torch.cuda.synchronize()
    assert torch.equal(back[pairs[:, 1]], host[pairs[:, 0]])


@pytest.mark.parametrize("start", [0, 8, 40])
def test_large_rows_are_copied_past_the_caches_and_nothing_else(start, monkeypatch):
    """With numba, wherever rows begin and end beside the lines of a cache; the bytes around them stay."""
    pytest.importorskip("numba")
    monkeypatch.setattr(importlib.import_module("kvpagoda.core.kernels.copy_rows"), "PAST_CACHES", 1)
    nbytes, generator = (16 << 10) + 300, torch.Generator().manual_seed(start)
    src, dst = (torch.randint(0, 256, (6, nbytes + 50), dtype=torch.uint8, generator=generator) for _ in range(2))
    pairs, wanted = torch.tensor([[5, 0], [0, 3], [2, 2]]), dst.clone()
    wanted[pairs[:, 1], start : start + nbytes] = src[pairs[:, 0], 7 : 7 + nbytes]
    copy_rows(src[:, 7 : 7 + nbytes], dst[:, start : start + nbytes], pairs)
    assert torch.equal(dst, wanted)
