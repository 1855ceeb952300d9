"""vLLM's scheduler with a cache that keeps what texts need to be resumed: switched on by one option of vLLM's.

    vllm serve MODEL --scheduler-cls kvpagoda.adapters.vllm.Scheduler

``Scheduler`` installs ``KVCacheManager`` in vLLM's own scheduler, the asynchronous one where vLLM would choose it.
Names are imported when they are first used; nothing here imports vLLM before. Those that run inside vLLM raise BadInput
in a version of it that is not supported, and MissingExtra where it is not installed. To compare with vLLM's own cache
without it, ``kvpagoda.replay`` has one: ``engine="vllm"``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpagoda.adapters.vllm.manager import KVCacheManager
    from kvpagoda.adapters.vllm.options import Options
    from kvpagoda.adapters.vllm.scheduler import AsyncScheduler, Scheduler, installed

__all__ = ["AsyncScheduler", "KVCacheManager", "Options", "Scheduler", "installed"]

_MODULES = {
    "Scheduler": "scheduler", "AsyncScheduler": "scheduler", "installed": "scheduler", "KVCacheManager": "manager",
    "Options": "options",
}  # fmt: skip
_INSIDE = ("scheduler", "manager")
"""Modules that import vLLM's."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _MODULES[name]
        if module in _INSIDE:  # first: another version may lack what these import
            import_module(f"{__name__}.options").check_version()
        return getattr(import_module(f"{__name__}.{module}"), name)
