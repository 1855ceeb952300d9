"""GDNPool: states that are copied and reset, track slots, the two axis orders."""

import pytest
import torch

from kvpagoda.compat.gdn_pool import GDNPool
from kvpagoda.compat.req_pool import ReqToTokenPool
from kvpagoda.errors import BadInput, NotOwned


def make(dtype=torch.bfloat16, track=2, kernel=4):
    return GDNPool(3, 2, 4, 5, 6, 7, kernel, device="cpu", dtype=dtype, max_track_slots=track)


def fill(pool):
    """Every slot of every layer holds its own numbers."""
    for layer in range(pool.num_gdn_layers):
        recurrent, conv = pool.get_layer_state(layer)
        recurrent.copy_(torch.randn(recurrent.shape))
        conv.copy_(torch.randn(conv.shape))
    return [tuple(state.clone() for state in pool.get_layer_state(layer)) for layer in range(pool.num_gdn_layers)]


def test_layer_states_are_views_of_the_pool():
    pool = make()
    recurrent, conv = pool.get_layer_state(1)
    assert recurrent.shape == (6, 4, 5, 6) and recurrent.dtype == torch.float32
    assert conv.shape == (6, 7, 3) and conv.dtype == torch.bfloat16
    assert recurrent.is_contiguous() and conv.is_contiguous()
    recurrent[2, 1, 3, 5] = 9
    assert pool.get_layer_state(1)[0][2, 1, 3, 5] == 9 and not pool.get_layer_state(0)[0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_mem_bytes_is_the_bytes_of_all_states(dtype, kernel):
    pool = make(dtype, kernel=kernel)
    states = [state for layer in range(2) for state in pool.get_layer_state(layer)]
    assert pool.mem_bytes() == sum(state.numel() * state.element_size() for state in states)
    assert pool.mem_bytes() == pool.arena.buffer.numel()


def test_the_other_axis_order_is_a_view_of_the_same_memory():
    pool = make()
    kv, vk = pool.get_layer_state(0)[0], pool.get_layer_state(0, order="vk")[0]
    assert vk.shape == (6, 4, 6, 5) and vk.data_ptr() == kv.data_ptr()
    state = torch.randn(4, 6, 5)  # as a kernel that puts v first writes it
    vk[1] = state
    assert torch.equal(kv[1], state.transpose(-1, -2)) and torch.equal(vk[1], state)
    for bad in ((2, "kv"), (-1, "kv"), (0, "xy")):
        with pytest.raises(BadInput):
            pool.get_layer_state(*bad)


@pytest.mark.parametrize("slots", [2, [2], torch.tensor([2]), torch.tensor([2], dtype=torch.int32)])
def test_reset_zeroes_only_the_named_slots(slots):
    pool = make()
    before = fill(pool)
    pool.reset_states(slots)
    for layer, states in enumerate(before):
        for now, then in zip(pool.get_layer_state(layer), states):
            assert not now[2].any() and torch.equal(now[[0, 1, 3, 4, 5]], then[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("copy", [(1, 4), ([1], [4]), (torch.tensor([1]), torch.tensor([4], dtype=torch.int32))])
def test_copy_moves_all_states_between_any_two_slots(copy):
    pool = make()
    before = fill(pool)
    pool.copy_states(*copy)
    for layer, states in enumerate(before):
        for now, then in zip(pool.get_layer_state(layer), states):
            assert torch.equal(now[4], then[1]) and torch.equal(now[[0, 1, 2, 3, 5]], then[[0, 1, 2, 3, 5]])


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
    for bad in (6, -1, [0, 6], [0.5], True):
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
