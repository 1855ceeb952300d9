"""One small question asked of every peer: rows with each one's time and how many times ours it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.timing import Options, Row, absentees, peers


def compare(
    options: Options, task: str, cases: Iterable[tuple[str, dict[str, Any]]], *, needs: str, per: int = 1
) -> list[Row]:
    """Ask ``task`` with each case's arguments; ``us`` is one ``per``-th of the median time. Peers without the call ``needs``,
    or whose least block is larger, are not asked."""
    rows: list[Row] = []
    with peers(options, needs) as (found, absent):
        for case, arguments in cases:
            if options.only not in case:
                continue
            asked = [peer for peer in found if peer.least_block <= arguments["block_size"]]
            told = {peer: peer.ask(task, runs=options.runs, **arguments) for peer in asked}
            ours = next((figures["seconds"] for peer, figures in told.items() if peer.name == "ours"), None)
            rows += [
                {
                    "case": case, "who": peer.name, "version": peer.version, "us": figures.pop("seconds") / per * 1e6,
                    "over_ours": seconds / ours if ours else None, **figures,
                }
                for peer, figures in told.items()
                for seconds in (figures["seconds"],)
            ]  # fmt: skip
    return rows + absentees(absent)
