"""Random traffic over every layer kind and policy: every row and state that a batch shows belongs to its own text."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from options import shuffled_places
from random_driver.caches import has_xxhash, settings_of
from random_driver.driver import drive
from random_driver.schemas import SCHEMA_NAMES

OPERATIONS, SEEDS = 500, 5  # over 8 schemas: 20,000 operations
MANY_OPERATIONS, MANY_SEEDS = 5_000, 40


def traffic(schema: str, seed: int, num_operations: int) -> None:
    """Run the driver once, and check that it opened, stepped and closed requests. With odd seeds no block has its name for
    its place."""
    settings = settings_of(schema, seed)
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS, SEEDS + MANY_SEEDS))
@pytest.mark.parametrize("schema", SCHEMA_NAMES)
def test_long_random_traffic_reads_its_own_bytes(schema: str, seed: int) -> None:
    """These are 1.6 million operations; ``python -m random_driver`` runs other seeds."""
    traffic(schema, seed, MANY_OPERATIONS)
