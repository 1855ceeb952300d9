"""The table of public threads in ``docs/audit.md`` names faults that are planted here, and probes that there are."""

from __future__ import annotations

import re
from pathlib import Path

from further import FURTHER
from planted import PLANTED
from unlisted import UNLISTED

from kvpagoda.audit.probes import probes
from kvpagoda.audit.server import ServerProfile

PAGE = Path(__file__).parents[2] / "docs" / "audit.md"


def test_threads_are_planted_and_found_by_probes() -> None:
    rows = re.findall(r"^\| [\w.-]+#\d.*", PAGE.read_text(), re.MULTILINE)
    names = {name for name, _, _ in probes(ServerProfile("m"), None, False)} | {"counters"}
    assert len(rows) > 11
    for row in rows:
        _, _, fault, found = (cell.strip() for cell in row.strip("| ").split("|"))
        assert fault in {*PLANTED, *UNLISTED, *FURTHER} and {*found.split(", ")} <= names, row


def test_every_probe_is_described() -> None:
    cells = re.findall(r"^\| ([^|#]+) \|[^|]*\|$", PAGE.read_text(), re.MULTILINE)
    described = {name for cell in cells for name in cell.split(", ")}
    assert {name for name, _, _ in probes(ServerProfile("m"), None, False)} <= described
