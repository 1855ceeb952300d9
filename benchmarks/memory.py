"""How much host memory a cached block takes, without its rows on the device."""

from __future__ import annotations

from benchmarks.peers import PEERS
from benchmarks.timing import Options, Peers, Row, tell

QUESTION = "How many bytes of host memory does a cached block take, its tokens included?"
SHAPES = {"texts of 1,000 blocks": 1000, "texts of 10 blocks": 10}


def measure(options: Options) -> list[Row]:
    """Return a row for each peer and shape. Each has its own process, since a process keeps freed memory."""
    rows: list[Row] = []
    absent: dict[str, str] = {}
    cached = 5_000 if options.quick else 50_000
    for shape, per_edge in SHAPES.items():
        for name in [name for name in PEERS if name in options.peers]:
            with Peers(Options(options.quick, (name,))) as peers:
                answers = peers.ask("memory", cached=cached, per_edge=per_edge, block_size=16)
                absent |= peers.absent
                rows += [
                    {"case": shape, "who": name, "version": peer.version, **figures}
                    for peer, figures in answers.items()
                ]
    for row in rows:
        ours = [each["bytes_a_block"] for each in rows if each["case"] == row["case"] and each["who"] == "ours"]
        row["over_ours"] = row["bytes_a_block"] / ours[0] if ours else None
    return rows + [{"who": name, "absent": reason} for name, reason in absent.items()]


if __name__ == "__main__":
    tell("memory", QUESTION, measure)
