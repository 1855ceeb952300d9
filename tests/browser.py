"""A real browser for tests: chromium, driven by playwright. ``make browser`` installs both."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a running browser, of ``playwright.sync_api``. Without one the test is skipped."""
    api = pytest.importorskip("playwright.sync_api", reason="no playwright to drive a browser: make browser")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium: make browser")
    with api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
