"""The tool that holds the core to its budgets: what it counts, and what it says. ``make test`` runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from kvpagoda import KVCache, Schema

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))

import budgets  # noqa: E402


def test_figures_beside_their_budgets() -> None:
    bounds = {"lines": 10, "calls": 100, "files": 30, "decode": 8.5}
    figures = {"lines": 10, "calls": 90, "files": 31}
    assert budgets.over(figures, bounds) == {"files": 31}
    assert [line.split() for line in budgets.table(figures, bounds).splitlines()[1:]] == [
        ["lines", "10", "10"], ["calls", "90", "100", "-10"], ["files", "31", "30", "+1"],
        ["decode", "-", "8.5", "not", "here"],
    ]  # fmt: skip


def test_each_figure_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "run", lambda *_: budgets.Run(1, 2.0, 3))
    monkeypatch.setattr(budgets, "files_from_a_tier", lambda: 4)
    monkeypatch.setattr(budgets.code_size, "measure", lambda: budgets.code_size.CodeSize({}, {}, 1, 1, 1, []))
    monkeypatch.setattr(budgets, "TRACE", TOOLS)
    monkeypatch.setattr(budgets, "find_spec", lambda _: True)
    assert {*budgets.measure()} == {*json.loads(budgets.BUDGETS.read_text())}


def test_calls_and_files_of_the_package_are_counted() -> None:
    cache = KVCache(
        Schema.from_hf_config(budgets.FULL, dtype="bfloat16"), num_blocks=100, max_requests=1, device="none"
    )
    with (first := budgets.Entered()):
        np.arange(3).sum()
        sorted([2, 1], key=lambda one: -one)
    with (second := budgets.Entered()):
        cache.open(np.arange(20, dtype=np.int32))
    assert (first.calls, first.files) == (0, set())
    assert second.calls >= len(second.files) > 5 and all(name.startswith(budgets.HOME) for name in second.files)


def test_exit_code_says_whether_a_figure_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["budgets.py", "--json"])
    bounds = json.loads(budgets.BUDGETS.read_text())
    monkeypatch.setattr(budgets, "measure", lambda: bounds)
    assert budgets.main() == 0 and json.loads(capsys.readouterr().out)["now"] == bounds
    monkeypatch.setattr(budgets, "measure", lambda: {**bounds, "lines": bounds["lines"] + 1})
    assert budgets.main() == 1
