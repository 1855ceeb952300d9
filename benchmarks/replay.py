"""Public traces with every token, served by each engine's host path in the same order."""

from __future__ import annotations

from benchmarks.timing import Options, Row, absentees, peers, rounds, tell
from benchmarks.workload import GENERATED, SOURCES, TRACES

QUESTION = "What does the host pay to serve a whole trace: match, allocate, publish, append, evict?"
CAPACITIES = {"3M": 3_000_000, "300K": 300_000}
BLOCK_SIZES = (1, 16, 64)


def cases(options: Options) -> list[tuple[str, str, int, int]]:
    """(name, trace, block size, capacity) of every case that is asked for and whose trace is there."""
    if options.quick:
        return [("generated 16 30K", GENERATED, 16, 30_000)]
    found = [
        (f"{trace} {block_size} {size}", trace, block_size, capacity)
        for size, capacity in CAPACITIES.items()
        for trace in SOURCES
        for block_size in BLOCK_SIZES
        if options.only in f"{trace} {block_size} {size}"
    ]
    if not TRACES.exists():
        raise SystemExit(f"the public traces are read from {TRACES}, which is not there; --quick needs none")
    return found


def measure(options: Options) -> list[Row]:
    rows: list[Row] = []
    with peers(options) as (found, absent):
        for case, trace, block_size, capacity in cases(options):
            asked = [peer for peer in found if peer.least_block <= block_size]
            told = rounds(
                asked, options.runs, "replay", trace=trace, limit=60 if options.quick else None, capacity=capacity,
                block_size=block_size,
            )  # fmt: skip
            ours = told.get("ours", {}).get("seconds")
            for peer in asked:
                figures = told[peer.name]
                part = figures["excluded"]
                kinds = {peer.name: 0.0, **({f"{peer.name}, kernel excluded": part} if part else {})}
                rows += [
                    {
                        "case": case, "who": name, "version": peer.version, "seconds": figures["seconds"] - left_out,
                        "over_ours": (figures["seconds"] - left_out) / ours if ours else None,
                        "us_a_request": (figures["seconds"] - left_out) / figures["requests"] * 1e6,
                        "hit_percent": figures["hit_percent"],
                    }
                    for name, left_out in kinds.items()
                ]  # fmt: skip
        return rows + absentees(absent)


if __name__ == "__main__":
    tell("replay", QUESTION, measure)
