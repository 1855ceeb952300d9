"""kvpagoda: the KV-cache memory system.

This module holds the public names and nothing else. Each name is imported from its module when it is first used. The
names of ``kvpagoda.compat`` can be imported from here too, but ``dir`` and ``__all__`` list the library's own alone.
"""

from __future__ import annotations

import logging
from typing import Any

from kvpagoda.loading import load_when_used

_PUBLIC = {
    "kvpagoda.errors": (
        "Asleep", "BadInput", "BadLine", "CheckFailed", "ConcurrentUse", "Exhausted", "HandoverMiss", "KVPagodaError",
        "LayoutError", "MissingExtra", "NeedsReset", "NeverFits", "NotOwned", "OutOfBlocks", "RetryLater", "SchemaError",
        "StaleHandle", "TicketRefused",
    ),
    "kvpagoda.schema": ("Plan", "Schema"),
    "kvpagoda.batch.batch": ("Batch", "LayerView"),
    "kvpagoda.cache.options": ("Identity", "Limits", "Retention"),
    "kvpagoda.cache.stats": ("CacheStats",),
    "kvpagoda.kv_cache": ("KVCache",),
    "kvpagoda.worker": ("Worker",),
    "kvpagoda.cache.namespace": ("Namespace",),
    "kvpagoda.scheduling": ("PreemptionPolicy",),
    "kvpagoda.batch.persistent": ("PersistentBatch",),
    "kvpagoda.policies.protocol": ("EvictionPolicy",),
    "kvpagoda.cache.sequence": ("Sequence",),
    "kvpagoda.replay.fleet.simulation": ("simulate",),
}  # fmt: skip

__all__ = sorted(name for names in _PUBLIC.values() for name in names)
__version__ = "0.1.0"
logging.getLogger(__name__).addHandler(logging.NullHandler())  # quiet until the program configures logging

_own = load_when_used(__name__, _PUBLIC)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _own(name)
    from kvpagoda.compat import NAMES  # here, because most programs use none of them

    return load_when_used(__name__, NAMES)(name)


def __dir__() -> list[str]:
    return __all__
