"""A pool and its allocator, made to fit each other."""

from __future__ import annotations

import torch

from kvpagoda.compat.kv_pool import KVPool
from kvpagoda.compat.req_pool import ReqToTokenPool
from kvpagoda.compat.token_allocator import TokenToKVPoolAllocator
from kvpagoda.memory.arena import Device


def make_full_attention_net_mem_pool(
    size: int,
    layer_num: int,
    k_head_num: int,
    k_head_dim: int,
    v_head_num: int | None = None,
    v_head_dim: int | None = None,
    device: Device = None,
    dtype: torch.dtype = torch.float16,
    page_size: int = 1,
    need_sort: bool = True,
    pin_memory: bool = True,
) -> tuple[KVPool, TokenToKVPoolAllocator]:
    """The pool of a model whose layers all attend to everything, and the allocator of its ``size`` usable indices.

    Arguments as of ``KVPool`` and ``TokenToKVPoolAllocator``. Raises BadInput.

    >>> pool, tokens = make_full_attention_net_mem_pool(64, layer_num=2, k_head_num=4, k_head_dim=8, device="cpu")
    >>> indices = tokens.alloc(3)
    >>> pool.set_kv_buffer(1, indices, torch.ones(3, 4, 8).half(), torch.ones(3, 4, 8).half())
    """
    allocator = TokenToKVPoolAllocator(size, device, page_size=page_size, need_sort=need_sort)
    pool = KVPool(size, layer_num, k_head_num, k_head_dim, device, dtype, v_head_num, v_head_dim, pin_memory)
    return pool, allocator


def make_req_to_token_pool(max_reqs: int, max_context_len: int, device: Device = None) -> ReqToTokenPool:
    """The table of ``max_reqs`` requests of at most ``max_context_len`` tokens. Raises BadInput.

    >>> make_req_to_token_pool(4, 100, device="cpu").req_to_token.shape
    torch.Size([5, 100])
    """
    return ReqToTokenPool(max_reqs, max_context_len, device)
