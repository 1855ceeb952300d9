"""A plugin of pytest for vLLM's own tests: ``-p vllm_memory_plugin`` switches smaller groups on for every configuration."""

from __future__ import annotations

import pytest

GROUPED = "it counts vLLM's own groups, tensors or padding layers"
STAY_OUT: dict[str, str] = {}
"""Test of vLLM 0.32 or 0.33 -> why: what it looks at is what is replaced."""


def pytest_configure(config: pytest.Config) -> None:
    from kvpagoda.adapters.vllm import plugin

    plugin.is_wanted = lambda vllm_config: True
    plugin.register()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = STAY_OUT.get(item.name.partition("[")[0])
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
