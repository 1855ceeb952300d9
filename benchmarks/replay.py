"""Public traces with every token written out, served by the host path of each engine in the same order."""

from __future__ import annotations

from benchmarks.timing import Options, Peers, Row, tell
from benchmarks.workload import GENERATED, SOURCES, TRACES

QUESTION = "What does the host pay to serve a whole trace (cases: trace, tokens of a block, tokens of memory)?"
CAPACITIES = {"3M": 3_000_000, "300K": 300_000}
BLOCK_SIZES = (1, 16, 64)


def cases(options: Options) -> list[tuple[str, str, int, int]]:
    """Return (name, trace, block size, capacity in tokens) of every case that ``options`` select. Raises SystemExit if
    the folder of traces is missing."""
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
        raise SystemExit(f"no folder {TRACES} with the public traces; set KVPAGODA_TRACES to it, or use --quick")
    return found


def measure(options: Options) -> list[Row]:
    rows: list[Row] = []
    with Peers(options) as peers:
        for case, trace, block_size, capacity in cases(options):
            limit = 60 if options.quick else None
            answers = peers.ask(
                "replay", options.runs, trace=trace, limit=limit, capacity=capacity, block_size=block_size
            )
            ours = next((figures["seconds"] for peer, figures in answers.items() if peer.name == "ours"), None)
            for peer, figures in answers.items():
                left_out = {peer.name: 0.0}
                if figures["excluded"]:
                    left_out[f"{peer.name}, kernel excluded"] = figures["excluded"]
                for who, part in left_out.items():
                    taken = figures["seconds"] - part
                    rows.append(
                        {
                            "case": case, "who": who, "version": peer.version, "seconds": taken,
                            "over_ours": taken / ours if ours else None,
                            "us_a_request": taken / figures["requests"] * 1e6, "hit_percent": figures["hit_percent"],
                        }
                    )  # fmt: skip
        return rows + peers.absentees()


if __name__ == "__main__":
    tell("replay", QUESTION, measure)
