"""Sleep and wake: a cache gives its physical memory back and gets it again; addresses, block tables and requests stay.

    sleep    settle ──► evict what is not kept, the coldest first ──► copy what is held to host memory ──► shut ──► give back
    wake     get again ──► copy back, each block to its own place ──► open

What is held goes to host memory: what requests and pins use, and with ``keep="tree"`` what else is cached; a cache with tiers
moves the latter there instead, as under pressure. Blocks keep their names and places, so nothing but bytes changes hands.

Until the cache is shut, a failure costs cached blocks at most. From then on the copy is complete, and ``wake`` may fail and
be repeated. While it sleeps, a fence of the cache's own is around every request: ``close`` waits for its end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from kvpagoda.abc import Status
from kvpagoda.core.blocks.group import BlockGroup, BlockPlaces
from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.lifecycle import Lifecycle
from kvpagoda.core.cache.sequence import Fence
from kvpagoda.core.groups import CacheGroup
from kvpagoda.errors import BadInput, shown
from kvpagoda.pages import Bytes
from kvpagoda.units import ceil_div, format_bytes, parse_bytes, real_number

_log = logging.getLogger(__name__)
Keep = Literal["nothing", "tree"]
_SHARE = 16  # of a group, at least 1/16 of its evictable blocks is evicted before the groups' ages are compared again
_ASKED = 4096  # records in one lookup


@dataclass(frozen=True)
class Slept:
    """What a ``sleep`` did. Blocks are those of all groups that were cached and not in use."""

    given_back: int
    """Bytes of the device's memory that were given back."""
    host_nbytes: int
    """Bytes that wait in host memory, of what is in use and of what is kept; ``wake`` copies these back."""
    running: int
    """Requests that run on after ``wake``."""
    kept: int
    """Blocks that stay cached."""
    kept_nbytes: int
    """Their bytes."""
    kept_in: Literal["", "host", "tiers"]
    """Where the kept blocks are."""
    dropped: int
    """Blocks that are cached no more."""
    dropped_nbytes: int
    """Their bytes."""

    def __str__(self) -> str:
        """Return the figures in a line."""
        where = f" in {self.kept_in}" if self.kept_in else ""
        return (
            f"{format_bytes(self.given_back)} given back, {format_bytes(self.host_nbytes)} in host memory; {self.kept} blocks "
            f"({format_bytes(self.kept_nbytes)}) kept{where}, {self.dropped} ({format_bytes(self.dropped_nbytes)}) dropped; "
            f"{self.running} requests"
        )


class _Copy(NamedTuple):
    """The blocks of ``group`` at ``places``, and their bytes: uint8 ``[n, bytes of a block]``."""

    group: BlockGroup
    places: BlockPlaces
    table: Bytes


class _Aside(NamedTuple):
    """What a sleeping cache needs to wake."""

    copies: tuple[_Copy, ...]
    fence: Fence


def sleep(lifecycle: Lifecycle, keep: Keep, nbytes: int | str | None, timeout: float) -> Slept:
    """Give the memory of the cache of ``lifecycle`` back; see ``KVCache.sleep``."""
    core, deadline = lifecycle.core, monotonic() + real_number(timeout, "the timeout, in seconds,")
    if not isinstance(keep, str) or keep not in get_args(Keep):
        raise BadInput(f"keep is one of {', '.join(get_args(Keep))}, got {shown(keep)}", field="keep", needed=keep)
    most = core.plan.nbytes if nbytes is None else parse_bytes(nbytes)
    core.check_open()
    lifecycle.ending.close_dropped()
    for request in core.running.values():
        lifecycle.ending.check_unfenced(request, "put to sleep")
    lifecycle.settler.settle_waiting()
    before, kept = _idle(core), (0, 0)
    where: Literal["", "host", "tiers"] = ""
    if keep == "nothing":
        _evict_all(core)
    else:
        _evict_coldest(core, most)
        where = "tiers" if core.tiers.levels else "host"
        kept = _move_below(core, deadline) if core.tiers.levels else _idle(core)
    copies = tuple(_copied(core))
    core.memory.wait_for_copies()
    fence = Fence(lifecycle, [*core.running.values()])
    try:
        fence.__enter__()
        core.guard.shut(_Aside(copies, fence))
    except BaseException:
        if core.guard.aside is None:
            fence.__exit__()
        raise
    core.counters.sleeps += 1
    given_back = core.memory.give_back()
    blocks, size = min(kept[0], before[0]), min(kept[1], before[1])
    slept = Slept(
        given_back, sum(copy.table.nbytes for copy in copies), len(core.running), blocks, size, where,
        before[0] - blocks, before[1] - size,
    )  # fmt: skip
    _log.info("the cache sleeps: %s", slept)
    return slept


