"""Tiny traces in which every token has an id."""

from __future__ import annotations

from kvpagoda.replay import Trace


def trace_of(chains: list[list[int]], own: list[int]) -> Trace:
    """Return a trace of ids of one token; request ``i`` has ``own[i]`` tokens of its own at the end of its prompt."""
    return Trace.read(
        [
            {"timestamp": 0, "input_length": len(chain) + more, "output_length": 1, "hash_ids": chain}
            for chain, more in zip(chains, own)
        ]
    )
