"""Replays a trace through a prefix tree, without memory behind it: once, or at many capacities with many policies.

Belady's bound, and first in, first out over single blocks, need no tree: their hits are counted in passes over the trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from heapq import heappop, heappush
from typing import Any, overload

import numpy as np

from kvpagoda.errors import BadInput, unknown_name
from kvpagoda.policies import POLICY_NAMES, EvictionPolicy, policy_name
from kvpagoda.replay.engines.run import EngineResult, replay_engine
from kvpagoda.replay.jobs import run_jobs
from kvpagoda.replay.readers import Source
from kvpagoda.replay.reuse import Reuse
from kvpagoda.replay.trace import Ints, Trace, readable
from kvpagoda.replay.tree_cache import TreeCache
from kvpagoda.units import whole_number

BOUND, BLOCK_FIFO = "opt", "block-fifo"
POLICIES = (*(name for name in POLICY_NAMES if name not in ("priority", "ttl")), BLOCK_FIFO, BOUND)
"""The names that ``replay`` takes. A trace has no priorities and no clock, so ``priority`` and ``ttl`` are missing. The
last two are not policies of a tree: ``block-fifo`` evicts any block, and ``opt`` knows the future."""
WITHOUT_TREE = ("lru", BLOCK_FIFO, BOUND)
"""Policies that need no tree in a curve, but one or two passes over the trace; others run a tree for each capacity."""
AnyPolicy = str | EvictionPolicy | type[EvictionPolicy]
"""A policy by name, as an object for one replay, or as a class that is called without arguments for each replay."""
Told = Callable[[float, str], None]
"""A callback: (number of finished replays, with fractions; the replay that runs)."""


@dataclass(frozen=True)
class ReplayResult:
    """The counts of one policy on one trace at one capacity, for the requests after the warm-up.

    Args:
        trace: its name.
        policy: its name.
        capacity_blocks: of the cache.
        requests: that were counted.
        block_refs: blocks that they named.
        block_hits: of these, those that were cached.
        evictions: blocks.
        token_refs: ``block_refs``, each block counted by the tokens that it stands for.
        token_hits: ``block_hits``, counted likewise.
        warm_up_requests: the first requests, which are not counted.
        full_after: the number of requests, the warm-up included, after which the cache was full; None: it never was.
        hits: int64 ``[all requests]``, the blocks that each request hit, the warm-up included.
        inserted: int64 ``[all requests]``, the blocks inserted up to the end of each request, the warm-up included.
    """

    trace: str
    policy: str
    capacity_blocks: int
    requests: int
    block_refs: int
    block_hits: int
    evictions: int
    token_refs: int = 0
    token_hits: int = 0
    warm_up_requests: int = 0
    full_after: int | None = None
    hits: Ints = field(default_factory=lambda: np.empty(0, np.int64), compare=False, repr=False)
    inserted: Ints = field(default_factory=lambda: np.empty(0, np.int64), compare=False, repr=False)

    @property
    def hit_rate(self) -> float:
        """The share of the block references that hit, 0 to 1; 0 without references."""
        return self.block_hits / self.block_refs if self.block_refs else 0.0

    @property
    def token_hit_rate(self) -> float:
        """The share of the tokens that hit, 0 to 1; 0 without tokens."""
        return self.token_hits / self.token_refs if self.token_refs else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return all fields but the arrays, and the hit rates, for JSON."""
        plain = {column.name: getattr(self, column.name) for column in fields(self) if column.compare}
        return {**plain, "hit_rate": self.hit_rate, "token_hit_rate": self.token_hit_rate}


def known_policy(policy: AnyPolicy) -> str:
    """Return the name of ``policy``; for an object, that of its class. Raises BadInput for an unknown name, and lists
    the names."""
    if isinstance(policy, str) and policy not in POLICIES:
        raise unknown_name("policy", policy, POLICIES)
    return policy.__name__ if isinstance(policy, type) else policy_name(policy)


def fresh(policy: AnyPolicy) -> str | EvictionPolicy:
    """Return a policy for one replay: of a class, a new object."""
    return policy() if isinstance(policy, type) else policy


