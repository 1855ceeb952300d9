"""What all tests share. Torch uses one thread: the models are tiny, and several test processes may run at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs ``kvpagoda`` with its arguments, as a shell does, but in the process of the test.

    That process has already imported the large packages."""
    pytest.importorskip("typer")

    def run(*arguments: str, width: int = 100) -> subprocess.CompletedProcess[str]:
        from kvpagoda.cli import main

        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setattr(sys, "argv", ["kvpagoda", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return subprocess.CompletedProcess(arguments, int(end.value.code or 0), *capsys.readouterr())

    return run
