"""What vLLM 0.33 makes when it asks who forms groups of layers: its own class, but for what ``memory`` decides."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_planning import DefaultKVCacheConfigBuilder

from kvpagoda.adapters.vllm.memory import config_of, groups_of, id_nbytes, is_packed


class GroupsBuilder(DefaultKVCacheConfigBuilder):  # type: ignore[misc]
    """vLLM's builder with smaller groups."""

    def get_kv_cache_groups(self, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """As vLLM's. Raises BadInput for what ``memory`` refuses."""
        return groups_of(vllm_config, kv_cache_spec, super().get_kv_cache_groups)

    def get_kv_cache_config_from_groups(self, vllm_config: Any, kv_cache_groups: Any, num_blocks: int) -> Any:
        """As vLLM's."""
        if is_packed(kv_cache_groups):
            return config_of(vllm_config, kv_cache_groups, num_blocks)
        return super().get_kv_cache_config_from_groups(vllm_config, kv_cache_groups, num_blocks)

    def _get_pool_bytes_per_block(self, vllm_config: Any, kv_cache_groups: Any) -> Any:
        if is_packed(kv_cache_groups):
            return id_nbytes(kv_cache_groups)
        return super()._get_pool_bytes_per_block(vllm_config, kv_cache_groups)
