"""GDNPool: states that are copied and reset, track slots, the two axis orders."""

import numpy as np
import pytest
import torch

from kvpagoda.compat.gdn_pool import GDNPool
from kvpagoda.compat.req_pool import ReqToTokenPool
from kvpagoda.errors import BadInput, NotOwned
from raises import raises


def make(dtype=torch.bfloat16, track=2, kernel=4):
    return GDNPool(3, 2, 4, 5, 6, 7, kernel, device="cpu", dtype=dtype, max_track_slots=track)


def fill(pool):
    """Every slot of every layer holds its own numbers."""
    for layer in range(pool.num_gdn_layers):
        recurrent, conv = pool.get_layer_state(layer)
        recurrent.copy_(torch.randn(recurrent.shape))
        conv.copy_(torch.randn(conv.shape))
    return [tuple(state.clone() for state in pool.get_layer_state(layer)) for layer in range(pool.num_gdn_layers)]


def test_names_shapes_and_dtypes():
    arguments = dict(
        max_reqs=3, num_gdn_layers=2, num_v_heads=4, head_k_dim=5, head_v_dim=6, conv_dim=7, conv_kernel_size=4,
        device="cpu", dtype=torch.float16, max_track_slots=2,
    )  # fmt: skip
    pool = GDNPool(**arguments)
    for name, value in arguments.items():
        assert getattr(pool, name) == (torch.device("cpu") if name == "device" else value)
    assert pool.recurrent_state.shape == (2, 6, 4, 5, 6) and pool.recurrent_state.dtype == torch.float32
    assert pool.conv_state.shape == (2, 6, 7, 3) and pool.conv_state.dtype == torch.float16
    assert not pool.recurrent_state.any() and not pool.conv_state.any()
    plain = GDNPool(3, 2, 4, 5, 6, 7, 4, "cpu")
    assert (plain.dtype, plain.max_track_slots, plain.conv_state.shape[1]) == (torch.bfloat16, 0, 4)


