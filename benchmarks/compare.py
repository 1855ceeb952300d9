"""One small question asked of every peer: rows with each one's time and how many times ours it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.timing import Options, Peers, Row


def compare(
    options: Options, task: str, cases: Iterable[tuple[str, dict[str, Any]]], *, needs: str, per: int = 1
) -> list[Row]:
    """Ask ``task`` with each case's arguments; ``us`` is one ``per``-th of the median time. Peers without the call ``needs``,
    or whose least block is larger, are not asked."""
    rows: list[Row] = []
    with Peers(options, needs) as peers:
        for case, arguments in cases:
            if options.only not in case:
                continue
            told = peers.ask(task, **arguments, repeats=options.runs)
            ours = next((figures["seconds"] for peer, figures in told.items() if peer.name == "ours"), None)
            for peer, figures in told.items():
                taken = figures.pop("seconds")
                over = taken / ours if ours else None
                us = taken / per * 1e6
                rows.append(
                    {"case": case, "who": peer.name, "version": peer.version, "us": us, "over_ours": over, **figures}
                )
        return rows + peers.absentees()
