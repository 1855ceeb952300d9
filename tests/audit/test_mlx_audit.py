"""``kvpagoda audit`` on mlx-lm's server on a CPU: cold twins by churn, hits of any length. ``make consumers`` installs it."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from time import monotonic, sleep

import pytest

from kvpagoda.audit import Report, audit

httpx = pytest.importorskip("httpx", reason="no httpx: the extra audit")

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("KVPAGODA_CONSUMERS", ROOT / ".venv-consumers")) / "mlx" / "bin" / "python"

pytestmark = [pytest.mark.long, pytest.mark.skipif(not PYTHON.exists(), reason="no mlx-lm: make consumers")]


def audited(folder: Path, fault: str) -> Report:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    command = [str(PYTHON), str(Path(__file__).with_name("mlx_server.py")), str(folder / "model"), str(port), fault]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    try:
        end = monotonic() + 240
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except httpx.HTTPError:
                assert process.poll() is None and monotonic() < end, log.read_text(errors="replace")[-3000:]
                sleep(0.2)
        return audit(f"http://127.0.0.1:{port}", model=str(folder / "model"), max_requests=500, seed=1)
    finally:
        process.terminate()
        process.wait(60)


def test_a_server_that_is_right_is_clean(tmp_path: Path) -> None:
    report = audited(tmp_path, "")
    said = report.to_dict()
    assert report.code == 0 and not report.findings, [*report.lines()][:8]
    assert said["hits"]["unit"] <= 2 and said["hits"]["share_found"] > 0.5


def test_rows_of_another_place_are_found(tmp_path: Path) -> None:
    report = audited(tmp_path, "rows")
    assert report.code == 1, [*report.lines()][:8]
    first = report.findings[0]
    assert first.sort == "rows" and first.wrong == first.judged and (first.largest or 0) > 0.25


def test_a_hit_one_token_too_long_is_found(tmp_path: Path) -> None:
    """Also where a cold twin is wrong too, as what all chats begin with is found for it: such twins are no noise."""
    report = audited(tmp_path, "long")
    assert report.code == 1, [*report.lines()][:8]
    assert report.findings[0].sort == "rows" and report.audit.results.noise.most < 0.05


def test_keys_without_some_tokens_are_found(tmp_path: Path) -> None:
    """A chat with another role has the same text from there on; a prompt in which one of these tokens was changed by chance is
    said to be cached to its end."""
    report = audited(tmp_path, "keys")
    assert report.code == 1, [*report.lines()][:8]
    first = report.findings[0]
    assert (first.sort, first.kind) in (("rows", "other role"), ("counter", "prompt")), [*report.lines()][:8]
