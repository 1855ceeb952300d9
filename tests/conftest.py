"""What all tests share. Torch uses one thread: the models are tiny, and several test processes may run at once."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

import pytest
import torch

from parts import mark_long, newest_first, skip_after

torch.set_num_threads(1)

_COLLECTED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seconds", type=float, default=float("inf"), help="skip, and say so, what would begin after this many seconds"
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spare the garbage collector the modules and thousands of tests, which stay until the end."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests as long before ``-m`` selects by marks; those that may not all be reached run with the newest first."""
    mark_long(items)
    if config.getoption("--seconds") < float("inf"):
        newest_first(items)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Spare it, after a file in whose tests it went over everything, what stays of them, mostly modules of packages."""
    before = gc.get_stats()[2]["collections"]
    yield
    config = item.config
    config.stash[_COLLECTED] = config.stash.get(_COLLECTED, False) or gc.get_stats()[2]["collections"] > before
    if config.stash[_COLLECTED] and (nextitem is None or nextitem.path != item.path):
        gc.collect()
        gc.freeze()
        config.stash[_COLLECTED] = False


def pytest_runtest_setup(item: pytest.Item) -> None:
    skip_after(item.config.getoption("--seconds"))


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
