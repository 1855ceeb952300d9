"""Dynamo's indexer scores what ``lookup`` finds, over random traffic with evictions and tenants, joining in its middle, and
tells what is in host memory apart."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")
pytest.importorskip("zmq", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")

from consumers import FOLDER, package

FILE = Path(__file__).with_name("indexed.py")
NAMESPACE = ("unshare", "--net", "--map-root-user")
"""The indexer binds all addresses, so it runs where there is only the loopback."""


def scores(num_rounds: int, *schemas: str) -> dict[str, tuple[list[list[int]], int]]:
    """Schema -> [tokens, score, cached, resumable] of each question, and blocks evicted."""
    package("dynamo/indexer/__main__.py")
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip(
            "no network namespace for Dynamo's indexer, which binds all addresses: needs unshare, and a right to it"
        )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [*NAMESPACE, sys.executable, str(FILE), str(FOLDER / "bin" / "python"), str(num_rounds), *schemas]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60 + num_rounds)
    assert done.returncode == 0, done.stderr[-2000:]
    lines: list[Any] = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (told, evicted) for name, told, evicted in lines}


def check(found: dict[str, tuple[list[list[int]], int]], num_rounds: int) -> None:
    for name, (told, evicted) in found.items():
        print(f"{name}: {len(told)} questions, {evicted} blocks evicted")
        assert len(told) >= num_rounds // 6 and evicted > num_rounds, name
        assert [score for _, score, _, _ in told] == [cached // 16 * 16 for _, _, cached, _ in told], name
        equal = [score == resumable // 16 * 16 for _, score, _, resumable in told]
        assert all(equal) or name not in ("full", "mla"), name
        assert any(score for _, score, _, _ in told), name
    told, _ = found["sliding"]  # it scores what is cached, and a window may lack a part of that
    assert any(resumable < score for _, score, _, resumable in told)


def test_scores_are_what_lookup_finds() -> None:
    found = scores(60, "full", "sliding", "gemma", "mla")
    told, evicted = found.pop("tiers")
    assert [*found] == ["full", "sliding", "gemma", "mla"]
    check(found, 60)
    assert evicted > 40 and len(told) == 8
    for tokens, on_device, anywhere, cached in told:
        assert (on_device, anywhere) == (cached // 16 * 16, tokens // 16 * 16)
    assert {on_device for _, on_device, _, _ in told} >= {0, 192}


@pytest.mark.slow
def test_scores_stay_what_lookup_finds() -> None:
    found = scores(2000, "full", "sliding", "gemma", "mla")
    del found["tiers"]
    check(found, 2000)
