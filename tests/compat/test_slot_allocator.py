"""SlotAllocator: lowest free first, versions, flat cost, no torch."""

import subprocess
import sys
import time

import numpy as np
import pytest

from kvpagoda.compat.slot_allocator import SlotAllocator
from kvpagoda.errors import BadInput, CheckFailed, NotOwned
from raises import raises


def test_lowest_first_and_minus_one_when_full():
    slots = SlotAllocator(3)
    assert [slots.alloc() for _ in range(5)] == [0, 1, 2, -1, -1]
    assert slots.free_count == 0
    slots.free(2)
    slots.free(0)
    assert slots.free_count == 2
    assert [slots.alloc(), slots.alloc(), slots.alloc()] == [0, 2, -1]
    slots.check()


def test_version_is_bumped_by_alloc_only():
    slots = SlotAllocator(2)
    assert slots.version(0) == 0
    slots.alloc()
    assert slots.version(0) == 1
    slots.free(0)
    assert slots.version(0) == 1
    slots.occupy(0)
    assert slots.version(0) == 1
    slots.free(0)
    slots.alloc()
    assert (slots.version(0), slots.version(1)) == (2, 0)


def test_occupy_takes_a_named_slot():
    slots = SlotAllocator(3)
    slots.occupy(1)
    assert [slots.is_free(i) for i in range(3)] == [True, False, True]
    assert [slots.alloc(), slots.alloc(), slots.alloc()] == [0, 2, -1]


def test_occupy_of_a_slot_in_use_and_free_of_a_free_slot_raise():
    slots = SlotAllocator(3)
    slots.alloc()
    with raises(NotOwned, needed=0, available="held"):
        slots.occupy(0)
    with raises(NotOwned, needed=1, available="free"):
        slots.free(1)
    slots.free(0)
    with raises(NotOwned, needed=0, available="free"):
        slots.free(0)
    slots.check()
    assert slots.free_count == 3


@pytest.mark.parametrize("bad", [-1, 3, 1.0, True, None, "0"])
def test_a_slot_that_does_not_exist_raises(bad):
    slots = SlotAllocator(3)
    slots.alloc()
    for call in (slots.free, slots.occupy, slots.is_free, slots.version):
        with pytest.raises(NotOwned):
            call(bad)
    assert slots.free_count == 2


@pytest.mark.parametrize("bad", [-1, 1.5, True, None])
def test_a_size_that_is_no_whole_number_raises(bad):
    with pytest.raises(BadInput):
        SlotAllocator(bad)


def test_no_slots():
    slots = SlotAllocator(0)
    assert slots.alloc() == -1 and slots.free_count == 0
    slots.check()


def test_check_sees_levels_and_counts_that_disagree():
    slots = SlotAllocator(200)
    slots._levels[1][0] &= ~0b10
    with raises(CheckFailed, needed=4, available=[1]):
        slots.check()
    slots = SlotAllocator(200)
    slots.free_count -= 1
    with raises(CheckFailed, needed=199, available=200):
        slots.check()


def test_random_operations_against_a_model():
    """100,000 operations; ``check`` after each."""
    rng = np.random.default_rng(2)
    slots, used, versions = SlotAllocator(9), set(), [0] * 9
    for op, i in zip(rng.integers(0, 3, 100_000).tolist(), rng.integers(0, 9, 100_000).tolist()):
        if op == 0:
            want = min(set(range(9)) - used, default=-1)
            assert slots.alloc() == want
            if want >= 0:
                used.add(want)
                versions[want] += 1
        elif (op == 1) == (i in used):
            slots.free(i) if op == 1 else slots.occupy(i)
            used ^= {i}
        else:
            with pytest.raises(NotOwned):
                slots.free(i) if op == 1 else slots.occupy(i)
        assert slots.free_count == 9 - len(used)
        slots.check()
    assert [slots.version(i) for i in range(9)] == versions
    assert [slots.is_free(i) for i in range(9)] == [i not in used for i in range(9)]


@pytest.mark.parametrize("size", [64, 65, 4096, 5000])
def test_many_slots_are_found_lowest_first(size):
    """Through words that become empty and full again, at every level."""
    rng, slots, free = np.random.default_rng(size), SlotAllocator(size), np.ones(size, np.bool_)
    for share in (0.0, 1.0, 0.01, 0.5):
        for i in np.flatnonzero(~free & (rng.random(size) >= share)).tolist():
            slots.free(i)
            free[i] = True
        for i in np.flatnonzero(free & (rng.random(size) < share)).tolist():
            slots.occupy(i)
            free[i] = False
        slots.check()
        for _ in range(min(200, int(free.sum()))):
            found = slots.alloc()
            assert found == int(np.argmax(free))
            free[found] = False
        slots.check()
        assert slots.free_count == int(free.sum())


def test_occupied_slots_do_not_slow_down_alloc():
    slots = SlotAllocator(1_000_000)
    for i in range(999_999):
        slots.occupy(i)
    start = time.thread_time()
    assert slots.alloc() == 999_999
    assert time.thread_time() - start < 0.02, "looking at every occupied slot takes about 0.1 s"


def test_cost_is_flat_from_1_000_to_1_000_000_slots():
    def cost(size):
        slots = SlotAllocator(size)
        for _ in range(500):
            slots.alloc()
        slots.occupy(size - 1)
        picks = np.random.default_rng(0).integers(0, 500, 2_000).tolist()
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for i in picks:
                slots.free(i)
                assert slots.alloc() == i
            slots.free(size - 1)
            slots.occupy(size - 1)
            best = min(best, time.perf_counter() - start)
        return best

    cost(1_000)
    small, large = cost(1_000), cost(1_000_000)
    assert large < 5 * small, f"{large / small:.1f} times the cost at a thousand times the size"


def test_slots_work_without_torch():
    code = "import sys, kvpagoda; kvpagoda.SlotAllocator(4).alloc(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