def checked(policies: Sequence[AnyPolicy], capacities: Sequence[int], warm_up: float) -> tuple[list[str], list[int]]:
    """Check the arguments of a replay; return the names of the policies, and the capacities as ints. Raises
    BadInput."""
    names = [known_policy(policy) for policy in policies]
    sizes = [whole_number(blocks, "a capacity in blocks", at_least=1, below=2**31) for blocks in capacities]
    if isinstance(warm_up, bool) or not isinstance(warm_up, int | float) or not 0 <= warm_up < 1:
        text = f"warm_up must be a share of the requests, at least 0 and below 1, got {warm_up!r}"
        raise BadInput(text, needed=warm_up)
    return names, sizes


@overload
def replay(
    trace: Source | Trace,
    capacity_blocks: int,
    policy: str | EvictionPolicy = "lru",
    *,
    warm_up: float = 0.0,
    on_request: Callable[[int], None] | None = None,
) -> ReplayResult: ...


@overload
def replay(trace: Source | Trace, capacity_blocks: int, *, engine: str, **settings: Any) -> EngineResult: ...


def replay(
    trace: Source | Trace,
    capacity_blocks: int,
    policy: str | EvictionPolicy = "lru",
    *,
    warm_up: float = 0.0,
    on_request: Callable[[int], None] | None = None,
    engine: str | None = None,
    **settings: Any,
) -> ReplayResult | EngineResult:
    """Run a trace through a prefix tree, one request after another.

    A request is a chain of blocks, and a block hits only if every earlier block of its chain hits. (1) The longest
    cached prefix of the chain is looked up and counted. (2) Its first ``capacity_blocks`` blocks are inserted and used,
    the deepest first, so that a block is never older than the blocks below it. (3) While more blocks are cached than
    the capacity, the policy evicts a leaf, which may be one of the request's own blocks. One id is one block.

    Args:
        trace: a path or an iterable of public records or Requests, which are ordered by arrival if they are not; or a
            Trace (read once, for many replays), in its order: ``Trace.read(path, keep_order=True)`` has that of the
            file.
        capacity_blocks: the most blocks that are cached.
        policy: a name, or an ``EvictionPolicy`` object that was not used in another replay. ``opt`` is not a policy but
            the bound: it knows the future. ``block-fifo`` evicts the block that was inserted first, leaf or not.
        warm_up: the share of the requests that run first and are not counted, rounded down to whole requests.
        on_request: called now and then with the number of finished requests.
        engine: serve the trace as the cache of an engine would.
        **settings: of ``replay_engine``, with an ``engine``; most are fields of ``EngineSettings``.

    Raises:
        BadInput: an unknown policy, a capacity below 1, a ``warm_up`` that is not at least 0 and below 1, ``settings``
            without an ``engine``, or a trace without blocks; before anything runs.

    Examples:
        >>> chains = [1, 2, 3], [1, 2, 4]
        >>> records = [{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": ids} for ids in chains]
        >>> result = replay(records, capacity_blocks=3)
        >>> result.block_hits, result.evictions
        (2, 1)
        >>> [replay(records, capacity_blocks=2, policy=policy).hit_rate for policy in ("lru", "opt")]
        [0.3333333333333333, 0.3333333333333333]
    """
    if engine is not None:
        return replay_engine(trace, engine, capacity_blocks, on_request=on_request, **settings)
    if settings:
        raise BadInput(f"{', '.join(settings)}: for a replay with engine=, which is missing")
    (name,), (capacity,) = checked([policy], [capacity_blocks], warm_up)
    columns = readable(trace)
    if name == BOUND:
        return counted(columns, name, capacity, warm_up, furthest_next_use(columns, Reuse.of(columns), capacity))
    if name == BLOCK_FIFO:
        return counted(columns, name, capacity, warm_up, *block_fifo(columns, capacity))
    return counted(columns, name, capacity, warm_up, _through_tree(columns, capacity, policy, on_request))


