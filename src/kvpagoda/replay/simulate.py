"""A trace through a prefix tree with no memory behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvpagoda.blocks import FreeList
from kvpagoda.errors import BadInput
from kvpagoda.prefix import POLICY_NAMES, EvictionPolicy, PrefixTree, policy_name
from kvpagoda.replay.belady import furthest_next_use
from kvpagoda.replay.readers import Source
from kvpagoda.replay.trace import Trace

BOUND = "opt"
POLICIES = (*(name for name in POLICY_NAMES if name not in ("priority", "ttl")), BOUND)  # a trace has no priorities


@dataclass(frozen=True)
class ReplayResult:
    """What one policy did with one trace at one capacity."""

    trace: str
    policy: str
    capacity_blocks: int
    requests: int
    block_refs: int
    block_hits: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        """Hits of all block references, 0 to 1; 0 where there are none."""
        return self.block_hits / self.block_refs if self.block_refs else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The fields and the hit rate, for JSON."""
        return {**asdict(self), "hit_rate": self.hit_rate}


def known_policy(policy: str | EvictionPolicy) -> str:
    """The name of ``policy``, or of an object's class. Raises BadInput for a name that none has, with those that there are."""
    if isinstance(policy, str) and policy not in POLICIES:
        raise BadInput(f"no policy {policy!r}; there are {', '.join(POLICIES)}")
    return policy_name(policy)


def possible_capacity(blocks: int) -> int:
    """``blocks``, if a cache can have so many. Raises BadInput."""
    if isinstance(blocks, bool) or not isinstance(blocks, int | np.integer) or not 1 <= blocks < 2**31:
        raise BadInput(f"a capacity is a whole number of at least 1 block, below 2^31, got {blocks!r}")
    return int(blocks)


def replay(
    trace: Source | Trace,
    *,
    capacity_blocks: int,
    policy: str | EvictionPolicy = "lru",
    on_request: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Run a trace through a prefix tree of ``capacity_blocks`` blocks, one request after another.

    A request is a chain of blocks, and a block hits only if every earlier one of its chain does. (1) Its longest
    resident prefix is looked up and counted. (2) Its first ``capacity_blocks`` blocks are used, the deepest first, so
    that what hangs below a block is never more recent. (3) While more are resident than the capacity, the policy evicts
    a leaf; the request's own blocks may go. One id is one block. ``opt`` is no policy but the bound: it knows the future.

    ``policy``: a name, or an ``EvictionPolicy`` object that no other replay had.
    ``trace``: a path, an iterable of public records or Requests, or a Trace (read once, for many replays).
    ``on_request`` is told now and then how many requests are done. Raises BadInput before anything runs.

    >>> records = [{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": ids} for ids in ([1, 2, 3], [1, 2, 4])]
    >>> result = replay(records, capacity_blocks=3)
    >>> result.block_hits, result.evictions
    (2, 1)
    >>> [replay(records, capacity_blocks=2, policy=policy).hit_rate for policy in ("lru", "opt")]
    [0.3333333333333333, 0.3333333333333333]
    """
    name = known_policy(policy)
    possible_capacity(capacity_blocks)
    columns = Trace.read(trace)
    if len(columns) and not columns.num_refs:
        raise BadInput(f"{columns.name} names no blocks (lengths and arrivals only): there is nothing to look up")
    if name == BOUND:
        hits, evictions = furthest_next_use(columns, capacity_blocks)
    else:
        hits, evictions = _through_tree(columns, capacity_blocks, policy, on_request)
    return ReplayResult(columns.name, name, capacity_blocks, len(columns), columns.num_refs, hits, evictions)


def hit_rate_curve(
    trace: Source | Trace, capacities: Sequence[int], policies: Sequence[str | EvictionPolicy]
) -> list[ReplayResult]:
    """``replay`` at every capacity for every policy, capacities outermost. Raises BadInput before anything runs."""
    for policy in policies:
        known_policy(policy)
    for size in capacities:
        possible_capacity(size)
    columns = Trace.read(trace)
    return [replay(columns, capacity_blocks=size, policy=policy) for size in capacities for policy in policies]


def _through_tree(
    trace: Trace, capacity: int, policy: str | EvictionPolicy, on_request: Callable[[int], None] | None
) -> tuple[int, int]:
    """(hits, evictions), with the tree and the free list that a cache has. A token is an id, a block is one token."""
    tree = PrefixTree(1, policy=policy, capacity=capacity)
    longest = int(np.diff(trace.starts).max(initial=0))
    free = FreeList(min(trace.num_distinct, capacity + min(longest, capacity)), first=1, what="blocks")
    hits = evictions = 0
    for i in range(len(trace)):
        chain = trace.chain(i)
        match = tree.match(chain)
        hit, used = match.num_blocks, min(len(chain), capacity)
        hits += hit
        if hit < used:  # before the ones above them: the deepest are used first
            tree.insert(match, chain[hit:used], free.acquire(used - hit)[None])
        tree.touch(match, hit)
        over = tree.num_cached - capacity
        if over > 0:
            evicted = tree.evict(over)
            free.release(evicted.ids[0])
            evictions += over
        if on_request is not None and (i % 256 == 255 or i + 1 == len(trace)):
            on_request(i + 1)
    assert tree.num_cached == free.num_ids - free.num_free
    return hits, evictions
