"""Agents: long sessions with tool calls, a pinned manual, memory that is too small, and a restart.

the manual of the tools    pinned: it goes last, whatever else needs the memory
a short tool call          the sequence stays open, or is suspended: its rows wait in host memory
the time between turns     the sequence is closed; what it leaves is evicted at need, and waits in host memory and on disk
a restart                  the disk tier finds again what was stored, under the same weights

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
    """Room for about two of the sessions below; the rest goes to host memory, and to a file that outlives the process."""
    tiers = [host_tier("64KiB"), disk_tier(folder, "8MiB")]
    identity = Identity(weights="digest of the weights")  # records of other weights are not found
    return KVCache(
        model.schema, "96KiB", device="cpu", block_size=8, max_requests=3, tiers=tiers, identity=identity, poison=True
    )


class Agent:
    """One session: its text grows by a question, an answer with a tool call, and what the tool returned."""

    def __init__(self, manual: list[int], seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.text, self.turns = [*manual], list[tuple[int, int]]()  # (begin, end) of what the model wrote

    def hears(self, n: int) -> None:
        self.text += self.random.integers(0, VOCAB, n).tolist()

    def writes(self, model: TinyModel, cache: KVCache, sequence, n: int) -> None:
        begin = len(self.text)
        go_on(model, cache, sequence, self.text, n)
        self.turns.append((begin, len(self.text)))

    def is_exact(self, model: TinyModel) -> bool:
        return all(is_exact(model, np.array(self.text[:end]), begin) for begin, end in self.turns)


def turn(model: TinyModel, cache: KVCache, agent: Agent, *, slow_tool: bool) -> int:
    """A question, an answer, a tool call, the rest of the answer; returns how many prompt tokens were not computed."""
    agent.hears(12)
    with cache.open(agent.text) as sequence:
        found = sequence.cached_tokens
        agent.writes(model, cache, sequence, ANSWER)
        if slow_tool:  # others may have its row and its blocks meanwhile
            sequence.suspend()
            sequence.resume()
        agent.hears(20)  # what the tool returned
        agent.writes(model, cache, sequence, ANSWER)
    return found


def day(model: TinyModel, cache: KVCache, agents: list[Agent], manual: list[int], turns: int) -> dict[str, int]:
    """Every agent has ``turns`` turns, in turn."""
    told = {"prompt tokens": 0, "found": 0}
    for number in range(turns):
        for agent in agents:
            found = turn(model, cache, agent, slow_tool=number % 2 == 1)
            told["found"] += found
            told["prompt tokens"] += len(agent.text) - 20 - 2 * ANSWER
        if not number:
            pin = cache.pin(manual)  # it is cached now: keep it
    cache.flush()
    cache.check()
    stats = cache.stats()
    counters = {"of these loaded": stats.loaded_tokens, "evicted blocks": stats.evicted_blocks}
    return {**told, **counters, "manual still pinned": int(pin.is_held)}


def main() -> dict[str, int]:
    model, told = TinyModel(), dict[str, int]()
    manual = np.random.default_rng(1).integers(0, VOCAB, 48).tolist()
    agents = [Agent(manual, seed) for seed in range(AGENTS)]
    with tempfile.TemporaryDirectory() as folder:
        for name, turns in (("first process", TURNS), ("after a restart", 1)):
            cache = make_cache(model, folder)
            for key, value in day(model, cache, agents, manual, turns).items():
                told[f"{name}: {key}"] = value
            cache.close()
    told["agents"] = AGENTS
    told["exact"] = sum(agent.is_exact(model) for agent in agents)
    for key, value in told.items():
        print(f"{key:>32}  {value}")
    return told


if __name__ == "__main__":
    main()
