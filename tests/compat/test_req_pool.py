"""ReqToTokenPool: slots from 1, a table that is never written out of bounds."""

import numpy as np
import pytest
import torch

from kvpagoda.compat.req_pool import ReqToTokenPool
from kvpagoda.errors import BadInput, NotOwned


def make():
    return ReqToTokenPool(3, 8, device="cpu")


def test_slots_start_at_1_and_none_means_no_room():
    pool = make()
    assert (pool.max_reqs, pool.max_context_len, pool.device.type) == (3, 8, "cpu")
    assert pool.req_to_token.shape == (4, 8) and pool.req_to_token.dtype == torch.int32
    assert pool.alloc(2) == [1, 2] and pool.available_size() == 1
    assert pool.alloc(2) is None and pool.available_size() == 1
    assert pool.alloc() == [3] and pool.alloc(1) is None and pool.alloc(0) == []
    pool.free(2)
    assert pool.alloc(1) == [2]
    pool.check()


def test_double_free_raises_and_the_state_is_unchanged():
    pool = make()
    pool.alloc(3)
    pool.free(1)
    for bad in (1, 0, 4, -1, True, 1.0, [2, 2], [2, 1], [1.5]):
        with pytest.raises(BadInput):
            pool.free(bad)
        assert pool.available_size() == 1
    pool.free([2, 3])
    pool.free([])
    assert pool.available_size() == 3
    pool.check()


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([5, 6, 7], dtype=torch.int32),
        torch.tensor([5, 6, 7]),
        np.array([5, 6, 7], np.int32),
        [5, 6, 7],
    ],
)
def test_write_puts_indices_at_their_positions(values):
    pool = make()
    [slot] = pool.alloc(1)
    pool.write((slot, slice(2, 5)), values)
    assert pool.req_to_token[slot].tolist() == [0, 0, 5, 6, 7, 0, 0, 0]
    pool.write((slot, slice(0, 0)), [])
    pool.write((slot, slice(None)), torch.arange(8))
    assert pool.req_to_token[slot].tolist() == list(range(8))
    assert not pool.req_to_token[0].any() and not pool.req_to_token[2:].any()


@pytest.mark.parametrize(
    ("index", "values"),
    [
        ((2, slice(0, 1)), [1]),  # not held
        ((0, slice(0, 1)), [1]),  # padding
        ((4, slice(0, 1)), [1]),
        ((-1, slice(0, 1)), [1]),
        ((1, slice(6, 9)), [1, 2, 3]),  # leaves the row
        ((1, slice(9, 10)), [1]),
        ((1, slice(-2, 0)), [1]),
        ((1, slice(-3, None)), [1, 2, 3]),
        ((1, slice(3, 2)), []),
        ((1, slice(0, 4, 2)), [1, 2]),
        ((1, 3), [1]),
        ((1, slice(0, 3)), [1, 2]),  # would broadcast or clamp
        ((1, slice(0, 3)), [1]),
        ((1, slice(0, 3)), 1),
        ((1, slice(0, 1)), [1.5]),
        ((1, slice(0, 1)), [True]),
        ((1, slice(0, 1)), [-1]),
        ((1, slice(0, 1)), [2**31]),  # would wrap
    ],
)
def test_a_bad_write_raises_and_writes_nothing(index, values):
    pool = make()
    pool.alloc(1)
    with pytest.raises(BadInput):
        pool.write(index, values)
    assert not pool.req_to_token.any()


def test_clear():
    pool = make()
    pool.alloc(2)
    pool.write((1, slice(0, 2)), [4, 5])
    pool.clear()
    assert pool.available_size() == 3 and not pool.req_to_token.any()
    with pytest.raises(NotOwned):
        pool.free(1)
    assert pool.alloc(3) == [1, 2, 3]


@pytest.mark.parametrize(("max_reqs", "max_len"), [(-1, 4), (1.5, 4), (True, 4), (4, -1), (4, None)])
def test_sizes_that_are_no_whole_numbers_raise(max_reqs, max_len):
    with pytest.raises(BadInput):
        ReqToTokenPool(max_reqs, max_len, device="cpu")


@pytest.mark.gpu
def test_the_table_lives_on_the_device():
    pool = ReqToTokenPool(2, 4)
    pool.alloc(1)
    pool.write((1, slice(1, 3)), torch.tensor([7, 8], dtype=torch.int32, device="cuda"))
    assert pool.req_to_token.is_cuda and pool.req_to_token[1].tolist() == [0, 7, 8, 0]
