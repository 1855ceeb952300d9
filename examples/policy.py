"""An eviction policy of one's own: in a cache, and in a replay of a trace. Needs numpy alone.

The tree of cached blocks asks the policy which one goes next; the policy knows blocks by small whole numbers, their keys.
This one keeps what was used more than once, as long as there is something that was not: enough for a one-time scan not to
wipe out the system prompts.

    python examples/policy.py
"""

from __future__ import annotations

import random

from kvpagoda import KVCache, Schema
from kvpagoda.replay import replay


class UsedOnceFirst:
    """The least recently used leaf goes; leaves that were used once before all others."""

    def __init__(self) -> None:
        self.uses: dict[int, int] = {}
        self.leaves: tuple[dict[int, None], ...] = ({}, {})  # used once, used more often: the coldest first

    def add(self, keys, priority):
        self.uses.update({int(key): 1 for key in keys})

    def touch(self, keys, priority):
        for key in keys[::-1].tolist():  # the deepest counts as used first
            is_leaf = any(leaves.pop(key, 1) is None for leaves in self.leaves)
            self.uses[key] += 1
            if is_leaf:
                self.set_leaf(key, True)

    def set_leaf(self, key, is_leaf):
        for leaves in self.leaves:
            leaves.pop(key, None)
        if is_leaf:
            self.leaves[self.uses.get(key, 1) > 1][key] = None

    def choose(self, chain):
        return chain(next(iter(self.leaves[0] or self.leaves[1])))[:1]

    def remove(self, keys, *, evicted):
        for key in keys.tolist():
            del self.uses[key]
        return keys  # all of them may be forgotten: it keeps no ghosts

    def check(self, keys, leaves):
        assert self.uses.keys() == {*keys.tolist()} and self.leaves[0].keys() | self.leaves[1].keys() == leaves


def trace(num_requests: int = 4000, seed: int = 1) -> list[dict]:
    """Chats on 40 system prompts of 4 blocks, and, in between, long documents that are read once."""
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
    """Prompt tokens that were found, of the same traffic through a cache without memory."""
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
    told = {}
    for name, make in (("lru", lambda: "lru"), ("used once first", UsedOnceFirst)):
        told[f"replay, {name}"] = replay(trace(), capacity_blocks=200, policy=make()).hit_rate
        told[f"cache, {name}"] = in_a_cache(make())
        rate, found = told[f"replay, {name}"], told[f"cache, {name}"]
        print(f"{name:>16}: {rate:6.1%} of the blocks hit in the replay, {found:7,} tokens found in the cache")
    bound = replay(trace(), capacity_blocks=200, policy="opt").hit_rate
    print(f"{'the bound':>16}: {bound:6.1%}")
    return {**told, "replay, bound": bound}


if __name__ == "__main__":
    main()
