"""How our costs grow with the number of cached blocks, of running requests, and of tokens in a request."""

from __future__ import annotations

from benchmarks.peers import Process
from benchmarks.timing import Options, Row, tell

QUESTION = "Do our costs stay flat as the cache, the batch and the requests grow?"
CACHED = (10_000, 100_000, 1_000_000, 10_000_000)
RUNNING = (1, 16, 256, 4096)
LENGTHS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)


def measure(options: Options) -> list[Row]:
    top = 1 if options.quick else None
    runs = max(options.runs, 5)
    rows: list[Row] = []
    with Process("ours") as ours:
        for cached in CACHED[:top]:
            taken = ours.ask("admission", cached=cached, per_edge=500, num_tokens=2000, block_size=16, repeats=runs)
            rows.append(_row("a request of 2,000 tokens, half of them cached", "cached_blocks", cached, taken))
        # the first step of a process takes longer, and is not counted
        ours.ask("step", context=1000, requests=1, block_size=16, repeats=runs)
        for running in RUNNING[: top and 2]:
            taken = ours.ask("step", context=1000, requests=running, block_size=16, repeats=20 * runs)
            rows.append(_row("a decode step at 1,000 tokens", "running", running, taken, running))
        for length in LENGTHS[:top]:
            taken = ours.ask("step", context=length, requests=1, block_size=16, repeats=20 * runs)
            rows.append(_row("a decode step of one request", "tokens", length, taken))
        for length in LENGTHS[: top and 2]:
            taken = ours.ask("admission", cached=1000, per_edge=500, num_tokens=length, block_size=16, repeats=runs)
            rows.append(_row("the life of a request, half of it cached", "tokens", length, taken, length))
    return rows


def _row(case: str, what: str, value: int, taken: dict[str, float], parts: int = 1) -> Row:
    """Return a row. ``us_each``: microseconds divided by ``parts``, the number of running requests or of tokens."""
    us = taken["seconds"] * 1e6
    return {"case": case, "grows": what, "to": value, "us": us, "us_each": us / parts}


if __name__ == "__main__":
    tell("growth", QUESTION, measure)
