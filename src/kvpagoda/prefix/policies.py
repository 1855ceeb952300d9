"""Eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable

from kvpagoda.errors import BadInput
from kvpagoda.prefix.auto import Auto
from kvpagoda.prefix.ghosts import ARC, S3FIFO
from kvpagoda.prefix.keyed import FIFO, LFU, LFUDA, SIEVE, ByPriority
from kvpagoda.prefix.policy import Policy

_PLAIN: dict[str, Callable[[], Policy]] = {
    "fifo": FIFO,
    "lfu": LFU,
    "lfuda": LFUDA,
    "sieve": SIEVE,
    "priority": ByPriority,
    "ttl": ByPriority,
}
_SIZED: dict[str, Callable[[int], Policy]] = {"s3fifo": S3FIFO, "arc": ARC, "auto": Auto}
POLICY_NAMES = ("lru", *_PLAIN, *_SIZED)


def policy_named(name: str, capacity: int) -> Policy | None:
    """A fresh policy for one tree of ``capacity`` blocks; None for ``"lru"``, which trees have built in.

    ``"auto"`` is LRU or ARC, as they do; ``"ttl"`` is ``"priority"`` with deadlines for priorities.
    Raises BadInput for a name that is none of ``POLICY_NAMES``.
    """
    if name == "lru":
        return None
    if name in _PLAIN:
        return _PLAIN[name]()
    if name in _SIZED:
        return _SIZED[name](capacity)
    raise BadInput(f"no eviction policy is called {name!r}; there are {', '.join(POLICY_NAMES)}")
