"""The replay model word for word, in the slowest way: a dictionary of chains and a scan of all leaves for each victim.

A request is a chain; a block is named by its whole chain. (1) Hits: the longest resident prefix. (2) The first
min(n, C) blocks are accessed deepest first. (3) While more than C blocks are resident, the leaf with the smallest key goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

Chain = tuple[int, ...]


@dataclass
class Entry:
    inserted: int
    last: int
    count: int
    priority: float


def naive_replay(chains: list[list[int]], capacity: int, policy: str) -> tuple[int, int]:
    """(hits, evictions)."""
    if policy == "block-fifo":
        return naive_block_fifo(chains, capacity)
    resident: dict[Chain, Entry] = {}
    clock = hits = evictions = 0
    level = 0.0
    for now, chain in enumerate(chains):
        prefixes = [tuple(chain[: i + 1]) for i in range(len(chain))]
        hits += next((i for i, prefix in enumerate(prefixes) if prefix not in resident), len(chain))
        for prefix in reversed(prefixes[:capacity]):
            clock += 1
            entry = resident.setdefault(prefix, Entry(clock, clock, 0, 0))
            entry.count += 1
            entry.last, entry.priority = clock, level + entry.count
        while len(resident) > capacity:
            parents = {prefix[:-1] for prefix in resident}
            leaves = [prefix for prefix in resident if prefix not in parents]
            victim = min(leaves, key=lambda leaf: _key(policy, leaf, resident[leaf], chains, now))
            level = resident.pop(victim).priority
            evictions += 1
    return hits, evictions


def naive_block_fifo(chains: list[list[int]], capacity: int) -> tuple[int, int]:
    """A queue of blocks: each one that is missing is put in from the root on, the oldest one leaves, leaf or not."""
    queue: list[Chain] = []
    hits = evictions = 0
    for chain in chains:
        prefixes = [tuple(chain[: i + 1]) for i in range(len(chain))]
        hits += next((i for i, prefix in enumerate(prefixes) if prefix not in queue), len(chain))
        for prefix in prefixes:
            if prefix not in queue:
                queue.append(prefix)
                evictions += len(queue) > capacity
                queue = queue[-capacity:]
    return hits, evictions


def _key(policy: str, leaf: Chain, entry: Entry, chains: list[list[int]], now: int) -> tuple[float, ...]:
    if policy == "opt":
        uses = (i for i in range(now + 1, len(chains)) if tuple(chains[i][: len(leaf)]) == leaf)
        return -next(uses, inf), -len(leaf)
    if policy == "lfu":
        return entry.count, entry.last
    if policy == "lfuda":
        return entry.priority, entry.last
    return (entry.inserted if policy == "fifo" else entry.last,)


def furthest_reuse(chains: list[list[int]]) -> list[int]:
    """The stack distance of every reference, -1 for a first use: a list with the most recent block first."""
    stack: list[Chain] = []
    found = []
    for chain in chains:
        prefixes = [tuple(chain[: i + 1]) for i in range(len(chain))]
        found += [stack.index(prefix) if prefix in stack else -1 for prefix in prefixes]
        stack = prefixes + [prefix for prefix in stack if prefix not in prefixes]
    return found