def hit_rate_curve(
    trace: Source | Trace,
    capacities: Sequence[int],
    policies: Sequence[AnyPolicy],
    *,
    warm_up: float = 0.0,
    jobs: int = 1,
    reuse: Reuse | None = None,
    on_progress: Told | None = None,
    on_result: Callable[[ReplayResult], object] | None = None,
) -> list[ReplayResult]:
    """Return the results of ``replay`` at every capacity for every policy; capacities are the outer loop.

    ``lru`` and ``opt`` are computed from the stretches of one pass; other policies run in ``jobs`` processes at once
    (with more than one, a script needs ``if __name__ == "__main__"``).

    Args:
        trace: see ``replay``.
        capacities: in blocks.
        policies: names, or classes of your own, which are called for each capacity; an object serves one capacity
            alone.
        warm_up: see ``replay``.
        jobs: processes.
        reuse: the stretches of this trace, if they are known already.
        on_progress: called with what is done.
        on_result: called with each result as it is there, in any order: after an interrupt (Ctrl-C) these are what was
            done.

    Raises:
        BadInput: an unknown policy, a capacity or ``jobs`` below 1, a ``warm_up`` that is not at least 0 and below 1,
            or a trace without blocks; before anything runs.
    """
    names, sizes = checked(policies, capacities, warm_up)
    asked = [(size, number) for size in sizes for number in range(len(names))]
    whole_number(jobs, "jobs", at_least=1)
    columns = readable(trace)
    if reuse is None and ("lru" in names or BOUND in names):
        reuse = Reuse.of(columns)
    found: dict[tuple[int, int], ReplayResult] = {}

    def keep(key: tuple[int, int], result: ReplayResult) -> None:
        found[key] = result
        if on_result is not None:
            on_result(result)

    def tell(size: int, number: int, requests: int = 0) -> None:
        if on_progress is not None:
            on_progress(len(found) + requests / max(1, len(columns)), f"{names[number]}, {size:,} blocks")

    slow = []
    for size, number in asked:
        policy = policies[number]
        if reuse is None or policy not in ("lru", BOUND):
            slow.append((size, number))
            continue
        hits = reuse.hits(size) if policy == "lru" else furthest_next_use(columns, reuse, size)
        keep((size, number), counted(columns, names[number], size, warm_up, hits))
        tell(size, number)

    def done(number: int, result: ReplayResult) -> None:
        keep(slow[number], result)

    can_pickle = all(isinstance(policy, str) for policy in policies)
    work = [partial(_replay, size, policies[number], warm_up) for size, number in slow]
    run_jobs(work, columns, jobs if can_pickle else 1, done, lambda job, requests: tell(*slow[job], requests))
    return [found[key] for key in asked]


def counted(
    trace: Trace, policy: str, capacity: int, warm_up: float, hits: Ints, inserted: Ints | None = None
) -> ReplayResult:
    """Return the result of a replay in which each request hit ``hits`` blocks and inserted ``inserted``, both int64
    ``[requests]``. None: each inserted all those of its first ``capacity`` blocks that did not hit. O(requests)."""
    sizes = np.diff(trace.starts)
    first = math.floor(len(trace) * warm_up)
    upto = np.cumsum(np.minimum(sizes, capacity) - hits if inserted is None else inserted)
    evicted = np.maximum(upto - capacity, 0)  # a full cache stays full
    is_full = upto >= capacity
    return ReplayResult(
        trace.name, policy, capacity, requests=len(trace) - first, block_refs=int(sizes[first:].sum()),
        block_hits=int(hits[first:].sum()), evictions=int(evicted[-1:].sum() - evicted[:first][-1:].sum()),
        token_refs=int(trace.tokens_of(sizes)[first:].sum()), token_hits=int(trace.tokens_of(hits)[first:].sum()),
        warm_up_requests=first, full_after=int(is_full.argmax()) + 1 if is_full.any() else None, hits=hits,
        inserted=upto,
    )  # fmt: skip


def _through_tree(
    trace: Trace, capacity: int, policy: str | EvictionPolicy, on_request: Callable[[int], None] | None
) -> Ints:
    """Return the blocks that each request hits, int64 ``[requests]``."""
    cache, hits = TreeCache(capacity, policy), np.zeros(len(trace), np.int64)
    for i in range(len(trace)):
        hits[i], _ = cache.request(trace.chain(i))
        if on_request is not None and (i % 256 == 255 or i + 1 == len(trace)):
            on_request(i + 1)
    return hits


