"""Eviction policies by name, and objects that are policies."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

from kvpagoda.errors import BadInput, unknown_name
from kvpagoda.prefix.policies.arc import ARC
from kvpagoda.prefix.policies.auto import Auto
from kvpagoda.prefix.policies.by_priority import ByPriority
from kvpagoda.prefix.policies.fifo import FIFO
from kvpagoda.prefix.policies.lfu import LFU
from kvpagoda.prefix.policies.lfuda import LFUDA
from kvpagoda.prefix.policies.protocol import EvictionPolicy
from kvpagoda.prefix.policies.s3fifo import S3FIFO
from kvpagoda.prefix.policies.sieve import SIEVE

_PLAIN: dict[str, Callable[[], EvictionPolicy]] = {
    "fifo": FIFO, "lfu": LFU, "lfuda": LFUDA, "sieve": SIEVE, "priority": ByPriority, "ttl": ByPriority,
}  # fmt: skip
_SIZED: dict[str, Callable[[int], EvictionPolicy]] = {"s3fifo": S3FIFO, "arc": ARC, "auto": Auto}
POLICY_NAMES = ("lru", *_PLAIN, *_SIZED)
_TAKEN: dict[
    int, object
] = {}  # id of an object that a tree has or had -> a weak reference to it, where it can have one
_METHODS = ("add", "touch", "set_leaf", "choose", "remove", "check")


def as_policy(policy: str | EvictionPolicy, capacity: int) -> EvictionPolicy | None:
    """A fresh policy, by name, for one tree of ``capacity`` blocks; None for ``"lru"``, which trees have built in. An object
    is returned as it is, once: it knows the blocks of one tree.

    ``"auto"`` is LRU or ARC, as they do; ``"ttl"`` is ``"priority"`` with deadlines for priorities.
    Raises BadInput for a name that is none of ``POLICY_NAMES``, and for an object that lacks a method or was asked for before.
    """
    if not isinstance(policy, str):
        lacking = [name for name in _METHODS if not callable(getattr(policy, name, None))]
        if lacking or isinstance(policy, type):
            raise BadInput(f"{policy!r} is no EvictionPolicy object: see there for {', '.join(lacking or _METHODS)}")
        if id(policy) in _TAKEN:
            raise BadInput(f"{policy!r} serves a tree already, and knows its blocks; make another one")
        number = id(policy)
        try:
            _TAKEN[number] = ref(policy, lambda _: _TAKEN.pop(number))
        except TypeError:
            _TAKEN[number] = policy  # for good, so that its id stays its own
        return policy
    if policy == "lru":
        return None
    if policy in _PLAIN:
        return _PLAIN[policy]()
    if policy in _SIZED:
        return _SIZED[policy](capacity)
    raise unknown_name("eviction policy", policy, POLICY_NAMES)


def policy_name(policy: str | EvictionPolicy) -> str:
    """How reports call it: the name, or that of the object's class."""
    return policy if isinstance(policy, str) else type(policy).__name__
