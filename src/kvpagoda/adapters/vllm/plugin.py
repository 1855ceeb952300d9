"""The switch of ``memory``: what vLLM loads in each of its processes, and what is put in place of its own, by version.

vLLM has no option for how layers form groups. 0.33 asks its platform for the class that decides (``KVCacheConfigBuilder``),
0.32 has functions. Both are replaced by ones that ask the configuration first: without
``--additional-config '{"kvpagoda": {"memory": "groups"}}'`` they call vLLM's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpagoda.adapters.vllm.options import KEY, Options, check_version
from kvpagoda.errors import BadInput

OPTION = '"memory" in --additional-config'
_BUILDER = "kvpagoda.adapters.vllm.builder.GroupsBuilder"
_registered: set[type] = set()


def is_registered() -> bool:
    """Return whether vLLM has loaded this plug-in in this process."""
    return bool(_registered)


def is_wanted(vllm_config: Any) -> bool:
    """Return whether ``vllm_config`` asks for smaller groups.

    Raises:
        BadInput: a wrong option under "kvpagoda". Without that key nothing is looked at: the others are other programs'.
    """
    config = vllm_config.additional_config
    return isinstance(config, Mapping) and KEY in config and Options.of(config).memory is not None


def register() -> None:
    """Entry point of ``vllm.general_plugins``. Called in every process of vLLM, whatever its version and options."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if platform in _registered:
        return
    _registered.add(platform)
    try:
        check_version(option=OPTION)
    except BadInput:
        _refuse_when_asked(platform)
        return
    _replace_alignment(platform)
    if hasattr(platform, "get_kv_cache_config_builder_cls"):
        _name_builder(platform)
    else:
        from kvpagoda.adapters.vllm.functions import replace_functions

        replace_functions(is_wanted)


def _refuse_when_asked(platform: Any) -> None:
    """Of a version that is not known, replace only the check of a configuration: it refuses one that asks for us."""
    own = getattr(platform, "check_and_update_config", None)
    if own is None:
        return

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        if is_wanted(vllm_config):
            check_version(option=OPTION)
        own(vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)


def _replace_alignment(platform: Any) -> None:
    """Replace the function that makes a block of attention as large as a state. 0.32 and 0.33."""
    own = platform._align_hybrid_block_size

    def _align_hybrid_block_size(cls: type, vllm_config: Any, backend_cls: Any) -> None:
        if not is_wanted(vllm_config):
            own(vllm_config, backend_cls)
            return
        from kvpagoda.adapters.vllm.memory import align

        align(vllm_config, lambda: own(vllm_config, backend_cls))

    platform._align_hybrid_block_size = classmethod(_align_hybrid_block_size)


def _name_builder(platform: Any) -> None:
    """Name our class where vLLM asks for the one that forms groups. 0.33."""
    own = platform.get_kv_cache_config_builder_cls

    def get_kv_cache_config_builder_cls(cls: type, vllm_config: Any) -> str:
        return _BUILDER if is_wanted(vllm_config) else str(own(vllm_config))

    platform.get_kv_cache_config_builder_cls = classmethod(get_kv_cache_config_builder_cls)
