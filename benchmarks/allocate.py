"""Allocating blocks and freeing them again, with the checks of each engine."""

from __future__ import annotations

from benchmarks.compare import compare
from benchmarks.timing import Options, Row, tell

QUESTION = "What do allocating and freeing 1, 64 and 8,192 blocks cost?"


def measure(options: Options) -> list[Row]:
    counts = (1, 64) if options.quick else (1, 64, 8192)
    cases = [(f"{n:,} blocks", {"num_blocks": n, "block_size": 16}) for n in counts]
    return compare(options, "allocate", cases, needs="take")


if __name__ == "__main__":
    tell("allocate", QUESTION, measure)
