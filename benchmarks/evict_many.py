"""Evicting 10,000 blocks at once from a large cache. A text of one block leaves two in our tree, which also keeps the block
behind it, with the one token of the answer. ``evict`` measures up to a million leaves of one block, in our
tree alone: publishing so many through whole requests takes too long in every engine."""

from __future__ import annotations

from benchmarks.compare import compare
from benchmarks.timing import Options, Row, tell

QUESTION = "What does evicting 10,000 cached blocks at once cost? Microseconds a block"
SHAPES = {
    "of 1,000,000 blocks, in texts of 1,000": (1_000_000, 1000),
    "of 100,000 blocks, in texts of one": (100_000, 1),
}


def measure(options: Options) -> list[Row]:
    evicted = 400 if options.quick else 10_000
    cases = [
        (
            name,
            {
                "cached": 4000 if options.quick else cached,
                "per_edge": per_edge,
                "num_blocks": evicted,
                "block_size": 16,
            },
        )
        for name, (cached, per_edge) in SHAPES.items()
    ]
    return compare(options, "evict", cases, needs="evict", per=evicted)


if __name__ == "__main__":
    tell("evict_many", QUESTION, measure)
