"""What a cached block takes of the host's memory, beside the rows on the device."""

from __future__ import annotations

from benchmarks.peers import PEERS
from benchmarks.timing import Options, Row, absentees, peers, tell

QUESTION = "How many bytes of host memory does a cached block take, its tokens included?"
SHAPES = {"texts of 1,000 blocks": 1000, "texts of 10 blocks": 10}


def measure(options: Options) -> list[Row]:
    """A process of its own for each figure: memory that was once taken is not given back."""
    rows: list[Row] = []
    gone: dict[str, str] = {}
    cached = 5_000 if options.quick else 200_000
    for shape, per_edge in SHAPES.items():
        for name in [name for name in PEERS if name in options.peers]:
            with peers(Options(options.quick, (name,))) as (found, absent):
                gone |= absent
                for peer in found:
                    nbytes = peer.ask("memory", cached=cached, per_edge=per_edge, block_size=16)["bytes_a_block"]
                    rows.append({"case": shape, "who": name, "version": peer.version, "bytes_a_block": nbytes})
    for row in rows:
        ours = [one["bytes_a_block"] for one in rows if one["case"] == row["case"] and one["who"] == "ours"]
        row["over_ours"] = row["bytes_a_block"] / ours[0] if ours else None
    return rows + absentees(gone)


if __name__ == "__main__":
    tell("memory", QUESTION, measure)