def wake(core: Core) -> None:
    """Get the memory of ``core`` again; see ``KVCache.wake``."""
    aside: _Aside | None = core.guard.aside
    if aside is None:
        return
    core.memory.get_again()
    for group, places, table in aside.copies:
        rows = np.flatnonzero(np.isin(places, _held(core, group)))  # some may have been freed meanwhile
        core.memory.from_host(group.index, BlockPlaces(places[rows]), table, rows.tolist())
    core.memory.wait_for_copies()  # before the copies in host memory are freed
    core.guard.open()
    aside.fence.__exit__()


# -- what is dropped, and what goes below --------------------------------------------------------------------------------


def _idle(core: Core) -> tuple[int, int]:
    """Return how many blocks are cached and not in use, and their bytes."""
    counts = [(group.num_evictable, group.plan.layout.nbytes) for group in core.groups]
    return sum(n for n, _ in counts), sum(n * nbytes for n, nbytes in counts)


def _evict_coldest(core: Core, most: int) -> None:
    """Evict the blocks that were used least recently, over all groups, until the others that are not in use take at most
    ``most`` bytes."""
    while (excess := _idle(core)[1] - most) > 0:
        for group in _by_age(core):
            n = ceil_div(excess, group.plan.layout.nbytes)
            if len(core.groups) > 1:
                n = min(n, ceil_div(group.num_evictable, _SHARE))
            if core.capacity.forget(group.evict, n):
                break
        else:
            return  # the rest is held


def _by_age(core: Core) -> list[CacheGroup]:
    """Return the groups with evictable blocks, the one whose next block was used least recently first."""
    ages: list[tuple[int, CacheGroup]] = []
    for group in core.groups:
        if group.num_evictable:
            ages.append((0 if group.num_cold else core.guard.change(group.oldest) or 0, group))
    return [group for _, group in sorted(ages, key=lambda one: one[0])]


def _evict_all(core: Core, deadline: float | None = None) -> None:
    """Evict all that is not in use. ``deadline``: tiers store it as they store what is evicted, and get until then for each
    part to be stored before the next; None: it is lost."""
    prefix, forget, stores = core.prefix, core.capacity.forget, deadline is not None
    while True:  # before their texts, so that there is staging memory for each checkpoint
        if deadline is not None:
            core.tiers.num_storable(deadline)
        if not forget(prefix.evict_checkpoint, is_evicted=stores):
            break
    left = prefix.tree.num_evictable
    while left:
        room = None if deadline is None else core.tiers.num_storable(deadline)
        forget(prefix.evict_texts, min(left, room) if room else left, is_evicted=stores)
        before, left = left, prefix.tree.num_evictable
        if left >= before:
            break
    for group in prefix.windows:
        while group.num_cold and forget(group.evict, group.num_cold, is_evicted=stores):
            pass


def _move_below(core: Core, deadline: float) -> tuple[int, int]:
    """Evict all that is not in use into the tiers, which get until ``deadline``. Return how many blocks, and bytes, of
    what is no longer on the device the tier has that has most of it."""
    before = core.tiers.records()
    _evict_all(core, deadline)
    core.tiers.flush(max(0.0, deadline - monotonic()))
    after = core.tiers.records()
    found = [(0, 0)]
    for level, records in before.items():
        gone = [(key, size) for key, size in records.items() if key not in after[level]]
        found.append(_found(level, gone, deadline))
    return max(found)


def _found(level: Any, records: list[tuple[bytes, tuple[int, int]]], deadline: float) -> tuple[int, int]:
    """Return how many blocks and bytes those of ``records``, (key, blocks and bytes), have that ``level`` has. It gets until
    ``deadline`` to answer, and its own timeout at least."""
    blocks = nbytes = 0
    until = max(deadline, monotonic() + level.spec.timeout)
    for at in range(0, len(records), _ASKED):
        part = records[at : at + _ASKED]
        lease = level.tier.lookup([key for key, _ in part], until, 0.0).result()
        for (_, (count, size)), status in zip(part, lease.statuses):
            if status is Status.OK:
                blocks, nbytes = blocks + count, nbytes + size
        lease.release()
    return blocks, nbytes


# -- what waits in host memory -------------------------------------------------------------------------------------------


def _held(core: Core, group: BlockGroup) -> BlockPlaces:
    """Return the places of ``group`` that requests or the prefix cache hold, ascending."""
    held = group.free.held_ids()
    return BlockPlaces(held if core.sectors is None else np.setdiff1d(held, core.sectors.absent_ids(group)))


def _copied(core: Core) -> Iterable[_Copy]:
    """Yield a copy of what is held, for each group that holds anything. Waits for layers that are on their way to a block.
    Raises OutOfBlocks if the host lacks memory."""
    memory = core.memory
    for group in core.groups if memory.has_memory else ():
        places, width = _held(core, group), group.plan.layout.nbytes
        if len(places):
            host = memory.host_memory(memory.page_offset + len(places) * width)[memory.page_offset :]
            table = host.reshape(len(places), width)
            memory.to_host(group.index, places, table, range(len(places)))
            yield _Copy(group, places, table)
