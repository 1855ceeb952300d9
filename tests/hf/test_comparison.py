"""What a comparison says of its runs: times, sources of tokens, and whether the answers are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")

from json_schema import schema_of, violations
from kvpagoda.hf.comparison import Comparison
from kvpagoda.hf.run import GenerationRun

COLD = GenerationRun("cold", [[1, 2], [3, 4]], 9.0, 6.0, 2000, 0, 0)
WARM = GenerationRun("warm", [[1, 2], [3, 4]], 1.0, 0.1, 2000, 1920, 0)
RESTARTED = GenerationRun("restarted", [[1, 2], [3, 5]], 1.0, 0.5, 2000, 1920, 1920)
FOUND = Comparison(
    "deepseek_v4", 1_230_075, {"sliding_attention": 2, "full": 1}, [900, 1100], 2, 1, [COLD, WARM, RESTARTED]
)


def said(found: Comparison, width: int, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    found.say()
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [60, 100])
def test_bars_are_as_long_as_the_times(width: int, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = said(FOUND, width, capsys, monkeypatch)
    assert all(len(line) <= width for line in lines)
    rows = {line.split()[0]: line for line in lines if line.startswith(("cold", "warm ", "restarted "))}
    cells = {name: line.split()[-4:] for name, line in rows.items()}
    assert cells == {
        "cold": ["6.00", "2,000", "0", "0"], "warm": ["0.10", "80", "1,920", "0"],
        "restarted": ["0.50", "80", "0", "1,920"],
    }  # fmt: skip
    eighths = {
        name: 8 * line.count("█") + sum(" ▏▎▍▌▋▊▉".find(c) for c in line if c in "▏▎▍▌▋▊▉")
        for name, line in rows.items()
    }
    for run in (WARM, RESTARTED):
        share = run.first_token_seconds / COLD.first_token_seconds
        assert abs(eighths[run.name] - share * eighths["cold"]) <= 1


def test_it_says_what_was_faster_and_what_was_not_the_same(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(" ".join(said(FOUND, 80, capsys, monkeypatch)).split())
    assert "2 prompts of 900 to 1,100 tokens" in text
    assert "a deepseek_v4 of 1.2 M parameters" in text and "2 sliding attention, 1 full" in text
    assert "60.0 times as fast warm, 12.0 times as fast restarted" in text
    assert "1 of 2 answers (4 tokens in all) are the same in all 3 runs" in text
    assert "prompts of 900 tokens" in " ".join(said(replace(FOUND, prompt_lengths=[900, 900]), 80, capsys, monkeypatch))


def test_its_figures_are_as_described() -> None:
    assert violations(FOUND.to_dict(), schema_of("generate")["properties"]["comparison"]) == []
