"""Traces that are written as letters, and what an engine finds of them."""

from __future__ import annotations

from typing import Any

from kvpagoda.replay import Trace, replay


def trace(*texts: str, output: int = 1, size: int = 4) -> Trace:
    """A trace in which every letter is a block of ``size`` tokens."""
    records = [
        {"timestamp": 0, "input_length": size * len(text), "output_length": output, "hash_ids": [ord(c) for c in text]}
        for text in texts
    ]
    return Trace.read(records, block_size=size)


def hits(engine: str, capacity: int, *texts: str, output: int = 1, **schedule: Any) -> list[int]:
    """The blocks that each text finds."""
    found = replay(trace(*texts, output=output), capacity, engine=engine, block_size=4, **schedule)
    assert found.hit_tokens == found.per_request.sum() and found.requests == len(texts)
    return [int(tokens / 4) for tokens in found.per_request]
