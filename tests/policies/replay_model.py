"""The replay model in plain dictionaries: an independent statement of what each policy must do.

Each block id of a trace is one block, a child of the block before it. Written for clarity; shares nothing with the
library.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from kvpagoda.core.prefix import EvictionPolicy, PrefixTree

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces"


class ByKey:
    """Evicts the leaf with the smallest key, which is found by a search of all keys."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.clock = capacity, 0
        self.keys: dict = {}

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def add(self, k) -> None:
        self.keys[k] = (0, self.tick())

    def touch(self, k) -> None:
        self.keys[k] = (0, self.tick())

    def victim(self, is_leaf):
        k = min((k for k in self.keys if is_leaf(k)), key=self.keys.__getitem__)
        self.gone(k, self.keys.pop(k))
        return k

    def gone(self, k, key) -> None:
        pass


class Fifo(ByKey):
    """Evicts the oldest leaf, however often it was used."""

    def touch(self, k) -> None:
        pass


class Lfu(ByKey):
    """Evicts the leaf with the fewest uses, and of equals the least recently used."""

    def add(self, k) -> None:
        self.keys[k] = (1, self.tick())

    def touch(self, k) -> None:
        self.keys[k] = (self.keys[k][0] + 1, self.tick())


class Lfuda(ByKey):
    """LFU with dynamic aging: the key of the last victim is added to the number of uses."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.uses: dict = {}
        self.age = 0

    def add(self, k) -> None:
        self.uses[k] = 0
        self.touch(k)

    def touch(self, k) -> None:
        self.uses[k] += 1
        self.keys[k] = (self.age + self.uses[k], self.tick())

    def gone(self, k, key) -> None:
        self.age = key[0]


class Sieve:
    """A list from the oldest block to the newest; the hand is the number of blocks that it has passed."""

    def __init__(self, capacity: int) -> None:
        self.order: list = []
        self.used: dict = {}
        self.hand = 0

    def add(self, k) -> None:
        self.order.append(k)
        self.used[k] = False

    def touch(self, k) -> None:
        self.used[k] = True

    def victim(self, is_leaf):
        while True:
            if self.hand >= len(self.order):
                self.hand = 0
            k = self.order[self.hand]
            if is_leaf(k):
                if not self.used[k]:
                    del self.order[self.hand], self.used[k]
                    return k
                self.used[k] = False
            self.hand += 1


class S3Fifo:
    """S3-FIFO: a small and a main queue, and a ghost queue of keys that the small queue evicted."""

    def __init__(self, capacity: int) -> None:
        self.small_size = max(1, capacity // 10)
        self.ghost_size = capacity - self.small_size
        self.small, self.main, self.ghost = OrderedDict(), OrderedDict(), OrderedDict()
        self.uses: dict = {}

    def add(self, k) -> None:
        self.uses[k] = 0
        if k in self.ghost:
            del self.ghost[k]
            self.main[k] = None
        else:
            self.small[k] = None

    def touch(self, k) -> None:
        self.uses[k] = min(3, self.uses[k] + 1)

    def victim(self, is_leaf):
        passed = 0  # blocks of main in a row: after a round without a leaf, every leaf is in small
        while True:
            if len(self.small) >= self.small_size or not self.main or (passed > len(self.main) and self.small):
                k, _ = self.small.popitem(last=False)
                if self.uses[k] > 1:
                    self.uses[k] = 0
                elif is_leaf(k):
                    self.ghost[k] = None
                    while len(self.ghost) > self.ghost_size:
                        self.ghost.popitem(last=False)
                    return k
                self.main[k] = None
            else:
                k, _ = self.main.popitem(last=False)
                if self.uses[k]:
                    self.uses[k] -= 1
                    passed = 0
                elif is_leaf(k):
                    return k
                else:
                    passed += 1
                self.main[k] = None


class Arc:
    """ARC: blocks used once and blocks used again in two LRU queues, each with a ghost queue of evicted keys."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.share = capacity, 0
        self.once, self.again = OrderedDict(), OrderedDict()
        self.ghost_once, self.ghost_again = OrderedDict(), OrderedDict()

    def add(self, k) -> None:
        n1, n2 = len(self.ghost_once), len(self.ghost_again)
        if k in self.ghost_once:
            self.share = min(self.capacity, self.share + max(1, n2 // n1))
            del self.ghost_once[k]
            self.again[k] = None
        elif k in self.ghost_again:
            self.share = max(0, self.share - max(1, n1 // n2))
            del self.ghost_again[k]
            self.again[k] = None
        else:
            self.once[k] = None

    def touch(self, k) -> None:
        self.once.pop(k, None)
        self.again.pop(k, None)
        self.again[k] = None

    def victim(self, is_leaf):
        queues = [(self.once, self.ghost_once), (self.again, self.ghost_again)]
        if len(self.once) <= self.share:
            queues.reverse()
        for queue, ghost in queues:
            for k in queue:
                if is_leaf(k):
                    del queue[k]
                    ghost[k] = None
                    while len(self.ghost_once) > max(0, self.capacity - len(self.once)):
                        self.ghost_once.popitem(last=False)
                    while len(self.ghost_once) + len(self.ghost_again) > self.capacity:
                        (self.ghost_again or self.ghost_once).popitem(last=False)
                    return k


MODELS = {"lru": ByKey, "fifo": Fifo, "lfu": Lfu, "lfuda": Lfuda, "sieve": Sieve, "s3fifo": S3Fifo, "arc": Arc}


def model_replay(requests: Iterable[Sequence], capacity: int, policy: str) -> tuple[int, list]:
    """Return (block hits, blocks in the order in which they were evicted); a block is the tuple of its chain."""
    model = MODELS[policy](capacity)
    cached: set = set()
    below: Counter = Counter()  # block -> how many of its children are cached
    hits, evicted = 0, []
    for request in requests:
        chain = [tuple(request[: i + 1]) for i in range(len(request))]
        hits += next((i for i, k in enumerate(chain) if k not in cached), len(chain))
        for k in reversed(chain[:capacity]):
            if k in cached:
                model.touch(k)
            else:
                cached.add(k)
                below[k[:-1]] += 1
                model.add(k)
        while len(cached) > capacity:
            k = model.victim(lambda k: not below[k])
            cached.remove(k)
            below[k[:-1]] -= 1
            evicted.append(k)
    return hits, evicted


def tree_replay(
    requests: Iterable[np.ndarray], capacity: int, policy: str | EvictionPolicy | PrefixTree
) -> tuple[int, list[int], PrefixTree]:
    """Replay in a prefix tree with ``policy``, or in an empty tree that is given instead.

    Returns (block hits, ids in the order in which they were evicted, the tree). Ids count up from 1 in the order of
    insertion, deepest last, and are never used twice.
    """
    tree = policy if hasattr(policy, "insert") else PrefixTree(1, 1, policy, capacity=capacity)
    hits, next_id, evicted = 0, 1, []
    free: list[np.ndarray] = []
    for tokens in requests:
        match = tree.match(tokens)
        hits += match.num_blocks
        size = min(len(tokens), capacity)
        have = min(match.num_blocks, size)
        if have < size:
            ids = np.arange(next_id, next_id + size - have, dtype=np.int32)
            next_id += len(ids)
            tree.insert(match, tokens[have:size], ids[None])
        tree.touch(match, have)
        if tree.num_cached > capacity:
            free.append(tree.evict(tree.num_cached - capacity).ids[0])
    if free:
        evicted = np.concatenate(free).tolist()
    return hits, evicted, tree


def load_trace(name: str) -> list[np.ndarray]:
    """Return the chains of block ids of a public trace, int32 ``[n]`` each."""
    with gzip.open(TRACES / f"{name}.jsonl.gz", "rt") as lines:
        return [np.array(json.loads(line)["hash_ids"], np.int32) for line in lines]
