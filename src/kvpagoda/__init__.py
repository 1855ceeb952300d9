"""kvpagoda: the KV-cache memory system.

This module holds the public names and nothing else. Each name is imported from its module when it is first used. The
names of ``kvpagoda.compat`` can be imported from here too, but ``dir`` and ``__all__`` list the library's own alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvpagoda.loading import load_when_used

if TYPE_CHECKING:
    from kvpagoda.abc import EvictionPolicy
    from kvpagoda.compat import *  # noqa: F403
    from kvpagoda.core.batch.batch import Batch, LayerView
    from kvpagoda.core.batch.persistent import PersistentBatch
    from kvpagoda.core.cache.options import Identity, Limits, Retention
    from kvpagoda.core.cache.prefix_cache import PrefixMatch
    from kvpagoda.core.cache.request import Breakpoint
    from kvpagoda.core.cache.sequence import Sequence
    from kvpagoda.core.cache.stats import CacheStats
    from kvpagoda.core.kv_cache import KVCache
    from kvpagoda.core.scheduling import PreemptionPolicy
    from kvpagoda.core.worker import Worker
    from kvpagoda.errors import (
        Asleep,
        BadInput,
        BadLine,
        CheckFailed,
        ConcurrentUse,
        Exhausted,
        HandoverMiss,
        KVPagodaError,
        LayoutError,
        MissingExtra,
        NeedsReset,
        NeverFits,
        NotOwned,
        OutOfBlocks,
        RetryLater,
        SchemaError,
        StaleHandle,
        TicketRefused,
    )
    from kvpagoda.namespace import Namespace
    from kvpagoda.replay.fleet.simulation import simulate
    from kvpagoda.schema import Plan, Schema

_PUBLIC = {
    "kvpagoda.errors": (
        "Asleep", "BadInput", "BadLine", "CheckFailed", "ConcurrentUse", "Exhausted", "HandoverMiss", "KVPagodaError",
        "LayoutError", "MissingExtra", "NeedsReset", "NeverFits", "NotOwned", "OutOfBlocks", "RetryLater", "SchemaError",
        "StaleHandle", "TicketRefused",
    ),
    "kvpagoda.schema": ("Plan", "Schema"),
    "kvpagoda.core.batch.batch": ("Batch", "LayerView"),
    "kvpagoda.core.cache.options": ("Identity", "Limits", "Retention"),
    "kvpagoda.core.cache.prefix_cache": ("PrefixMatch",),
    "kvpagoda.core.cache.request": ("Breakpoint",),
    "kvpagoda.core.cache.stats": ("CacheStats",),
    "kvpagoda.core.kv_cache": ("KVCache",),
    "kvpagoda.core.worker": ("Worker",),
    "kvpagoda.namespace": ("Namespace",),
    "kvpagoda.core.scheduling": ("PreemptionPolicy",),
    "kvpagoda.core.batch.persistent": ("PersistentBatch",),
    "kvpagoda.abc": ("EvictionPolicy",),
    "kvpagoda.core.cache.sequence": ("Sequence",),
    "kvpagoda.replay.fleet.simulation": ("simulate",),
}  # fmt: skip

__all__ = [
    "Asleep", "BadInput", "BadLine", "Batch", "Breakpoint", "CacheStats", "CheckFailed", "ConcurrentUse",
    "EvictionPolicy", "Exhausted", "HandoverMiss", "Identity", "KVCache", "KVPagodaError", "LayerView", "LayoutError",
    "Limits", "MissingExtra", "Namespace", "NeedsReset", "NeverFits", "NotOwned", "OutOfBlocks", "PersistentBatch",
    "Plan", "PreemptionPolicy", "PrefixMatch", "Retention", "RetryLater", "Schema", "SchemaError", "Sequence",
    "StaleHandle", "TicketRefused", "Worker", "simulate",
]  # fmt: skip
__version__ = "0.1.0"
logging.getLogger(__name__).addHandler(logging.NullHandler())  # quiet until the program configures logging

if not TYPE_CHECKING:  # a type checker reads the imports above, and reports names that are not there
    _own = load_when_used(__name__, _PUBLIC)

    def __getattr__(name: str) -> object:
        if name in __all__:
            return _own(name)
        from kvpagoda.compat import NAMES  # here, because most programs use none of them

        return load_when_used(__name__, NAMES)(name)


def __dir__() -> list[str]:
    return __all__
