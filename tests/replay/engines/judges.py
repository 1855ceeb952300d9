"""Installed engines that judge profiles: see ``benchmarks.oracle``. Tests skip where they are absent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks import oracle
from benchmarks.peers import Absent, Process

from kvpagoda.replay import Group

SGLANG = "sglang-0.5.23"


def judge(name: str) -> Iterator[Process]:
    """Yield the process of a judge."""
    try:
        process = Process(name)
    except Absent as reason:
        pytest.skip(f"make consumers: {reason}")
    with process:
        yield process


def agreement(
    source: oracle.Row,
    process: Process,
    size: int,
    mode: str,
    groups: str,
    seed: int,
    core: str = "rust",
    **more: object,
) -> oracle.Row:
    """Serve the texts of ``source`` by ``seed`` here and in SGLang, with little memory and with more; return the row.
    ``more``: its other settings."""
    source, schedule = {**source, "seed": seed}, oracle.SCHEDULES[mode]
    sizes = oracle.capacities(oracle.trace_of(**source), size, schedule.at_once, len(Group.from_text(groups)))
    runs = [
        (source, {**oracle.asked(size, blocks, schedule), "groups": groups, "core": core, **more})
        for blocks in sizes[:3:2]
    ]
    return oracle.agreements(process, SGLANG, mode, runs)
