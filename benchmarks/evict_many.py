"""Evicting 10,000 of a million cached blocks at once."""

from __future__ import annotations

from benchmarks.compare import compare
from benchmarks.timing import Options, Row, tell

QUESTION = "What does evicting 10,000 of 1,000,000 cached blocks cost? Microseconds a block"


def measure(options: Options) -> list[Row]:
    cached, evicted = (4_000, 400) if options.quick else (1_000_000, 10_000)
    cases = [
        (name, {"cached": cached, "per_edge": per_edge, "num_blocks": evicted, "block_size": 16})
        for name, per_edge in {"texts of 1,000 blocks": 1000, "texts of one block": 1}.items()
    ]
    return compare(options, "evict", cases, needs="evict", per=evicted)


if __name__ == "__main__":
    tell("evict_many", QUESTION, measure)
