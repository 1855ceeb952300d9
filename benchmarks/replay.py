"""Public traces with every token written out, served by the host path of each engine in the same order."""

from __future__ import annotations

from benchmarks.timing import Options, Peers, Row, tell
from benchmarks.workload import AT_ONCE, GENERATED, SOURCES, TRACES

QUESTION = "What does the host pay to serve a whole trace (cases: trace, tokens of a block, tokens of memory)?"
ONE_AT_A_TIME = ", one at a time"
CAPACITIES = {"3M": 3_000_000, "300K": 300_000}
BLOCK_SIZES = (1, 16, 64)


def cases(options: Options) -> list[tuple[str, str, int, int, int]]:
    """Return (name, trace, block size, capacity in tokens, requests at the same time) of every case that ``options``
    select. Raises SystemExit if the folder of traces is missing."""
    if options.quick:
        return [(f"generated 16 30K{ONE_AT_A_TIME * (n == 1)}", GENERATED, 16, 30_000, n) for n in (AT_ONCE, 1)]
    found = [
        (f"{trace} {block_size} {size}", trace, block_size, capacity, AT_ONCE)
        for size, capacity in CAPACITIES.items()
        for trace in SOURCES
        for block_size in BLOCK_SIZES
    ]
    found += [(name, *case, 1) for name, *case, _ in found if case[1] == BLOCK_SIZES[1]]
    found = [(name + ONE_AT_A_TIME * (case[-1] == 1), *case) for name, *case in found]
    found = [case for case in found if options.only in case[0]]
    if not TRACES.exists():
        raise SystemExit(f"no folder {TRACES} with the public traces; set KVPAGODA_TRACES to it, or use --quick")
    return found


def measure(options: Options) -> list[Row]:
    rows: list[Row] = []
    with Peers(options) as peers:
        for case, trace, block_size, capacity, at_once in cases(options):
            limit = 60 if options.quick else None
            answers = peers.ask(
                "replay", options.runs, trace=trace, limit=limit, capacity=capacity, block_size=block_size,
                at_once=at_once,
            )  # fmt: skip
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
