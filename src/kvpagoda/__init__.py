"""kvpagoda: the KV-cache memory system. The public names, nothing else; each is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "kvpagoda.errors": (
        "BadInput", "CheckFailed", "Exhausted", "KVPagodaError", "NeverFits", "NotOwned", "OutOfBlocks", "RetryLater",
        "SchemaError", "StaleHandle",
    ),
    "kvpagoda.schema": ("Plan", "Schema"),
}  # fmt: skip

_ROOM = {name: room for room, names in _PUBLIC.items() for name in names}
__all__ = sorted(_ROOM)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _ROOM:
        raise AttributeError(f"module 'kvpagoda' has no attribute {name!r}")
    return getattr(import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return __all__
