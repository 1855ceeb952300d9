"""Agents: long sessions with tool calls, a pinned manual, memory that is too small, and a restart.

What the cache does in each situation:

    manual of the tools    pinned: its blocks are not evicted while other blocks can be
    short tool call        the sequence stays open, or is suspended: its rows are copied to host memory
    between two turns      the sequence is closed; its blocks stay cached, or are stored in host memory and on disk
    restart                the disk tier finds the stored blocks again, if the weights are the same

    python examples/agents.py
"""

from __future__ import annotations

import tempfile

import numpy as np
from tiny_model import VOCAB, TinyModel, go_on, is_exact

from kvpagoda import Identity, KVCache
from kvpagoda.tiers import disk_tier, host_tier

AGENTS, TURNS, ANSWER = 5, 4, 10


def make_cache(model: TinyModel, folder: str) -> KVCache:
    """Return a cache with memory for about two of the sessions below. Further blocks are offloaded to host memory, and
    to a file in ``folder`` that outlives the process."""
    tiers = [host_tier("64KiB"), disk_tier(folder, "8MiB")]
    identity = Identity(weights="digest of the weights")  # records stored under other weights are never loaded
    return KVCache(
        model.schema, "96KiB", device="cpu", block_size=8, max_requests=3, tiers=tiers, identity=identity, poison=True
    )


class Agent:
    """One session. Each turn adds a question, half an answer, the result of a tool call, and the other half."""

    def __init__(self, manual: list[int], seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.text, self.turns = [*manual], list[tuple[int, int]]()  # (begin, end) of what the model wrote

    def hears(self, n: int) -> None:
        """Append ``n`` random tokens of input: a question, or the result of a tool."""
        self.text += self.random.integers(0, VOCAB, n).tolist()

    def writes(self, model: TinyModel, cache: KVCache, sequence, n: int) -> None:
        """Let the model append ``n`` tokens, through ``sequence``."""
        begin = len(self.text)
        go_on(model, cache, sequence, self.text, n)
        self.turns.append((begin, len(self.text)))

    def is_exact(self, model: TinyModel) -> bool:
        """Whether the model writes the same tokens without a cache."""
        return all(is_exact(model, np.array(self.text[:end]), begin) for begin, end in self.turns)


def turn(model: TinyModel, cache: KVCache, agent: Agent, *, slow_tool: bool) -> int:
    """Run one turn of ``agent``: a question, an answer, a tool call, the rest of the answer. ``slow_tool``: suspend the
    sequence during the tool call. Return how many prompt tokens were cached when the sequence was opened."""
    agent.hears(12)
    with cache.open(agent.text) as sequence:
        found = sequence.cached_tokens
        agent.writes(model, cache, sequence, ANSWER)
        if slow_tool:  # between the two calls, other sequences may use its row and its blocks
            sequence.suspend()
            sequence.resume()
        agent.hears(20)  # what the tool returned
        agent.writes(model, cache, sequence, ANSWER)
    return found


def day(model: TinyModel, cache: KVCache, agents: list[Agent], manual: list[int], turns: int) -> dict[str, int]:
    """Run ``turns`` rounds, one turn of every agent in each. Return counts of tokens and blocks."""
    results = {"prompt tokens": 0, "found": 0}
    for number in range(turns):
        for agent in agents:
            found = turn(model, cache, agent, slow_tool=number % 2 == 1)
            results["found"] += found
            results["prompt tokens"] += len(agent.text) - 20 - 2 * ANSWER
        if not number:
            pin = cache.pin(manual)  # cached since the first turn; protect it from eviction
    cache.flush()
    cache.check()
    stats = cache.stats()
    counters = {"loaded from tiers": stats.loaded_tokens, "evicted blocks": stats.evicted_blocks}
    return {**results, **counters, "manual still pinned": int(pin.is_held)}


def main() -> dict[str, int]:
    model, results = TinyModel(), dict[str, int]()
    manual = np.random.default_rng(1).integers(0, VOCAB, 48).tolist()
    agents = [Agent(manual, seed) for seed in range(AGENTS)]
    with tempfile.TemporaryDirectory() as folder:
        for name, turns in (("first process", TURNS), ("after a restart", 1)):
            cache = make_cache(model, folder)
            for key, value in day(model, cache, agents, manual, turns).items():
                results[f"{name}: {key}"] = value
            cache.close()
    results["agents"] = AGENTS
    results["exact"] = sum(agent.is_exact(model) for agent in agents)
    for key, value in results.items():
        print(f"{key:>34}  {value}")
    return results


if __name__ == "__main__":
    main()
