"""vLLM's scheduler with a cache that keeps what texts need to be resumed: switched on by one option of vLLM's.

    vllm serve MODEL --scheduler-cls kvpagoda.adapters.vllm.Scheduler

``Scheduler`` installs ``KVCacheManager`` in vLLM's own scheduler, the asynchronous one where vLLM would choose it.
Names are imported when they are first used; nothing here imports vLLM before. Those that run inside vLLM raise BadInput
in a version of it that is not supported. Where vLLM is not installed,
``KVCacheManager`` is the one of ``simulated``, for simulators: the same calls over a prefix tree, without vLLM.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpagoda.adapters.vllm.options import Options
    from kvpagoda.adapters.vllm.scheduler import AsyncScheduler, Scheduler, installed
    from kvpagoda.adapters.vllm.simulated import KVCacheManager

__all__ = ["AsyncScheduler", "KVCacheManager", "Options", "Scheduler", "installed"]

_MODULES = {"Scheduler": "scheduler", "AsyncScheduler": "scheduler", "installed": "scheduler", "Options": "options"}
_INSIDE = ("scheduler", "manager")
"""Modules that import vLLM's."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "KVCacheManager":
            module = "simulated" if find_spec("vllm") is None else "manager"
        elif name in _MODULES:
            module = _MODULES[name]
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if module in _INSIDE:  # first: another version may lack what these import
            import_module(f"{__name__}.options").check_version()
        return getattr(import_module(f"{__name__}.{module}"), name)
