"""A plugin of pytest for vLLM's own tests of its CPU tier: in place of vLLM's policies the one of ours that
``KVPAGODA_POLICY`` names, found by the path of its module as a user's configuration names it."""

from __future__ import annotations

import os
from typing import Any

STAY_OUT = (
    "TestARCPolicy", "test_arc_", "test_lru_and_arc_registered", "test_lru_batch_eviction_failure_is_atomic",
    "test_lru_repeated_pin_cycles_compact_lazy_heap_entries", "test_reset_discards_stale_request_access_classification",
    "test_touch_propagates_to_all_tiers", "test_cpu_manager", "test_store_threshold_does_not_hide_ready_reuse",
)  # fmt: skip
"""What looks into vLLM's LRU or ARC, or demands their order (the last two: a chunk that is used again becomes the newest)."""


def pytest_configure(config: Any) -> None:
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

    find = CachePolicyFactory.get_cache_policy_cls

    def found(name: str, module_path: str | None = None) -> Any:
        if name in ("lru", "arc"):
            name, module_path = os.environ["KVPAGODA_POLICY"], "kvpagoda.adapters.vllm.cpu_policy"
        return find(name, module_path)

    CachePolicyFactory.get_cache_policy_cls = found


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    items[:] = [item for item in items if not any(name in item.nodeid.partition("::")[2] for name in STAY_OUT)]
