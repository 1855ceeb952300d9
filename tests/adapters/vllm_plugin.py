"""A plugin of pytest for vLLM's own tests: ``-p vllm_plugin`` installs our cache manager in vLLM, as our Scheduler does.

vLLM's tests make vLLM's own ``Scheduler``, so the manager alone is exchanged, for as long as the tests run.
"""

from __future__ import annotations

import pytest

_HASHES = "which blocks have a hash: with ours all that are whole and not used again, whatever the interval"
STAY_OUT = {
    "test_hybrid_local_kv_retention_interval_aligns_in_manager": f"test_prefix_caching.py:4790, {_HASHES}",
    "test_hybrid_local_kv_retention_interval_survives_recycling": f"test_prefix_caching.py:4939, {_HASHES}",
    "test_hybrid_local_kv_retention_latest_only_reuses_replay_boundary": f"test_prefix_caching.py:5003, {_HASHES}",
    "test_hybrid_local_kv_retention_mtp_reuses_latest_boundary": f"test_prefix_caching.py:5089, {_HASHES}",
    "test_hybrid_mamba_retention_lookahead_keeps_last_prompt_boundary": f"0.33's test_prefix_caching.py, {_HASHES}",
    "test_hybrid_mamba_retention_mtp_resend_of_aligned_prompt": f"test_prefix_caching.py:5166, {_HASHES}",
    "test_mamba_shared_prefix_reuse_under_zero_retention": "test_prefix_caching.py:5987: finds 32 tokens where vLLM finds 0",
    "test_mamba_shared_prefix_survives_zero_retention": f"the set of block numbers, {_HASHES}",
    "test_pure_swa_retention_interval_caches_sparse_tails": f"the set of block numbers, {_HASHES}",
    "test_pure_swa_retention_latest_only": f"the set of block numbers, {_HASHES}",
    "test_swa_shared_prefix_reuse_under_zero_retention": "test_prefix_caching.py:6258: nothing lags, so no boundary",
}
"""Test of vLLM 0.32 or 0.33 -> the line of it that looks into what ours replaces: its sparse retention. None of
them is in its tests of the schedulers."""


def pytest_configure(config: pytest.Config) -> None:
    from vllm.v1.core import kv_cache_manager

    from kvpagoda.adapters.vllm import KVCacheManager, installed

    context = installed()
    context.__enter__()
    config.add_cleanup(lambda: context.__exit__(None, None, None))
    kv_cache_manager.KVCacheManager = KVCacheManager  # for tests that make a manager


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = STAY_OUT.get(item.name.partition("[")[0])
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"it looks into what is replaced: {reason}"))
