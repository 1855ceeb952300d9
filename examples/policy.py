"""Your own eviction policy, in a cache and in a replay of a trace. Needs numpy alone.

The prefix tree asks the policy which block to evict next. The policy knows each block by a small whole number, its key.
This policy evicts blocks that were used once before blocks that were used more often. That is enough to keep the system
prompts cached while long documents are read once.

    python examples/policy.py
"""

from __future__ import annotations

import random

from kvpagoda import KVCache, Schema
from kvpagoda.replay import replay


class UsedOnceFirst:
    """An ``EvictionPolicy``: evict the least recently used leaf, and leaves that were used once before all others."""

    def __init__(self) -> None:
        self.uses: dict[int, int] = {}
        self.leaves: tuple[dict[int, None], ...] = ({}, {})  # used once; used more often. Least recently used first

    def add(self, keys, priority):
        """Called when the blocks ``keys`` were cached; this counts as their first use."""
        self.uses.update({int(key): 1 for key in keys})

    def touch(self, keys, priority):
        """Called when the blocks ``keys``, nearest to the root first, were used once."""
        for key in keys[::-1].tolist():  # the deepest block counts as used first, so that it is evicted first
            is_leaf = any(leaves.pop(key, 1) is None for leaves in self.leaves)
            self.uses[key] += 1
            if is_leaf:
                self.set_leaf(key, True)

    def set_leaf(self, key, is_leaf):
        """Called when the block ``key`` becomes a leaf, or is no leaf any more. Only leaves can be evicted."""
        for leaves in self.leaves:
            leaves.pop(key, None)
        if is_leaf:
            self.leaves[self.uses.get(key, 1) > 1][key] = None

    def choose(self, chain):
        """Return the leaf to evict next. ``chain(leaf)`` returns the leaf and its evictable ancestors."""
        return chain(next(iter(self.leaves[0] or self.leaves[1])))[:1]

    def remove(self, keys, *, evicted):
        """Called when the blocks ``keys`` are no longer cached; return the keys that are forgotten."""
        for key in keys.tolist():
            del self.uses[key]
        return keys  # the forgotten keys: all, since this policy remembers no evicted blocks

    def check(self, keys, leaves):
        """Prove that the policy knows exactly the cached ``keys`` and these ``leaves``."""
        assert self.uses.keys() == {*keys.tolist()} and self.leaves[0].keys() | self.leaves[1].keys() == leaves


def trace(num_requests: int = 4000, seed: int = 1) -> list[dict]:
    """Return ``num_requests`` records of a trace: chats on 40 system prompts of 4 blocks each, and in every tenth place
    a document of 60 blocks that is read once."""
    rng, records, fresh = random.Random(seed), [], 1_000_000
    for i in range(num_requests):
        if i % 10 == 0:
            chain = list(range(fresh, fresh + 60))
        else:
            system = 4 * rng.randrange(40)
            chain = [system, system + 1, system + 2, system + 3, fresh]
        fresh += 60
        records.append(dict(timestamp=i, input_length=16 * len(chain), output_length=1, hash_ids=chain))
    return records


def in_a_cache(policy) -> int:
    """Return how many prompt tokens were cached when the first 1,000 requests ran through a cache without memory."""
    llama = dict(model_type="llama", num_hidden_layers=1, hidden_size=8, num_attention_heads=1)
    cache = KVCache(
        Schema.from_hf_config(llama), num_blocks=260, block_size=16, max_requests=1, device="none", policy=policy
    )
    for record in trace(1000):
        prompt = [block % 30_000 for block in record["hash_ids"] for _ in range(16)]
        with cache.open(prompt) as sequence:
            sequence.commit(prompt[sequence.cached_tokens :])
        if record["timestamp"] % 100 == 0:
            cache.check()
    return cache.stats().cached_tokens


def main() -> dict[str, float]:
    results = {}
    for name, make in (("lru", lambda: "lru"), ("used once first", UsedOnceFirst)):
        results[f"replay, {name}"] = replay(trace(), capacity_blocks=200, policy=make()).hit_rate
        results[f"cache, {name}"] = in_a_cache(make())
        rate, found = results[f"replay, {name}"], results[f"cache, {name}"]
        print(f"{name:>16}: {rate:6.1%} of the blocks hit in the replay, {found:7,} tokens found in the cache")
    bound = replay(trace(), capacity_blocks=200, policy="opt").hit_rate
    print(f"{'upper bound':>16}: {bound:6.1%} of the blocks, by a policy that knows the future")
    return {**results, "replay, bound": bound}


if __name__ == "__main__":
    main()
