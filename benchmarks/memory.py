"""What a cached block takes of the host's memory, beside the rows on the device."""

from __future__ import annotations

from benchmarks.peers import PEERS
from benchmarks.timing import Options, Peers, Row, tell

QUESTION = "How many bytes of host memory does a cached block take, its tokens included?"
SHAPES = {"texts of 1,000 blocks": 1000, "texts of 10 blocks": 10}


def measure(options: Options) -> list[Row]:
    """A process of its own for each figure: memory that was once taken is not given back."""
    rows: list[Row] = []
    gone: dict[str, str] = {}
    cached = 5_000 if options.quick else 50_000
    for shape, per_edge in SHAPES.items():
        for name in [name for name in PEERS if name in options.peers]:
            with Peers(Options(options.quick, (name,))) as peers:
                told = peers.ask("memory", cached=cached, per_edge=per_edge, block_size=16)
                gone |= peers.absent
                rows += [
                    {"case": shape, "who": name, "version": peer.version, **figures} for peer, figures in told.items()
                ]
    for row in rows:
        ours = [one["bytes_a_block"] for one in rows if one["case"] == row["case"] and one["who"] == "ours"]
        row["over_ours"] = row["bytes_a_block"] / ours[0] if ours else None
    return rows + [{"who": name, "absent": reason} for name, reason in gone.items()]


if __name__ == "__main__":
    tell("memory", QUESTION, measure)
