"""Whether each namespace is within its quota, or has nothing cached that could be evicted: from the prefix tree alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvpagoda.core.prefix.node import nodes_below
from kvpagoda.namespace import owner_of


def cached_nbytes(core: Any) -> Counter[bytes]:
    """Return namespace_key -> bytes of its cached blocks and copies of states."""
    prefix, found = core.prefix, Counter[bytes]()
    for key, root in prefix.tree._roots.items():
        for node in nodes_below(root):
            for group in (*(() if prefix.full is None else (prefix.full,)), *prefix.windows):
                found[owner_of(key)] += len(group.cached_in(node.ids)) * group.plan.row_nbytes
            if prefix.states is not None and node.checkpoints is not None:
                found[owner_of(key)] += len(node.checkpoints.all) * prefix.states.plan.row_nbytes
    return +found


def unused(core: Any, own: bytes) -> list[str]:
    """Return what of the namespace has bytes and could be evicted now: a text whose windows are gone has none."""
    prefix, found = core.prefix, list[str]()
    for key, root in prefix.tree._roots.items():
        for node in nodes_below(root) if owner_of(key) == own else ():
            has_bytes = prefix.full is not None or any(len(group.cached_in(node.ids)) for group in prefix.windows)
            if node.is_evictable and has_bytes:
                found.append(f"blocks {node.num_pinned} to {node.num_blocks} of a text")
            for group in prefix.windows:
                ids = group.cached_in(node.ids)
                found += [
                    f"{number} cold blocks of {group.name}" for number in [int((group._uses[ids] < 0).sum())] if number
                ]
            for checkpoint in node.checkpoints.all if node.checkpoints is not None else ():
                if not checkpoint.num_holds:
                    found.append(f"a checkpoint after {checkpoint.depth} blocks")
    return found


def prove_within(cache: Any) -> None:
    """Prove that every namespace is within its quota, or that all it has cached is in use; and that ``stats`` says so."""
    core, most_of = cache.core, cache.core.settings.retention.quotas()
    if most_of is None or core.guard.aside is not None:
        return
    nbytes = cached_nbytes(core)
    assert core.prefix.quota.nbytes() == nbytes
    for own, count in nbytes.items():
        most = most_of(own)
        assert most is None or count <= most or not unused(core, own), (own, count, most, unused(core, own))
    assert sum(one.cached_nbytes for one in cache.stats().namespaces) == sum(nbytes.values())
