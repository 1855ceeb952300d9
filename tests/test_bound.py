"""The saved rows of the benchmark of the bound."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.bound import peers
from benchmarks.timing import RESULTS


def test_the_saved_rows_have_the_saved_hits_of_the_peers() -> None:
    saved = {row["case"]: row for row in json.loads((RESULTS / "bound.json").read_text())["rows"]}
    assert len(saved) == 24
    for row in saved.values():
        assert 0 < row["hit_percent"] <= row["bound_percent"] <= row["unlimited_percent"]
        if "64 at once" in row["case"]:
            assert peers(row["model"], row["budget"]).items() <= row.items()
