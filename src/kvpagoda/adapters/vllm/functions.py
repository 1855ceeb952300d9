"""What is put in the place of vLLM 0.32's functions that form groups of layers, place them and count their bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core import kv_cache_utils


def replace_functions(is_wanted: Callable[[Any], bool]) -> None:
    """Replace the three functions, for the rest of the process. ``is_wanted``: whether a configuration asks for ours."""
    groups: Callable[..., Any] = kv_cache_utils.get_kv_cache_groups
    config: Callable[..., Any] = kv_cache_utils.get_kv_cache_config_from_groups
    nbytes: Callable[..., Any] = kv_cache_utils._pool_bytes_per_block

    def is_ours(vllm_config: Any, kv_cache_groups: Any) -> bool:
        if not is_wanted(vllm_config):
            return False
        from kvpagoda.adapters.vllm.memory import is_packed

        return is_packed(kv_cache_groups)

    def get_kv_cache_groups(vllm_config: Any, kv_cache_spec: Any) -> Any:
        if not is_wanted(vllm_config):
            return groups(vllm_config, kv_cache_spec)
        from kvpagoda.adapters.vllm.memory import groups_of

        return groups_of(vllm_config, kv_cache_spec, groups)

    def get_kv_cache_config_from_groups(vllm_config: Any, kv_cache_groups: Any, available_memory: int) -> Any:
        if not is_ours(vllm_config, kv_cache_groups):
            return config(vllm_config, kv_cache_groups, available_memory)
        from kvpagoda.adapters.vllm.memory import config_of, id_nbytes

        return config_of(vllm_config, kv_cache_groups, available_memory // id_nbytes(kv_cache_groups))

    def _pool_bytes_per_block(vllm_config: Any, kv_cache_groups: Any) -> Any:
        if not is_ours(vllm_config, kv_cache_groups):
            return nbytes(vllm_config, kv_cache_groups)
        from kvpagoda.adapters.vllm.memory import id_nbytes

        return id_nbytes(kv_cache_groups)

    kv_cache_utils.get_kv_cache_groups = get_kv_cache_groups
    kv_cache_utils.get_kv_cache_config_from_groups = get_kv_cache_config_from_groups
    kv_cache_utils._pool_bytes_per_block = _pool_bytes_per_block
