"""The interfaces of four existing cache designs, each a thin layer over the core, with the names that they use.

``from kvpagoda.compat import KVPool``, or from the package itself. A name is imported from its module when it is first used.
"""

from typing import TYPE_CHECKING

from kvpagoda.loading import load_when_used

if TYPE_CHECKING:
    from kvpagoda.compat.block_allocator import BlockAllocator
    from kvpagoda.compat.cache_engine import CacheEngine
    from kvpagoda.compat.compressed_pools import PagedKVPool, StateCachePool
    from kvpagoda.compat.deepseek_v4 import (
        BLOCK_SIZE_ORIGINAL_TOKENS,
        AttentionType,
        DSV4Config,
        FFNType,
        LayerSchema,
        LayerSpec,
        RouterMode,
        build_schedule,
        build_schema,
        compute_block_budget,
    )
    from kvpagoda.compat.gdn_pool import GDNPool
    from kvpagoda.compat.kv_cache_manager import KVCacheManager
    from kvpagoda.compat.kv_pool import KVPool, make_full_attention_net_mem_pool
    from kvpagoda.compat.layer_handle import (
        ClassicalView,
        IndexerView,
        LayerCacheHandle,
        SWAView,
        dequantize_entries,
        dequantize_swa,
    )
    from kvpagoda.compat.prefix_cache_manager import PrefixCacheManager
    from kvpagoda.compat.req_pool import ReqToTokenPool, make_req_to_token_pool
    from kvpagoda.compat.slot_allocator import SlotAllocator
    from kvpagoda.compat.token_allocator import TokenToKVPoolAllocator
    from kvpagoda.kernels import append_swa

NAMES = {
    "kvpagoda.compat.deepseek_v4": (
        "BLOCK_SIZE_ORIGINAL_TOKENS", "AttentionType", "DSV4Config", "FFNType", "LayerSchema", "LayerSpec", "RouterMode",
        "build_schedule", "build_schema", "compute_block_budget",
    ),
    "kvpagoda.compat.slot_allocator": ("SlotAllocator",),
    "kvpagoda.compat.block_allocator": ("BlockAllocator",),
    "kvpagoda.compat.token_allocator": ("TokenToKVPoolAllocator",),
    "kvpagoda.kernels": ("append_swa",),
    "kvpagoda.compat.cache_engine": ("CacheEngine",),
    "kvpagoda.compat.compressed_pools": ("PagedKVPool", "StateCachePool"),
    "kvpagoda.compat.gdn_pool": ("GDNPool",),
    "kvpagoda.compat.layer_handle": (
        "ClassicalView", "IndexerView", "LayerCacheHandle", "SWAView", "dequantize_entries", "dequantize_swa",
    ),
    "kvpagoda.compat.kv_pool": ("KVPool", "make_full_attention_net_mem_pool"),
    "kvpagoda.compat.req_pool": ("ReqToTokenPool", "make_req_to_token_pool"),
    "kvpagoda.compat.prefix_cache_manager": ("PrefixCacheManager",),
    "kvpagoda.compat.kv_cache_manager": ("KVCacheManager",),
}  # fmt: skip
"""Module -> the names that it defines."""

__all__ = [
    "BLOCK_SIZE_ORIGINAL_TOKENS", "AttentionType", "BlockAllocator", "CacheEngine", "ClassicalView", "DSV4Config",
    "FFNType", "GDNPool", "IndexerView", "KVCacheManager", "KVPool", "LayerCacheHandle", "LayerSchema", "LayerSpec",
    "PagedKVPool", "PrefixCacheManager", "ReqToTokenPool", "RouterMode", "SWAView", "SlotAllocator", "StateCachePool",
    "TokenToKVPoolAllocator", "append_swa", "build_schedule", "build_schema", "compute_block_budget", "dequantize_entries",
    "dequantize_swa", "make_full_attention_net_mem_pool", "make_req_to_token_pool",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = load_when_used(__name__, NAMES)


def __dir__() -> list[str]:
    return __all__
