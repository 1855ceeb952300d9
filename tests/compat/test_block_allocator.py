"""BlockAllocator: the contract, and every bad release."""

import time

import numpy as np
import pytest
import torch

from kvpagoda.compat.block_allocator import BlockAllocator
from kvpagoda.errors import BadInput, NotOwned, OutOfBlocks
from raises import raises


def snapshot(blocks):
    return blocks.num_free, blocks._blocks.held_ids().tolist(), blocks._blocks.free_ids().tolist()


def test_acquire_gives_unique_int32_ids():
    blocks = BlockAllocator(10, device="cpu")
    ids = blocks.acquire(4)
    assert ids.dtype == torch.int32 and ids.shape == (4,) and ids.device.type == "cpu"
    assert len(set(ids.tolist())) == 4 and blocks.num_free == 6
    rest = blocks.acquire(6)
    assert sorted([*ids.tolist(), *rest.tolist()]) == list(range(10))
    assert blocks.acquire(0).shape == (0,)


def test_exhaustion_is_a_runtime_error_with_the_numbers_and_takes_nothing():
    blocks = BlockAllocator(10, device="cpu")
    blocks.acquire(7)
    before = snapshot(blocks)
    with raises(OutOfBlocks, needed=4, available=3) as caught:
        blocks.acquire(4)
    assert isinstance(caught.value, OutOfBlocks)
    assert snapshot(blocks) == before


@pytest.mark.parametrize(
    "form",
    [
        lambda ids: ids,
        lambda ids: ids.to(torch.int64),
        lambda ids: ids.numpy(),
        lambda ids: ids.numpy().astype(np.int64),
        lambda ids: ids.tolist(),
        lambda ids: tuple(ids.tolist()),
        lambda ids: ids.reshape(2, 2),
        lambda ids: ids.to(torch.uint8),
    ],
)
def test_release_takes_tensors_arrays_and_sequences(form):
    blocks = BlockAllocator(6, device="cpu")
    blocks.release(form(blocks.acquire(4)))
    assert blocks.num_free == 6
    blocks.release([])
    blocks.release(torch.empty(0, dtype=torch.int32))
    blocks.check()


@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([0, 0], dtype=torch.int32),  # twice in one call
        torch.tensor([5], dtype=torch.int32),  # never handed out: a release past the top
        [0, 5],
        [-1],
        [6],
        [2**31],
        [2**32],  # would wrap to 0
        np.array([2**63], np.uint64),
    ],
)
def test_double_free_raises_and_the_state_is_unchanged(bad):
    blocks = BlockAllocator(6, device="cpu")
    blocks.acquire(3)
    before = snapshot(blocks)
    with pytest.raises(NotOwned) as caught:
        blocks.release(bad)
    assert isinstance(caught.value, ValueError)
    assert snapshot(blocks) == before
    blocks.check()


def test_releasing_twice_raises():
    blocks = BlockAllocator(6, device="cpu")
    ids = blocks.acquire(3)
    blocks.release(ids)
    with raises(NotOwned, needed=0):
        blocks.release(ids)
    assert blocks.num_free == 6


@pytest.mark.parametrize(
    "bad", [torch.tensor([0.0]), torch.tensor([True]), [0.5], [False], ["a"], [[0], [0, 1]], np.array([1j]), [2**70]]
)
def test_ids_that_are_no_whole_numbers_raise(bad):
    blocks = BlockAllocator(6, device="cpu")
    blocks.acquire(3)
    with pytest.raises(BadInput):
        blocks.release(bad)
    assert blocks.num_free == 3


def test_an_acquire_that_fails_on_its_way_to_the_device_takes_nothing(monkeypatch):
    def fail(staging, ids):
        raise MemoryError("no device memory")

    blocks = BlockAllocator(6, device="cpu")
    monkeypatch.setattr("kvpagoda.compat.block_allocator.Staging.to_device", fail)
    with pytest.raises(MemoryError):
        blocks.acquire(4)
    monkeypatch.undo()
    assert blocks.num_free == 6 and blocks.acquire(2).tolist() == [0, 1]
    blocks.check()


@pytest.mark.parametrize("operations", [20_000, 100_000])
def test_random_operations_against_a_model(operations):
    """``check`` after each: no id twice, none lost, the counts agree."""
    rng = np.random.default_rng(operations)
    blocks, held = BlockAllocator(10, device="cpu"), []
    for op, n in zip(rng.integers(0, 3, operations).tolist(), rng.integers(0, 5, operations).tolist()):
        if op == 0 and n > 10 - len(held):
            with pytest.raises(OutOfBlocks):
                blocks.acquire(n)
        elif op == 0:
            got = blocks.acquire(n).tolist()
            assert not set(got) & set(held)
            held += got
        elif op == 1:
            rng.shuffle(held)
            blocks.release(held[:n])
            held = held[n:]
        elif len(held) < 10:
            with pytest.raises(NotOwned):
                blocks.release([*held[:n], min(set(range(10)) - set(held))])
        assert blocks.num_free == 10 - len(held)
        blocks.check()
    assert blocks._blocks.held_ids().tolist() == sorted(held)


def test_cost_is_flat_from_1_000_to_1_000_000_blocks():
    def cost(size):
        blocks, best = BlockAllocator(size, device="cpu"), float("inf")
        blocks.acquire(400)
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(500):
                blocks.release(blocks.acquire(16))
            best = min(best, time.perf_counter() - start)
        return best

    cost(1_000)
    small, large = cost(1_000), cost(1_000_000)
    assert large < 5 * small, f"{large / small:.1f} times the cost at a thousand times the size"


@pytest.mark.gpu
def test_ids_live_on_the_device_by_default():
    blocks = BlockAllocator(4)
    ids = blocks.acquire(3)
    assert ids.is_cuda and ids.dtype == torch.int32
    blocks.release(ids)
    assert blocks.num_free == 4
