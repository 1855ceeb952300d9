"""Where the other projects are, whose own code the adapters are run in: environment variables name their paths."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.peers.bare import bare_packages
from benchmarks.peers.stubs import Anything

__all__ = ["Anything", "bare_packages", "path_of"]


def path_of(variable: str, inside: str) -> Path:
    """The folder that ``variable`` names; skips the test unless it holds the file ``inside``."""
    given = os.environ.get(variable)
    if not given:
        pytest.skip(f"{variable} names no copy of the project")
    if not (Path(given) / inside).is_file():
        pytest.skip(f"{variable}={given} has no {inside}")
    return Path(given)
