"""Eviction policies by name, and validation of policy objects."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from weakref import ref

from kvpagoda.errors import BadInput, shown, unknown_name
from kvpagoda.policies.adaptive import ARC, Auto
from kvpagoda.policies.heap import FIFO, LFU, LFUDA, SIEVE, ByPriority
from kvpagoda.policies.protocol import EvictionPolicy
from kvpagoda.policies.s3fifo import S3FIFO

_PLAIN: dict[str, Callable[[], EvictionPolicy]] = {
    "fifo": FIFO, "lfu": LFU, "lfuda": LFUDA, "sieve": SIEVE, "priority": ByPriority, "ttl": ByPriority,
}  # fmt: skip
_SIZED: dict[str, Callable[[int], EvictionPolicy]] = {"s3fifo": S3FIFO, "arc": ARC, "auto": Auto}
POLICY_NAMES = ("lru", *_PLAIN, *_SIZED)
# id of a policy object that a tree uses or used -> a weak reference to it, or the object if it allows none
_TAKEN: dict[int, object] = {}
_METHODS = ("add", "touch", "set_leaf", "choose", "remove", "check")


def as_policy(policy: str | EvictionPolicy, capacity: int) -> EvictionPolicy | None:
    """Return a new policy for one tree: by name, or the object itself.

    Trees have LRU built in. An object is accepted once, because it knows the blocks of one tree. ``"auto"`` is LRU or
    ARC, whichever hits more often; ``"ttl"`` is ``"priority"`` with deadlines for priorities.

    Args:
        policy: a name or an object.
        capacity: the most blocks of the tree.

    Returns:
        The policy; None for ``"lru"``.

    Raises:
        BadInput: a name that is not in ``POLICY_NAMES``, a ``capacity`` below 1 if the policy needs it, an object that
            lacks a method or an object that was passed before.
    """
    if not isinstance(policy, str):
        _check(policy)
        if id(policy) in _TAKEN:
            raise BadInput(f"{policy!r} serves a tree already, and knows its blocks; make another one", needed="policy")
        number = id(policy)
        try:
            _TAKEN[number] = ref(policy, lambda _: _TAKEN.pop(number))
        except TypeError:
            _TAKEN[number] = policy  # kept for ever, so that no other object gets its id
        return policy
    name = str(policy)
    if name == "lru":
        return None
    if name in _PLAIN:
        return _PLAIN[name]()
    if name in _SIZED:
        if capacity < 1:
            text = f"{name} needs the number of blocks that the cache holds, at least 1, got {capacity}"
            raise BadInput(text, field=name, needed=1, available=capacity)
        return _SIZED[name](capacity)
    raise unknown_name("eviction policy", policy, POLICY_NAMES)


def _check(policy: str | EvictionPolicy) -> None:
    """Raise BadInput for what is neither a name nor an object with the methods of a policy."""
    lacking = [name for name in _METHODS if not callable(getattr(policy, name, None))]
    if not isinstance(policy, str) and (lacking or isinstance(policy, type)):
        text = f"{shown(policy)} is no EvictionPolicy object with the methods {', '.join(lacking or _METHODS)}"
        raise BadInput(text, needed=tuple(lacking or _METHODS))


def copied(policy: str | EvictionPolicy) -> str | EvictionPolicy:
    """Return a copy of ``policy`` for a tree that replaces the first one. Raises BadInput if it cannot be copied."""
    _check(policy)
    try:
        return deepcopy(policy)
    except TypeError as error:
        raise BadInput(f"{shown(policy)} is no EvictionPolicy that can be copied for a reset: {error}") from None


def policy_name(policy: str | EvictionPolicy) -> str:
    """Return the name of a policy for reports.

    Args:
        policy: a name, which is returned, or an object, of which the class name is.
    """
    return policy if isinstance(policy, str) else type(policy).__name__
