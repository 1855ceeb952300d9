"""kvpagoda: the KV-cache memory system.

This module holds the public names and nothing else. Each name is imported from its module when it is first used.
"""

from __future__ import annotations

import logging

from kvpagoda.loading import load_when_used

_PUBLIC = {
    "kvpagoda.errors": (
        "BadInput", "CheckFailed", "ConcurrentUse", "Exhausted", "KVPagodaError", "LayoutError", "MissingExtra", "NeedsReset",
        "NeverFits", "NotOwned", "OutOfBlocks", "RetryLater", "SchemaError", "StaleHandle",
    ),
    "kvpagoda.schema": ("Plan", "Schema"),
    "kvpagoda.compat.deepseek_v4": (
        "BLOCK_SIZE_ORIGINAL_TOKENS", "AttentionType", "DSV4Config", "FFNType", "LayerSchema", "LayerSpec", "RouterMode",
        "build_schedule", "build_schema", "compute_block_budget",
    ),
    "kvpagoda.compat.slot_allocator": ("SlotAllocator",),
    "kvpagoda.compat.block_allocator": ("BlockAllocator",),
    "kvpagoda.compat.token_allocator": ("TokenToKVPoolAllocator",),
    "kvpagoda.kernels.append_swa": ("append_swa",),
    "kvpagoda.compat.cache_engine": ("CacheEngine",),
    "kvpagoda.compat.compressed_pools": ("PagedKVPool", "StateCachePool"),
    "kvpagoda.compat.gdn_pool": ("GDNPool",),
    "kvpagoda.compat.layer_handle": (
        "ClassicalView", "IndexerView", "LayerCacheHandle", "SWAView", "dequantize_entries", "dequantize_swa",
    ),
    "kvpagoda.compat.kv_pool": ("KVPool", "make_full_attention_net_mem_pool"),
    "kvpagoda.compat.req_pool": ("ReqToTokenPool", "make_req_to_token_pool"),
    "kvpagoda.batch.batch": ("Batch", "LayerView"),
    "kvpagoda.cache.options": ("Identity", "Limits", "Retention"),
    "kvpagoda.cache.stats": ("CacheStats",),
    "kvpagoda.kv_cache": ("KVCache",),
    "kvpagoda.cache.namespace": ("Namespace",),
    "kvpagoda.scheduling": ("PreemptionPolicy",),
    "kvpagoda.batch.persistent": ("PersistentBatch",),
    "kvpagoda.policies.protocol": ("EvictionPolicy",),
    "kvpagoda.compat.prefix_cache_manager": ("PrefixCacheManager",),
    "kvpagoda.cache.sequence": ("Sequence",),
    "kvpagoda.compat.kv_cache_manager": ("KVCacheManager",),
}  # fmt: skip

__all__ = sorted(name for names in _PUBLIC.values() for name in names)
__version__ = "0.1.0"
logging.getLogger(__name__).addHandler(logging.NullHandler())  # quiet until the program configures logging

__getattr__ = load_when_used(__name__, _PUBLIC)


def __dir__() -> list[str]:
    return __all__
