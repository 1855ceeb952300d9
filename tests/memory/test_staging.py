"""The ring through which index arrays get to a device: which slot is written when, and what it is not written for."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from kvpagoda.core.memory import staging
from kvpagoda.core.memory.staging import MOST_NBYTES, NUM_SLOTS, SLOT_NBYTES, Staging
from kvpagoda.core.memory.writes import Writes
from late_device import LateEvent, LateStaging

CPU = torch.device("cpu")


def apart() -> Staging:
    made = Staging(CPU)
    made.is_host = False
    return made


@pytest.mark.parametrize("dtype", [None, np.int64, np.int32])
def test_arrays_arrive_with_their_shape_and_dtype(dtype: type | None) -> None:
    for values in (
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.arange(12)[::2],
        np.empty(0, np.int32),
        np.uint8([7, 9]),
    ):
        for one in (apart(), Staging(CPU)):
            got = one.to_device(values, dtype).numpy()
            assert got.dtype == (dtype or values.dtype) and np.array_equal(got, values)
    values = np.arange(3)
    copied, shared = apart().to_device(values), Staging(CPU).to_device(values)
    values[:] = 9
    assert copied.tolist() == [0, 1, 2] and shared.tolist() == [9, 9, 9]


def test_a_slot_is_written_again_only_when_the_device_has_read_it() -> None:
    """Of every size: in slots that grow, and in memory of its own for what is too large for a slot."""
    random, stream = np.random.default_rng(0), []
    ring = LateStaging(stream)
    ring.is_host, LateEvent.waits = False, 0
    sizes = [4, SLOT_NBYTES // 4 - 1, SLOT_NBYTES // 4 + 1, MOST_NBYTES // 4, MOST_NBYTES // 4 + 1]
    sent, got = [], []
    for _ in range(3 * NUM_SLOTS):
        values = random.integers(0, 1 << 31, random.choice(sizes), np.int32)
        sent.append(values.copy())
        got.append(ring.to_device(values))
        values[:] = -1
        assert len(stream) <= 2 * 3 * NUM_SLOTS
    assert LateEvent.waits > NUM_SLOTS
    while stream:
        stream.pop(0)()
    assert all(np.array_equal(one, other.numpy()) for one, other in zip(sent, got))
    assert len(ring._slots) == NUM_SLOTS and {len(slot.host) for slot in ring._slots} <= {1 << n for n in range(16, 21)}


def test_where_page_locked_memory_is_refused_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """As on this machine, if it has no GPU."""
    if torch.cuda.is_available():
        pytest.skip("page-locked memory is here")
    staging._tell.cache_clear()
    with caplog.at_level(logging.WARNING, "kvpagoda"):
        for _ in range(2):
            ring, target, writes = apart(), torch.zeros(4, dtype=torch.int32), Writes()
            ring._is_locked = True
            for step in range(3):
                writes.put("target", target, np.arange(4) + step)
                ring.send(writes)
                writes.clear()
                assert target.tolist() == [step, step + 1, step + 2, step + 3]
    assert [one.message.partition(" (")[0] for one in caplog.records] == ["no page-locked memory"]
