"""``kvpagoda audit`` on vLLM's own server with a tiny model: clean with vLLM's scheduler and ours, and with a planted fault.

``make vllm`` runs this.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no vLLM here; make vllm installs it")
pytest.importorskip("httpx", reason="no httpx: the extra audit")

import vllm_fault
from test_vllm_page import model, server
from tiny_vllm import BLOCK

from kvpagoda.audit import Report, audit

__all__ = ["model"]  # a fixture
OPTIONS = (
    "--enable-prompt-tokens-details", "--num-gpu-blocks-override", str(vllm_fault.BLOCKS), "--max-model-len", "4096",
    "--max-num-seqs", "8",
)  # fmt: skip
OURS = ("--scheduler-cls", "kvpagoda.adapters.vllm.Scheduler")


def audited(model: str, folder: Path, *options: str, path: str = "") -> Report:
    with server(model, folder / "log", *OPTIONS, *options, path=path) as address:
        return audit(address, max_requests=300, seed=1)


@pytest.mark.parametrize("options", [(), OURS], ids=["vllm", "kvpagoda"])
def test_a_server_that_is_right_is_clean(model: str, tmp_path: Path, options: tuple[str, ...]) -> None:
    report = audited(model, tmp_path, *options)
    said = report.to_dict()
    assert report.code == 0 and not report.findings, [*report.lines()][:8]
    assert (said["hits"]["unit"], said["hits"]["least"]) == (BLOCK["llama"], BLOCK["llama"] + 1)
    assert said["hits"]["share_found"] > 0.5


@pytest.mark.parametrize("options", [(), OURS], ids=["vllm", "kvpagoda"])
def test_rows_at_other_places_are_found(model: str, tmp_path: Path, options: tuple[str, ...]) -> None:
    report = audited(model, tmp_path, *options, path=vllm_fault.installed(tmp_path))
    assert report.code == 1, [*report.lines()][:8]
    first = next(iter(report.lines()))
    assert re.match(r"1\. The same prompt, asked again, gave other probabilities", first), first
