"""A plugin of pytest for vLLM's own tests: ``-p vllm_plugin`` installs our cache manager in vLLM, as our Scheduler does.

vLLM's tests make vLLM's own ``Scheduler``, so the manager alone is exchanged, for as long as the tests run.
"""

from __future__ import annotations

import pytest

STAY_OUT: dict[str, str] = {}
"""Test -> the line of it that looks into what ours replaces."""


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
