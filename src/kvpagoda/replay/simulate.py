"""A trace through a prefix tree with no memory behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from kvpagoda.blocks import FreeList
from kvpagoda.errors import BadInput, unknown_name
from kvpagoda.prefix import POLICY_NAMES, EvictionPolicy, PrefixTree, policy_name
from kvpagoda.replay.belady import furthest_next_use
from kvpagoda.replay.block_fifo import block_fifo
from kvpagoda.replay.readers import Source
from kvpagoda.replay.reuse import Reuse
from kvpagoda.replay.trace import Ints, Trace
from kvpagoda.units import whole_number

BOUND, BLOCK_FIFO = "opt", "block-fifo"
POLICIES = (*(name for name in POLICY_NAMES if name not in ("priority", "ttl")), BLOCK_FIFO, BOUND)
"""A trace has no priorities. The last two are no policies of a tree: one evicts any block, the other knows the future."""
WITHOUT_TREE = ("lru", BLOCK_FIFO, BOUND)
"""What a pass or two over the trace tells in a curve; others run a tree for each capacity."""


@dataclass(frozen=True)
class ReplayResult:
    """What one policy did with one trace at one capacity, in the requests after the first ``warm_up_requests``.

    ``token_refs`` and ``token_hits`` count each block by the tokens that it stands for. ``full_after``: requests, those of
    the warm-up counted, until the cache was full (None: it never was). ``hits`` int64: the blocks that every request hit,
    those of the warm-up too.
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

    @property
    def hit_rate(self) -> float:
        """Hits of all block references, 0 to 1; 0 where there are none."""
        return self.block_hits / self.block_refs if self.block_refs else 0.0

    @property
    def token_hit_rate(self) -> float:
        """The same of tokens."""
        return self.token_hits / self.token_refs if self.token_refs else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The fields but ``hits``, and the hit rates, for JSON."""
        plain = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "hits"}
        return {**plain, "hit_rate": self.hit_rate, "token_hit_rate": self.token_hit_rate}


def known_policy(policy: str | EvictionPolicy) -> str:
    """The name of ``policy``, or of an object's class. Raises BadInput for a name that none has, with those that there are."""
    if isinstance(policy, str) and policy not in POLICIES:
        raise unknown_name("policy", policy, POLICIES)
    return policy_name(policy)


def checked(
    policies: Sequence[str | EvictionPolicy], capacities: Sequence[int], warm_up: float
) -> tuple[list[str], list[int]]:
    """The names of the policies, and the capacities, if all that can be replayed. Raises BadInput."""
    names = [known_policy(policy) for policy in policies]
    sizes = [whole_number(blocks, "a capacity in blocks", at_least=1, below=2**31) for blocks in capacities]
    if isinstance(warm_up, bool) or not isinstance(warm_up, int | float) or not 0 <= warm_up < 1:
        text = f"a warm-up is a share of the requests, from 0 to below 1, got {warm_up!r}"
        raise BadInput(text, needed=warm_up)
    return names, sizes


def readable(trace: Source | Trace) -> Trace:
    """The trace, if there is something to look up in it. Raises BadInput."""
    columns = Trace.read(trace)
    if len(columns) and not columns.num_refs:
        raise BadInput(f"{columns.name} names no blocks (lengths and arrivals only): there is nothing to look up")
    return columns


def replay(
    trace: Source | Trace,
    capacity_blocks: int,
    policy: str | EvictionPolicy = "lru",
    *,
    warm_up: float = 0.0,
    on_request: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Run a trace through a prefix tree of ``capacity_blocks`` blocks, one request after another.

    A request is a chain of blocks, and a block hits only if every earlier one of its chain does. (1) Its longest
    resident prefix is looked up and counted. (2) Its first ``capacity_blocks`` blocks are used, the deepest first, so
    that what hangs below a block is never more recent. (3) While more are resident than the capacity, the policy evicts
    a leaf; the request's own blocks may go. One id is one block. ``opt`` is no policy but the bound: it knows the future.
    ``block-fifo`` evicts the block that came in first, leaf or not.

    ``policy``: a name, or an ``EvictionPolicy`` object that no other replay had.
    ``trace``: a path, an iterable of public records or Requests, or a Trace (read once, for many replays).
    ``warm_up``: the share of the requests that run and are not counted, rounded down to whole ones.
    ``on_request`` is told now and then how many requests are done. Raises BadInput before anything runs.

    >>> records = [{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": ids} for ids in ([1, 2, 3], [1, 2, 4])]
    >>> result = replay(records, capacity_blocks=3)
    >>> result.block_hits, result.evictions
    (2, 1)
    >>> [replay(records, capacity_blocks=2, policy=policy).hit_rate for policy in ("lru", "opt")]
    [0.3333333333333333, 0.3333333333333333]
    """
    (name,), (capacity,) = checked([policy], [capacity_blocks], warm_up)
    columns = readable(trace)
    if name == BOUND:
        return counted(columns, name, capacity, warm_up, furthest_next_use(columns, Reuse.of(columns), capacity))
    if name == BLOCK_FIFO:
        return counted(columns, name, capacity, warm_up, *block_fifo(columns, capacity))
    return counted(columns, name, capacity, warm_up, _through_tree(columns, capacity, policy, on_request))


def counted(
    trace: Trace, policy: str, capacity: int, warm_up: float, hits: Ints, inserted: Ints | None = None
) -> ReplayResult:
    """The result of a replay in which the requests hit ``hits`` blocks and inserted ``inserted`` (None: all others of their
    first ``capacity`` ones). O(requests)."""
    sizes = np.diff(trace.starts)
    first = math.floor(len(trace) * warm_up)
    upto = np.cumsum(np.minimum(sizes, capacity) - hits if inserted is None else inserted)
    evicted = np.maximum(upto - capacity, 0)  # a cache that was full stays so
    is_full = upto >= capacity
    return ReplayResult(
        trace.name, policy, capacity, requests=len(trace) - first, block_refs=int(sizes[first:].sum()),
        block_hits=int(hits[first:].sum()), evictions=int(evicted[-1:].sum() - evicted[:first][-1:].sum()),
        token_refs=int(trace.tokens_of(sizes)[first:].sum()), token_hits=int(trace.tokens_of(hits)[first:].sum()),
        warm_up_requests=first, full_after=int(is_full.argmax()) + 1 if is_full.any() else None, hits=hits,
    )  # fmt: skip


def _through_tree(
    trace: Trace, capacity: int, policy: str | EvictionPolicy, on_request: Callable[[int], None] | None
) -> Ints:
    """int64 ``[requests]``: what hits, with the tree and the free list that a cache has. A token is an id, a block is one
    token."""
    tree = PrefixTree(1, policy=policy, capacity=capacity)
    longest = int(np.diff(trace.starts).max(initial=0))
    free = FreeList(min(trace.num_distinct, capacity + min(longest, capacity)), first=1, what="blocks")
    hits: list[int] = []
    for i in range(len(trace)):
        chain = trace.chain(i)
        match = tree.match(chain)
        hit, used = match.num_blocks, min(len(chain), capacity)
        hits.append(hit)
        if hit < used:  # before the ones above them: the deepest are used first
            tree.insert(match, chain[hit:used], free.acquire(used - hit)[None])
        tree.touch(match, hit)
        over = tree.num_cached - capacity
        if over > 0:
            evicted = tree.evict(over)
            free.release(evicted.ids[0])
        if on_request is not None and (i % 256 == 255 or i + 1 == len(trace)):
            on_request(i + 1)
    assert tree.num_cached == free.num_ids - free.num_free
    return np.array(hits, np.int64)
