"""vLLM's schedulers with ``KVCacheManager``: what ``--scheduler-cls kvpagoda.adapters.vllm.Scheduler`` names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from vllm.v1.core.sched import async_scheduler, scheduler

from kvpagoda.adapters.vllm.log import announce, groups_text
from kvpagoda.adapters.vllm.manager import KVCacheManager
from kvpagoda.adapters.vllm.options import KEY, Options, check_version
from kvpagoda.adapters.vllm.plugin import is_registered
from kvpagoda.errors import BadInput


@contextmanager
def installed(options: Options | None = None) -> Iterator[None]:
    """Context in which vLLM's schedulers are made with our ``KVCacheManager``.

    Args:
        options: see ``Options``; None: the default.
    """
    own = scheduler.KVCacheManager
    scheduler.KVCacheManager = partial(KVCacheManager, options=options)
    try:
        yield
    finally:
        scheduler.KVCacheManager = own


class Scheduler(scheduler.Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with our ``KVCacheManager``; where vLLM schedules asynchronously, an ``AsyncScheduler``.

    Args:
        vllm_config: vLLM's.
        *args: vLLM's.
        **kwargs: vLLM's.

    Raises:
        BadInput: a version of vLLM or an option that is not supported, before anything is served.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
        is_async = vllm_config.scheduler_config.async_scheduling and cls is Scheduler
        made: Scheduler = super().__new__(AsyncScheduler if is_async else cls)
        return made

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        check_version()
        options = Options.of(vllm_config.additional_config)
        if options.memory is not None and not is_registered():
            raise BadInput.with_hint(
                f'"memory" needs kvpagoda\'s plug-in, which vLLM has not loaded: is {KEY!r} missing in VLLM_PLUGINS?',
                f"add {KEY} to VLLM_PLUGINS or unset it; after pip install of a newer kvpagoda, install it again",
                needed=KEY,
            )  # fmt: skip
        with installed(options):
            super().__init__(vllm_config, *args, **kwargs)
        manager = self.kv_cache_manager
        cached = str(options) if manager.enable_caching else "nothing, because prefix caching is off"
        announce(f"decides what stays in vLLM's cache: {cached}; {groups_text(manager.kv_cache_config)}")


class AsyncScheduler(Scheduler, async_scheduler.AsyncScheduler):  # type: ignore[misc]
    """The asynchronous one, by name. ``Scheduler`` chooses it by itself."""
