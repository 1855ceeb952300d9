"""A plugin of pytest for vLLM's own tests: ``-p vllm_memory_plugin`` switches smaller groups on for every configuration."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    from kvpagoda.adapters.vllm import memory, plugin

    plugin.is_wanted = lambda vllm_config: True
    memory.refuse = lambda vllm_config: None  # stand-ins of a configuration do not have all that it reads
    plugin.register()
