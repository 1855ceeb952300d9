"""Run one task in every peer: a row for each, with its time and how many times our time that is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.timing import Options, Peers, Row


def compare(
    options: Options, task: str, cases: Iterable[tuple[str, dict[str, Any]]], *, needs: str, per: int = 1
) -> list[Row]:
    """Run ``task`` with the arguments of each case. ``us``: the median time divided by ``per``. Peers without the call
    ``needs``, or whose smallest block is larger than the case's, are left out."""
    rows: list[Row] = []
    with Peers(options, needs) as peers:
        for case, arguments in cases:
            if options.only not in case:
                continue
            answers = peers.ask(task, **arguments, repeats=options.runs)
            ours = next((figures["seconds"] for peer, figures in answers.items() if peer.name == "ours"), None)
            for peer, figures in answers.items():
                taken = figures.pop("seconds")
                over = taken / ours if ours else None
                us = taken / per * 1e6
                rows.append(
                    {"case": case, "who": peer.name, "version": peer.version, "us": us, "over_ours": over, **figures}
                )
        return rows + peers.absentees()
