"""The public names, pinned: adding or removing one is a decision, not an accident."""

import subprocess
import sys

import pytest

import kvpagoda
from kvpagoda import compat

NAMES = [
    "Asleep",
    "BadInput",
    "BadLine",
    "Batch",
    "CacheStats",
    "CheckFailed",
    "ConcurrentUse",
    "EvictionPolicy",
    "Exhausted",
    "HandoverMiss",
    "Identity",
    "KVCache",
    "KVPagodaError",
    "LayerView",
    "LayoutError",
    "Limits",
    "MissingExtra",
    "Namespace",
    "NeedsReset",
    "NeverFits",
    "NotOwned",
    "OutOfBlocks",
    "PersistentBatch",
    "Plan",
    "PreemptionPolicy",
    "Retention",
    "RetryLater",
    "Schema",
    "SchemaError",
    "Sequence",
    "StaleHandle",
    "TicketRefused",
    "Worker",
    "simulate",
]
COMPAT = [
    "AttentionType",
    "BLOCK_SIZE_ORIGINAL_TOKENS",
    "BlockAllocator",
    "CacheEngine",
    "ClassicalView",
    "DSV4Config",
    "FFNType",
    "GDNPool",
    "IndexerView",
    "KVCacheManager",
    "KVPool",
    "LayerCacheHandle",
    "LayerSchema",
    "LayerSpec",
    "PagedKVPool",
    "PrefixCacheManager",
    "ReqToTokenPool",
    "RouterMode",
    "SWAView",
    "SlotAllocator",
    "StateCachePool",
    "TokenToKVPoolAllocator",
    "append_swa",
    "build_schedule",
    "build_schema",
    "compute_block_budget",
    "dequantize_entries",
    "dequantize_swa",
    "make_full_attention_net_mem_pool",
    "make_req_to_token_pool",
]
"""Names of the four designs: importable from ``kvpagoda`` and from ``kvpagoda.compat``, and listed by the latter alone."""


def test_the_public_names_are_these() -> None:
    assert kvpagoda.__all__ == dir(kvpagoda) == sorted(NAMES)
    assert compat.__all__ == dir(compat) == sorted(COMPAT)
    for name in (*NAMES, *COMPAT):
        assert getattr(kvpagoda, name).__doc__, name
    for name in COMPAT:
        assert getattr(compat, name) is getattr(kvpagoda, name), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pagoda'"):
        _ = kvpagoda.Pagoda


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("from kvpagoda import Schema; Schema.from_hf_config", "torch"),
        ("from kvpagoda import KVCache, Schema; KVCache", "torch"),
        ("from kvpagoda import SlotAllocator; SlotAllocator(3).alloc()", "torch"),
        ("from kvpagoda import KVCache, KVCacheManager, GDNPool", "transformers"),
        ("from kvpagoda import KVCache", "typer"),
    ],
)
def test_an_entry_level_imports_no_more_than_it_needs(program: str, absent: str) -> None:
    code = f"import sys; {program}; assert {absent!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