def test_layer_states_are_views_of_the_pool():
    pool = make()
    recurrent, conv = pool.get_layer_state(gdn_layer_idx=1)
    assert recurrent.shape == (6, 4, 6, 5) and recurrent.dtype == torch.float32
    assert conv.shape == (6, 7, 3) and conv.dtype == torch.bfloat16
    assert recurrent.is_contiguous() and conv.is_contiguous()
    recurrent[2, 1, 5, 3], conv[4, 6, 2] = 9, 8
    assert pool.recurrent_state[1, 2, 1, 3, 5] == 9 and pool.conv_state[1, 4, 6, 2] == 8
    assert pool.recurrent_state.sum() == 9 and pool.conv_state.sum() == 8
    with raises(BadInput, needed=2, available=2):
        pool.get_layer_state(2)
    for bad in (-1, None, 0.5):
        with raises(BadInput, field="a GDN layer", needed=bad, available=0):
            pool.get_layer_state(bad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_mem_bytes_is_the_bytes_of_all_states(dtype, kernel):
    pool = make(dtype, kernel=kernel)
    states = [state for layer in range(2) for state in pool.get_layer_state(layer)]
    assert pool.mem_bytes() == sum(state.numel() * state.element_size() for state in states)
    assert pool.mem_bytes() == pool.arena.buffer.numel()


def test_both_axis_orders_are_views_of_the_same_bytes():
    pool = make()
    for layer in range(2):
        kv, vk = pool.recurrent_state[layer], pool.get_layer_state(layer)[0]
        assert vk.data_ptr() == kv.data_ptr() and vk.shape == (6, 4, 6, 5)
        state = torch.randn(4, 6, 5)  # as a kernel that puts v first writes it
        vk[1] = state
        assert torch.equal(kv[1], state.transpose(-1, -2)) and torch.equal(vk[1], state)


@pytest.mark.parametrize(
    "slots", [2, np.int64(2), [2], np.array([2]), torch.tensor([2]), torch.tensor([2], dtype=torch.int32)]
)
def test_reset_zeroes_only_the_named_slots(slots):
    pool = make()
    before = fill(pool)
    pool.reset_states(req_pool_indices=slots)
    for layer, states in enumerate(before):
        for now, then in zip(pool.get_layer_state(layer), states):
            assert not now[2].any() and torch.equal(now[[0, 1, 3, 4, 5]], then[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize(
    "copy", [(1, 4), (np.int32(1), np.int64(4)), ([1], [4]), (torch.tensor([1]), torch.tensor([4], dtype=torch.int32))]
)
def test_copy_moves_all_states_between_any_two_slots(copy):
    pool = make()
    before = fill(pool)
    pool.copy_states(src_index=copy[0], dst_index=copy[1])
    for layer, states in enumerate(before):
        for now, then in zip(pool.get_layer_state(layer), states):
            assert torch.equal(now[4], then[1]) and torch.equal(now[[0, 1, 2, 3, 5]], then[[0, 1, 2, 3, 5]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_states_of_every_dtype_are_copied_bit_for_bit(dtype):
    pool = make(dtype)
    pool.arena.buffer.copy_(torch.randint(0, 256, pool.arena.buffer.shape, dtype=torch.uint8))
    before = [state[:, 2].contiguous().view(torch.uint8) for state in (pool.recurrent_state, pool.conv_state)]
    pool.copy_states([2], [5])
    for state, then in zip((pool.recurrent_state, pool.conv_state), before):
        assert torch.equal(state[:, 5].contiguous().view(torch.uint8), then)


def test_copy_reads_all_sources_first():
    pool = make()
    before = fill(pool)
    pool.copy_states([1, 2, 2], [2, 1, 5])
    for layer, states in enumerate(before):
        for now, then in zip(pool.get_layer_state(layer), states):
            assert torch.equal(now[[2, 1, 5]], then[[1, 2, 2]])


@pytest.mark.parametrize(
    ("src", "dst"), [(1, 6), (-1, 2), (6, 1), ([1, 2], [3, 3]), ([1, 2], [3]), (1.0, 2), (torch.tensor([0.5]), [1])]
)
def test_a_bad_copy_raises_and_moves_nothing(src, dst):
    pool = make()
    fill(pool)
    before = pool.arena.buffer.clone()
    with pytest.raises(BadInput):
        pool.copy_states(src, dst)
    for bad in (6, -1, [0, 6], [0.5], True, None, "1"):
        with pytest.raises(BadInput):
            pool.reset_states(bad)
    assert torch.equal(pool.arena.buffer, before)


def test_track_slots_lie_behind_the_request_slots():
    pool, requests = make(), ReqToTokenPool(3, 4, device="cpu")
    a, b = pool.alloc_track_slot(), pool.alloc_track_slot()
    assert {a, b} == {4, 5} and pool.alloc_track_slot() is None
    assert not {a, b} & {0, *requests.alloc(3)}
    pool.free_track_slot(a)
    for bad in (a, 0, 3, 6, -1, True, 5.0):
        with pytest.raises(NotOwned):
            pool.free_track_slot(bad)
    assert pool.available_track_slots() == 1
    assert pool.alloc_track_slot() == a
    pool.check()
    assert make(track=0).alloc_track_slot() is None


@pytest.mark.parametrize("place", range(7))
@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None])
def test_sizes_that_are_no_positive_whole_numbers_raise(place, bad):
    args = [3, 2, 4, 5, 6, 7, 4]
    args[place] = bad
    with pytest.raises(BadInput):
        GDNPool(*args, device="cpu")
    with pytest.raises(BadInput):
        make(track=-1)


@pytest.mark.gpu
def test_states_live_on_the_device():
    pool = GDNPool(3, 2, 4, 8, 8, 16, 4, max_track_slots=1)
    recurrent, conv = pool.get_layer_state(0)
    recurrent[1], conv[1] = 3, 2
    pool.copy_states(torch.tensor([1], device="cuda"), pool.alloc_track_slot())
    assert recurrent.is_cuda and bool((recurrent[4] == 3).all()) and bool((conv[4] == 2).all())
    pool.reset_states(1)
    assert not recurrent[1].any()