def _replay(
    capacity: int, policy: AnyPolicy, warm_up: float, trace: Trace, on_request: Callable[[int], None] | None = None
) -> ReplayResult:
    return replay(trace, capacity_blocks=capacity, policy=fresh(policy), warm_up=warm_up, on_request=on_request)


def furthest_next_use(trace: Trace, reuse: Reuse, capacity: int) -> Ints:
    """Return the blocks of each request that Belady's MIN with bypass hits: int64 ``[requests]``. It evicts the block
    whose next use is furthest in the future, the deepest first. ``reuse``: the stretches of this trace.

    Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966. The
    nearer a block is to the root of its chain, the sooner it is needed again. So the blocks that are cached for request
    ``r``, and for no request before it, are always one stretch of its chain, which two numbers describe:

        chain of r   | cached for requests before r | cached for r | not cached |
                     0                           low[r]         high[r]

    O((requests + stretches) log requests).
    """
    n = len(trace)
    low, high, hits = [0] * n, [0] * n, [0] * n
    idle = resident = 0  # idle: resident blocks that are never used again
    furthest: list[int] = []  # heap of -r for every r with cached blocks; r may be in it twice, or be finished
    # stretches by the earlier request, which keeps their blocks for the later one
    order = np.lexsort((reuse.begin, reuse.last))
    keeps_for, upto = reuse.request[order].tolist(), reuse.end[order].tolist()
    first = np.searchsorted(reuse.last[order], np.arange(n + 1)).tolist()
    for i, size in enumerate(np.diff(trace.starts).tolist()):
        hits[i] = high[i]
        kept = min(size, capacity)
        resident += kept - high[i]
        low[i] = high[i] = top = 0
        for stretch in range(first[i], first[i + 1]):
            if top == kept:
                break
            r, bottom = keeps_for[stretch], min(upto[stretch], kept)
            assert high[r] == low[r] or low[r] == bottom
            high[r] = max(bottom, high[r])
            low[r] = top
            heappush(furthest, -r)
            top = bottom
        idle += kept - top
        over = resident - capacity
        if over <= 0:
            continue
        resident = capacity
        evicted = min(over, idle)
        idle, over = idle - evicted, over - evicted
        while over:
            r = -furthest[0]
            evicted = min(over, high[r] - low[r])
            high[r] -= evicted
            over -= evicted
            if high[r] == low[r]:
                low[r] = high[r] = 0
                heappop(furthest)
    return np.array(hits, np.int64)


def block_fifo(trace: Trace, capacity: int) -> tuple[Ints, Ints]:
    """Return (hits, insertions), int64 ``[requests]`` each, of a cache of ``capacity`` blocks, without a prefix tree,
    that evicts the oldest insertion, leaf or not.

    A request hits the blocks before its first missing block. Then it inserts the missing blocks, from the root on. Each
    replaces the oldest block, which may be one of the request's own. Blocks after a missing block stay cached, and hit
    again once that block is inserted.

    The cache always holds the last ``capacity`` insertions, so the number of a block's last insertion tells whether it
    is cached. O(refs) array work; a request is repeated while its insertions evict blocks that it would use later
    itself.
    """
    number = np.full(int(trace.blocks.max(initial=-1)) + 1, -capacity - 1, np.int64)  # of the last insertion of a block
    hits, inserted = np.zeros(len(trace), np.int64), np.zeros(len(trace), np.int64)
    total = 0
    for i in range(len(trace)):
        chain = trace.blocks[trace.starts[i] : trace.starts[i + 1]]
        own = number[chain]
        is_missing = own < total - capacity
        if not is_missing.any():
            hits[i] = len(chain)
            continue
        hits[i] = is_missing.argmax()
        while True:
            before: Ints = np.cumsum(is_missing) - is_missing  # insertions of this request before each of its blocks
            is_evicted = own < total - capacity + before
            if np.array_equal(is_evicted, is_missing):
                break
            is_missing = is_evicted
        number[chain[is_missing]] = total + before[is_missing]
        inserted[i] = np.count_nonzero(is_missing)
        total += int(inserted[i])
    return hits, inserted
