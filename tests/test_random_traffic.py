"""Random traffic over every layer kind and policy: every row and state that a batch shows belongs to its own text."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from late_device import Apart
from options import shuffled_places
from random_driver.caches import has_xxhash, settings_of
from random_driver.driver import drive
from random_driver.faults import Fault
from random_driver.schemas import SCHEMA_NAMES
from random_driver.split import SplitBatch

OPERATIONS, SEEDS = 500, 5  # over 8 schemas: 20,000 operations
MANY_OPERATIONS, MANY_SEEDS = 5_000, 40


def traffic(schema: str, seed: int, num_operations: int, *, split: bool = False) -> None:
    """Run the driver once, and check that it opened, stepped and closed requests. With odd seeds no block has its name for
    its place. ``split``: scheduler and worker have the cache together."""
    settings = settings_of(schema, seed, split=split)
    if "disk" in settings.tiers and not has_xxhash():
        pytest.skip("records on disk need xxhash for their checksums: pip install kvpagoda[disk]")
    with shuffled_places(seed) if seed % 2 else nullcontext():
        driver = drive(settings, num_operations)
    counts = driver.counts
    assert counts["open"] and counts["step"] and counts["close"], counts


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("schema", SCHEMA_NAMES)
def test_random_traffic_reads_its_own_bytes(schema: str, seed: int) -> None:
    traffic(schema, seed, OPERATIONS)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("schema", SCHEMA_NAMES)
def test_a_worker_reads_its_own_bytes(schema: str, seed: int) -> None:
    traffic(schema, seed, OPERATIONS, split=True)


@pytest.mark.parametrize("schema", SCHEMA_NAMES)
def test_a_device_with_memory_of_its_own_reads_its_own_bytes(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Apart] = []
    monkeypatch.setattr(
        "kvpagoda.core.memory.device_memory.DeviceArrays", lambda device: made.append(Apart(device)) or made[-1]
    )
    traffic(schema, SCHEMA_NAMES.index(schema), 300)
    assert sum(len(arrays.sent) for arrays in made) > 20


@pytest.mark.parametrize(
    ("kind", "schema", "seed"),
    [
        ("block", "full", 2), ("state", "wide", 2), ("move", "mixed", 6), ("reset", "mixed", 2), ("swap_out", "mixed", 2),
        ("swap_in", "mixed", 2), ("block", "full", 1), ("state", "wide", 1), ("move", "mixed", 3), ("reset", "mixed", 1),
        ("swap_out", "mixed", 1), ("swap_in", "mixed", 1), ("poison", "full", 1),
    ],
)  # fmt: skip
def test_a_copy_that_a_worker_does_not_get_is_seen(
    kind: str, schema: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With odd seeds both caches sanitize, and the worker finds it before anything is read. The other kinds change no row that
    is read: these are in test_split.py."""
    monkeypatch.setattr(SplitBatch, "without", kind)
    with pytest.raises(Fault, match="CheckFailed" if seed % 2 else "WrongBytes"):
        traffic(schema, seed, OPERATIONS, split=True)


@pytest.mark.parametrize(("schema", "seed", "split"), [("mixed", 3, False), ("qwen3_next", 1, True)])
def test_states_that_no_step_leaves_are_found_before_they_are_read(
    schema: str, seed: int, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that went through a tier, where all that nobody wrote is the same record."""
    monkeypatch.setattr("random_driver.oracle.left_states", lambda batch: [])
    with pytest.raises(Fault, match=r"CheckFailed: .*(nobody: no step|nobody) wrote"):
        traffic(schema, seed, OPERATIONS, split=split)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS, SEEDS + MANY_SEEDS))
@pytest.mark.parametrize("schema", SCHEMA_NAMES)
def test_long_random_traffic_reads_its_own_bytes(schema: str, seed: int) -> None:
    """These are 1.6 million operations; ``python -m random_driver`` runs other seeds."""
    traffic(schema, seed, MANY_OPERATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS, SEEDS + MANY_SEEDS // 4))
@pytest.mark.parametrize("schema", SCHEMA_NAMES)
def test_a_worker_reads_its_own_bytes_in_long_traffic(schema: str, seed: int) -> None:
    traffic(schema, seed, MANY_OPERATIONS, split=True)
