"""Installed engines that judge profiles: see ``benchmarks.oracle``. Tests skip where they are absent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.peers import Absent, Process


def judge(name: str) -> Iterator[Process]:
    """Yield the process of a judge."""
    try:
        process = Process(name)
    except Absent as reason:
        pytest.skip(f"make consumers: {reason}")
    with process:
        yield process
