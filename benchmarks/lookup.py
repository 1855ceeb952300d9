"""Matching a prompt of 131,072 tokens that is cached as one edge, as 128 edges, or not at all."""

from __future__ import annotations

from benchmarks.compare import compare
from benchmarks.timing import Options, Row, tell

QUESTION = "How long does each engine take to find a prompt of 128K tokens?"
NUM_TOKENS = 131_072
PIECES = {"one piece": 1, "128 pieces": 128, "missing": 0}


def measure(options: Options) -> list[Row]:
    num_tokens, sizes = (8192, (16,)) if options.quick else (NUM_TOKENS, (1, 16, 64))
    cases = [
        (f"{name}, block {size}", {"num_tokens": num_tokens, "edges": edges, "block_size": size})
        for size in sizes
        for name, edges in PIECES.items()
    ]
    return compare(options, "lookup", cases, needs="lookup")


if __name__ == "__main__":
    tell("lookup", QUESTION, measure)
