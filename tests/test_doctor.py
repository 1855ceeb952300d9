"""The doctor: it tries what is installed, reports what is not, and says why something is broken."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("xxhash")

import kvpagoda
from fake_cuda import NAME, FakeTorch
from kvpagoda import doctor
from kvpagoda.bench_gpu import card, measure
from kvpagoda.bench_gpu.card import Card
from kvpagoda.bench_gpu.rows import RowSizes
from kvpagoda.core.memory.device_memory import DeviceMemory
from kvpagoda.doctor import EXTRAS, CheckResult, examine
from kvpagoda.errors import BadInput
from kvpagoda.tiers import tier_from_text
from raises import raises

Command = Callable[..., "subprocess.CompletedProcess[str]"]


def found(*tiers: str) -> dict[str, CheckResult]:
    """Return what the doctor finds, by name."""
    return {finding.name: finding for finding in examine(tiers)}


@pytest.fixture
def no_imports(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception]:
    """Replace imports. Returns a dictionary: package -> the error that its import raises. Others succeed."""
    errors: dict[str, Exception] = {}

    def load(name: str) -> None:
        if name in errors:
            raise errors[name]

    monkeypatch.setattr(importlib, "import_module", load)
    return errors


def test_everything_here_works(tmp_path: Path) -> None:
    told = found("host:64MiB", f"disk:{tmp_path}:1GiB", f"disk:{tmp_path}/not/there:1GiB")
    assert {"python", "kvpagoda", "package", "cache on cpu", "host:64MiB", *EXTRAS} <= told.keys()
    assert not [finding for finding in told.values() if finding.state == "broken"]
    assert all(finding.detail for finding in told.values())
    assert not list(tmp_path.iterdir()), "what was tried in a folder is gone"


def test_a_package_that_is_not_installed_is_absent_and_not_broken(no_imports: dict[str, Exception]) -> None:
    no_imports["xxhash"] = ModuleNotFoundError("No module named 'xxhash'", name="xxhash")
    no_imports["mooncake.store"] = ModuleNotFoundError("No module named 'mooncake'", name="mooncake")
    told = found()
    assert told["xxhash"].state == told["mooncake.store"].state == "absent" and "file" not in told
    assert "kvpagoda[disk]" in told["xxhash"].detail and "kvpagoda[mooncake]" in told["mooncake.store"].detail


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'regex'", name="regex"),
        ImportError("libibverbs.so.1: cannot open shared object file"),
        RuntimeError("two lines\nof it"),
    ],
)
def test_a_package_whose_import_fails_is_broken(no_imports: dict[str, Exception], error: Exception) -> None:
    no_imports["transformers"] = error
    told = found()["transformers"]
    assert told.state == "broken" and str(error).split()[0] in told.detail and "\n" not in told.detail


def test_a_missing_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 0)
    told = found()["gpu"]
    assert told.state == "absent" and doctor.torch.__version__ in told.detail and "on the CPU" in told.detail


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the doctor find one GPU, which is the CPU, and measure tiny sizes."""
    made, tried = Card.__init__, doctor._serve
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(card, "torch", FakeTorch())
    monkeypatch.setattr(card, "MATRIX", 8)
    monkeypatch.setattr(card, "driver_version", lambda: "570.86.15")
    monkeypatch.setattr(Card, "__init__", lambda self, device: made(self, doctor.torch.device("cpu")))
    monkeypatch.setattr(doctor, "_serve", lambda device: tried(doctor.torch.device("cpu")))
    tiny = RowSizes(moved=1 << 16, requests=2, contexts=(20,), steps=2, rounds=1, few=8, replays=2)
    monkeypatch.setattr(measure, "SHORT", tiny)
    monkeypatch.setenv("KVPAGODA_KERNELS", "reference")


def test_a_gpu_is_named_and_measured(one_gpu: None, no_imports: dict[str, Exception]) -> None:
    told = found()
    assert "gpu" not in told and told["cache on cuda:0"].state == told["gpu cuda:0"].state == "ok"
    assert told["gpu cuda:0"].detail.startswith(f"{NAME}, 80.0 GiB, driver 570.86.15: copies ")
    assert "a step of 2 requests holds the host" in told["gpu cuda:0"].detail


def test_a_gpu_that_cannot_be_measured_is_broken(
    one_gpu: None, no_imports: dict[str, Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Card) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Card, "queue", fail)
    told = found()["gpu cuda:0"]
    assert told.state == "broken" and "illegal memory access" in told.detail


def test_a_library_that_is_not_installed_as_a_package_is_told(
    no_imports: dict[str, Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found()["package"].state == "ok"

    def none(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "distribution", none)
    told = found()
    assert told["package"].state == "absent" and "no metadata" in told["package"].detail
    assert told["kvpagoda"].detail.startswith(kvpagoda.__version__), "its version does not come from the metadata"
    bare = SimpleNamespace(version="0.0.9", entry_points=[SimpleNamespace(name="kvpagoda", group="other")])
    monkeypatch.setattr(doctor, "distribution", lambda _: bare)
    assert "0.0.9 has no entry point" in found()["package"].detail


def test_a_cache_that_loses_rows_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(memory: DeviceMemory, *_: Any) -> None:
        for arena in memory.arenas:
            arena.buffer.zero_()

    monkeypatch.setattr(DeviceMemory, "from_host", lose)
    assert found()["cache on cpu"].state == "broken"


@pytest.mark.parametrize("tier", ["redis://127.0.0.1:1", "disk:/dev/null:1GiB"])
def test_a_tier_that_cannot_be_reached_is_broken(tier: str) -> None:
    told = found(tier)[tier]
    assert told.state == "broken" and ("refused" in told.detail or "/dev/null" in told.detail)


def test_a_store_that_spoils_records_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tier_from_text("host:64MiB")
    made = spec.make

    def make(buffer: Any) -> Any:
        driver = made(buffer)
        load = driver.load

        def spoil(keys: Any, rows: Any, deadline: float) -> Any:
            statuses = load(keys, rows, deadline)
            buffer.records[rows[0], 500] ^= 1
            return statuses

        driver.load = spoil  # type: ignore[method-assign]
        return driver

    object.__setattr__(spec, "make", make)
    monkeypatch.setattr(doctor, "tier_from_text", lambda _: spec)
    assert "load says corrupt" in found("spoilt")["spoilt"].detail


def test_a_malformed_tier_is_refused_first() -> None:
    with raises(BadInput, needed="floppy:A"):
        next(examine(["floppy:A"]))


def test_the_command() -> None:
    command = [sys.executable, "-m", "kvpagoda", "doctor", "--tier", "host:64MiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("ok      python: ") and "cache on cpu" in done.stdout


def test_the_command_exits_with_1_for_what_is_broken(here: Command) -> None:
    done = here("doctor", "--json", "--tier", "redis://127.0.0.1:1")
    figures = json.loads(done.stdout)
    assert done.returncode == 1 and figures["broken"] == ["redis://127.0.0.1:1"]
    assert {finding["state"] for finding in figures["findings"]} <= {"ok", "absent", "broken"}


def test_the_command_refuses_what_is_no_tier(here: Command) -> None:
    done = here("doctor", "--tier", "floppy")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and not done.stdout
