"""Arguments of a cache given flat, for tests that vary one at a time."""

from dataclasses import fields
from typing import Any

import numpy as np

from kvpagoda import Identity, KVCache, Limits, Retention, Sequence
from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.cache.request import State


def grouped(**flat: Any) -> dict[str, Any]:
    """Keyword arguments of ``KVCache`` in which fields of its values may be given by name."""
    arguments = dict(flat)
    for name, kind in (("retention", Retention), ("identity", Identity), ("limits", Limits)):
        given = {field.name: arguments.pop(field.name) for field in fields(kind) if field.name in arguments}
        if given:
            arguments[name] = kind(**given)
    return arguments


def is_suspended(sequence: Sequence) -> bool:
    """Whether it is set aside."""
    return sequence._request.state is State.SUSPENDED


def evict(cache: KVCache, n: int) -> None:
    """Let the cache give up ``n`` blocks of its first group, and what it evicts beside."""
    core = cache.core
    core.capacity.forget(lambda: core.prefix.evict(core.groups[0], n), is_evicted=True)


def move_blocks(cache: KVCache, group: BlockGroup, sources: Ids) -> None:
    """Move blocks to free places, as when a sector changes hands."""
    core, targets = cache.core, group.free.acquire(len(sources))
    new_ids = np.arange(group.plan.num_rows, dtype=np.int32)
    new_ids[sources] = targets
    core.memory.copy(group.index, sources, targets)
    group.remap(new_ids, group.slots_naming(sources))
    core.prefix.remap(group, new_ids)
    core.capacity.num_moves += 1
    group.free.give(sources)
