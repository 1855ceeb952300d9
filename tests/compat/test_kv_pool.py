"""KVPool: three layouts in, rows out; nothing written when anything is wrong. And the factories."""

import numpy as np
import pytest
import torch

from kvpagoda.compat.kv_pool import KVPool, make_full_attention_net_mem_pool
from kvpagoda.compat.req_pool import make_req_to_token_pool
from kvpagoda.errors import BadInput, NotOwned
from raises import raises

SHAPES = {"mha": (4, 8, 4, 8), "gqa": (2, 8, 2, 8), "mqa": (1, 16, 1, 16), "mla": (1, 24, 1, 16), "odd": (3, 5, 2, 7)}


def make(shape="odd", size=9, layers=2, dtype=torch.float16):
    k_heads, k_dim, v_heads, v_dim = SHAPES[shape]
    return KVPool(size, layers, k_heads, k_dim, "cpu", dtype, v_heads, v_dim)


def rows_for(pool, *lead):
    k = torch.randn(*lead, pool.k_head_num, pool.k_head_dim).to(pool.dtype)
    v = torch.randn(*lead, pool.v_head_num, pool.v_head_dim).to(pool.dtype)
    return k, v


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_buffers_have_a_padding_row_and_the_v_dims_default_to_the_k_dims():
    pool = KVPool(10, 3, 2, 4, device="cpu")
    assert pool.dtype == torch.float16 and len(pool.k_buffer) == len(pool.v_buffer) == 3
    for layer in range(3):
        k, v = pool.get_kv_buffer(layer)
        assert k.shape == v.shape == (11, 2, 4) and k.dtype == torch.float16
        assert k.is_contiguous() and v.is_contiguous() and not k.any() and not v.any()
        assert k.data_ptr() == pool.get_key_buffer(layer).data_ptr() == pool.k_buffer[layer].data_ptr()
        assert v.data_ptr() == pool.get_value_buffer(layer).data_ptr() == pool.v_buffer[layer].data_ptr()
    assert pool.mem_bytes() >= 3 * 2 * 11 * 2 * 4 * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_all_three_layouts_write_the_same_rows(shape, dtype, index_dtype):
    pools = [make(shape, dtype=dtype) for _ in range(3)]
    k, v = rows_for(pools[0], 6)
    indices = torch.tensor([3, 9, 1, 7, 2, 5], dtype=index_dtype)
    pools[0].set_kv_buffer(1, indices, k, v)
    pools[1].set_kv_buffer(1, indices.view(2, 3), k.view(2, 3, *k.shape[1:]), v.view(2, 3, *v.shape[1:]))
    pools[2].set_kv_buffer(1, indices, k.flatten(1), v.flatten(1))
    for pool in pools:
        assert same_bits(pool.k_buffer[1][indices.long()], k) and same_bits(pool.v_buffer[1][indices.long()], v)
        assert not pool.k_buffer[0].view(torch.uint8).any() and not pool.v_buffer[0].view(torch.uint8).any()
        assert torch.equal(pool.arena.buffer, pools[0].arena.buffer)


def test_rows_need_not_be_contiguous_and_n_may_be_0():
    pool = make("mha")
    k, v = rows_for(pool, 4)
    pool.set_kv_buffer(0, torch.arange(1, 9)[::2], k.transpose(0, 1).contiguous().transpose(0, 1), v)
    assert same_bits(pool.k_buffer[0][[1, 3, 5, 7]], k)
    before = pool.arena.buffer.clone()
    pool.set_kv_buffer(0, torch.empty(0, dtype=torch.int32), k[:0], v[:0])
    assert torch.equal(pool.arena.buffer, before)


def test_row_0_absorbs_padded_tokens():
    pool = make()
    k, v = rows_for(pool, 3)
    pool.set_kv_buffer(0, torch.tensor([0, 4, 0]), k, v)
    assert same_bits(pool.k_buffer[0][4], k[1])
    assert not pool.k_buffer[0][1:4].any() and not pool.k_buffer[0][5:].any()


@pytest.mark.parametrize("bad", [[10], [-1], [1, 2**31], [1, -(2**40)]])
def test_an_index_out_of_range_raises_before_anything_is_written(bad):
    pool = make()
    with pytest.raises(NotOwned):
        pool.set_kv_buffer(0, torch.tensor(bad), *rows_for(pool, len(bad)))
    assert not pool.arena.buffer.any()


