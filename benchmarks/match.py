"""The time to match a prompt of 131,072 tokens, over one numpy compare of the tokens and one gather of block ids."""

from __future__ import annotations

import numpy as np

from benchmarks.timing import Options, Row, medians, tell
from kvpagoda.core.prefix import PrefixTree

QUESTION = "How much more than one compare and one gather does the match of a 128K-token prompt cost?"
NUM_TOKENS, NUM_EDGES = 131_072, 128


def cached(tokens: np.ndarray, block_size: int, edges: int) -> PrefixTree:
    """Return a tree with ``tokens`` as ``edges`` edges: another text branches off at the end of each but the last."""
    tree, per_edge = PrefixTree(block_size), NUM_TOKENS // block_size // edges
    ids = np.arange(1, NUM_TOKENS // block_size + 1, dtype=np.int32).reshape(edges, 1, per_edge)
    lease = tree.pin(tree.match(tokens[:0]))
    for i, (part, blocks) in enumerate(zip(tokens.reshape(edges, -1), ids)):
        if i:
            other = np.full((1, 1), ids.size + i, np.int32)
            tree.insert(lease, np.full(block_size, 2**31 - 1, np.int32), other, pin=False)
        tree.insert(lease, part, blocks)
    return tree


def measure(options: Options) -> list[Row]:
    tokens = np.random.default_rng(0).integers(0, 150_000, NUM_TOKENS).astype(np.int32)
    asked = tokens.copy()
    missing = tokens + np.int32(200_000)
    rows: list[Row] = []
    for block_size in (16,) if options.quick else (1, 16, 64):
        one, many = cached(tokens, block_size, 1), cached(tokens, block_size, NUM_EDGES)
        assert one.match(asked).num_tokens == many.match(asked).num_tokens == NUM_TOKENS
        assert not one.match(missing).num_tokens
        ids = np.arange(1, NUM_TOKENS // block_size + 1, dtype=np.int32)
        order = ids - 1
        calls = {
            "compare and gather": lambda ids=ids, order=order: (np.equal(tokens, asked), ids[order]),
            "one edge": lambda tree=one: tree.match(asked),
            f"{NUM_EDGES} edges": lambda tree=many: tree.match(asked),
            "missing": lambda tree=one: tree.match(missing),
        }
        found = medians(calls, runs=options.runs, repeat=3 if options.quick else 50)
        limit = found["compare and gather"]
        rows += [
            {"block_size": block_size, "cached_as": name, "us": taken * 1e6, "ratio": taken / limit}
            for name, taken in found.items()
        ]
    return rows


if __name__ == "__main__":
    tell("match", QUESTION, measure)
