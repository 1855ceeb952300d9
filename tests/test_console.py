"""Progress on a terminal: how far, and an estimate of the time that remains; nothing elsewhere."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("rich")

from rich.console import Console

from kvpagoda import console


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=is_terminal, width=100)
    monkeypatch.setattr(console, "Console", lambda stderr: terminal)
    with console.progress(1, "replays") as moved:
        assert (moved is not None) == is_terminal
        if moved is not None:
            moved(0.25, "s3fifo")
    assert ("25 %" in shown.getvalue() and "--:--" in shown.getvalue()) == is_terminal
    assert is_terminal or shown.getvalue() == ""