def test_wrong_shapes_dtypes_and_layers_raise_before_anything_is_written():
    pool = make()
    k, v = rows_for(pool, 2)
    indices = torch.tensor([1, 2])
    for args in (
        (indices, k[:1], v),
        (indices, k, v[:1]),
        (indices, k, k),
        (indices, k.float(), v),
        (indices, k, v.double()),
        (indices.view(1, 2), k, v),
        (indices, k.view(1, 2, *k.shape[1:]), v),
        (indices, k.flatten(), v.flatten()),
        (indices.float(), k, v),
        (indices.bool(), k, v),
    ):
        with pytest.raises(BadInput):
            pool.set_kv_buffer(0, *args)
    for layer in (2, -1, "0", None, 1.0, True):
        for call in (lambda n: pool.set_kv_buffer(n, indices, k, v), pool.get_kv_buffer, pool.get_value_buffer):
            with raises(BadInput, field="a layer of this pool", needed=layer, available=0):
                call(layer)
    assert not pool.arena.buffer.any()


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None])
def test_sizes_that_are_no_positive_whole_numbers_raise(bad):
    for place in range(4):
        args = [4, 2, 2, 8]
        args[place] = bad
        with pytest.raises(BadInput):
            KVPool(*args, device="cpu")


@pytest.mark.parametrize(("size", "page_size"), [(1, 1), (10, 1), (10, 4), (64, 16), (67, 16), (3, 4)])
def test_factory_pool_takes_every_index_of_its_allocator(size, page_size):
    pool, allocator = make_full_attention_net_mem_pool(size, 1, 2, 4, 2, 3, device="cpu", page_size=page_size)
    indices = allocator.alloc(allocator.available_size())
    k, v = rows_for(pool, len(indices))
    pool.set_kv_buffer(0, indices, k, v)
    assert same_bits(pool.k_buffer[0][indices.long()], k) and same_bits(pool.v_buffer[0][indices.long()], v)
    assert pool.v_buffer[0].shape[1:] == (2, 3)
    paged = pool.k_buffer[0][1 : 1 + allocator.num_pages * page_size].unflatten(0, (-1, page_size))
    assert same_bits(paged.flatten(0, 1), k)


def test_factories_default_the_v_dims_and_make_the_request_table():
    pool, allocator = make_full_attention_net_mem_pool(5, 2, 2, 4, device="cpu", dtype=torch.bfloat16, need_sort=False)
    assert pool.v_buffer[1].shape == (6, 2, 4) and pool.dtype == torch.bfloat16 and not allocator.need_sort
    table = make_req_to_token_pool(3, 16, device="cpu")
    assert table.available_size() == 3 and table.req_to_token.shape == (4, 16)


@pytest.mark.gpu
def test_writes_on_the_gpu(monkeypatch):
    pool, allocator = make_full_attention_net_mem_pool(9, 2, 2, 8)
    assert pool.k_buffer[0].is_cuda
    indices = allocator.alloc(4)
    k, v = (torch.randn(4, 2, 8, device="cuda").half() for _ in range(2))
    pool.set_kv_buffer(0, indices, k, v)
    assert torch.equal(pool.k_buffer[0][indices.long()], k) and torch.equal(pool.v_buffer[0][indices.long()], v)
    with pytest.raises(BadInput):
        pool.set_kv_buffer(0, indices, k.cpu(), v)
    monkeypatch.setenv("KVPAGODA_CHECK", "1")
    careful = KVPool(9, 1, 2, 8)
    with pytest.raises(NotOwned):
        careful.set_kv_buffer(0, indices + 9, k, v)


def test_rows_with_a_gradient_are_written_without_their_graph():
    pool = KVPool(16, 1, 2, 4, "cpu", torch.float32)
    x = torch.ones(2, 2, 4, requires_grad=True)
    pool.set_kv_buffer(0, [3, 5], 2 * x, 3 * x)
    k, v = pool.get_kv_buffer(0)
    assert (k[[3, 5]] == 2).all() and (v[[3, 5]] == 3).all() and not (k.requires_grad or v.requires_grad)
    pool.set_kv_buffer(0, np.array([1, 2]), x, x)
    assert (k[1:3] == 1).all()
    for k in (None, [1.0]):
        with pytest.raises(BadInput):
            pool.set_kv_buffer(0, [3, 5], k, x)
