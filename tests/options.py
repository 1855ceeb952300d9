"""Arguments of a cache as flat keywords, for tests that vary one at a time; and calls of internals that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np

import kvpagoda.core.groups.base
from kvpagoda import Identity, KVCache, Limits, Retention, Sequence
from kvpagoda.arrays import Ids
from kvpagoda.core.blocks.group import BlockGroup, BlockPlaces, PlaceTable
from kvpagoda.core.cache.request import State


def grouped(**flat: Any) -> dict[str, Any]:
    """Return the keyword arguments of ``KVCache`` for ``flat``, which may name fields of ``Retention``, ``Identity``
    and ``Limits`` directly."""
    arguments = dict(flat)
    for name, kind in (("retention", Retention), ("identity", Identity), ("limits", Limits)):
        given = {field.name: arguments.pop(field.name) for field in fields(kind) if field.name in arguments}
        if given:
            arguments[name] = kind(**given)
    return arguments


def is_suspended(sequence: Sequence) -> bool:
    """Return whether ``sequence`` is suspended."""
    return sequence._request.state is State.SUSPENDED


def evict(cache: KVCache, n: int) -> None:
    """Evict ``n`` blocks of the first group of ``cache``, and everything that is evicted with them."""
    core = cache.core
    core.capacity.forget(lambda: core.prefix.evict(core.groups[0], n), is_evicted=True)


def move_blocks(cache: KVCache, group: BlockGroup, sources: Ids) -> None:
    """Move the blocks at the places ``sources`` of ``group`` to free ones, as the cache does before a sector changes its
    group."""
    if not isinstance(group._places, PlaceTable):
        group._places = PlaceTable(group.plan.num_rows)
        group.names_at, group.places_of, group.may_move = group._places.names_at, group._places.places_of, True
    sources = BlockPlaces(np.sort(sources))
    core, targets = cache.core, BlockPlaces(group.free.acquire(len(sources)))
    core.memory.copy(group.index, sources, targets)
    group.move(*group.moving(sources, targets))
    core.capacity.num_moves += 1
    group.free.give(sources)


@contextmanager
def shuffled_places(seed: int) -> Iterator[None]:
    """In caches that are made within this context, no block has its name for its place."""

    def shuffled(num_rows: int, *, may_move: bool) -> PlaceTable:
        table = PlaceTable(num_rows)
        order = 1 + np.random.default_rng([seed, num_rows]).permutation(num_rows - 1)
        table.shuffle(np.concatenate(([0], order)).astype(np.int32))
        return table

    before = kvpagoda.core.groups.base.places_for
    kvpagoda.core.groups.base.places_for = shuffled
    try:
        yield
    finally:
        kvpagoda.core.groups.base.places_for = before
