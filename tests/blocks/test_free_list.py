"""FreeList: every id is free, held, or reclaimed and not yet given back; errors change nothing."""

import pickle
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from kvpagoda.errors import BadInput, CheckFailed, NotOwned, OutOfBlocks
from kvpagoda.free_list import FreeList, FreeStack, IdSet
from raises import raises


def frozen(free: FreeList) -> bytes:
    """Return everything observable, as bytes."""
    return pickle.dumps((free.free_ids(), free.held_ids(), free.num_free))


def ids(*values):
    """Return an int32 vector."""
    return np.array(values, np.int32)


def test_the_lowest_ids_are_acquired_first_and_then_those_freed_last():
    free = FreeList(9, first=10)
    assert free.acquire(7).tolist() == [10, 11, 12, 13, 14, 15, 16]
    free.release(ids(16, 10, 12))
    assert free.peek(1).tolist() == [16]  # of one id nothing is sorted
    assert free.acquire(2).tolist() == [10, 12]
    free.release(ids(13))
    assert free.acquire(2).tolist() == [13, 16]


@pytest.mark.parametrize("n", [2, 50, 400, 1500])
def test_neighbours_come_together_in_whatever_order_they_were_freed(n):
    free, rng = FreeStack(9000), np.random.default_rng(n)
    free.take(9000)
    free.give(np.arange(5000, 9000, dtype=np.int32))
    window = n + min(n, 1024)
    free.give(rng.permutation(window).astype(np.int32))
    assert free.peek(n).tolist() == [*range(n)]
    free.take(n)
    assert free.peek(1) == n
    free.check()


@pytest.mark.parametrize("most", [8, 3000])
def test_ids_are_those_of_a_plain_list(most):
    """Random calls beside a list of Python that sorts the end of itself, the next id last."""
    rng, size = np.random.default_rng(most), 3 * most
    free, plain, held = FreeList(size, first=1), [*range(size, 0, -1)], []
    for _ in range(300):
        n = min(int(rng.integers(0, most)), len(plain))
        if rng.integers(2):
            if n > 1:
                window = n + min(n, 1024)
                plain[-window:] = sorted(plain[-window:], reverse=True)
            expected = plain[len(plain) - n :][::-1]
            del plain[len(plain) - n :]
            assert free.peek(n).tolist() == expected == free.peek(n).tolist() == free.acquire(n).tolist()
            held += expected
        else:
            rng.shuffle(held)
            given, held = held[:n], held[n:]
            free.release(np.array(given, np.int32))
            plain += given[::-1]
        assert free.num_free == len(plain) and free.free_ids().tolist() == sorted(plain)
        assert free.held_ids().tolist() == sorted(held)
    free.check()


@pytest.mark.parametrize(
    ("bad", "wrong", "available"),
    [
        (ids(2, 2), 2, "twice"), (ids(3), 3, None), (ids(-1), -1, 0), (ids(4), 4, 0), (ids(2, 3), 3, None),
        (np.array([2**32], np.int64), 2**32, 0), (np.array([2**64 - 1], np.uint64), 2**64 - 1, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("give_back", [FreeList.release, FreeList.reclaim])
def test_a_bad_release_raises_and_changes_nothing(bad, wrong, available, give_back):
    free = FreeList(4)
    free.acquire(3)
    before = frozen(free)
    with raises(NotOwned, needed=wrong, available=available, field="an id of the ids" if available == 0 else None):
        give_back(free, bad)
    assert frozen(free) == before
    free.check()


@pytest.mark.parametrize("bad", [np.array([0.0]), np.array([True]), np.array([[0]]), np.array(["a"])])
def test_ids_that_are_no_vector_of_integers_raise(bad):
    free = FreeList(4)
    free.acquire(1)
    with raises(BadInput, needed=bad.dtype, available=[*bad.shape]):
        free.release(bad)
    assert free.num_free == 3


@pytest.mark.parametrize("n", [-1, 1.0, True, None, "2", np.bool_(True)])
def test_a_count_that_is_no_whole_number_raises(n):
    free = FreeList(4)
    with raises(BadInput, field="the number of ids to take", needed=n, available=0):
        free.acquire(n)
    with pytest.raises(BadInput):
        FreeList(n)
    assert free.num_free == 4


def test_exhaustion_names_the_numbers_and_takes_nothing():
    free = FreeList(7, what="blocks")
    free.acquire(2)
    before = frozen(free)
    with raises(OutOfBlocks, needed=6, available=5):
        free.acquire(6)
    assert frozen(free) == before


def test_one_id_is_given_back_by_name():
    free = FreeList(4)
    free.acquire(3)
    for bad in (3, 4, -1, 2.0, False, True, None):
        with pytest.raises(NotOwned):
            free.release_id(bad)
    free.release_id(np.int64(1))
    assert free.acquire(2).tolist() == [1, 3]
    free.check()


def test_reclaimed_ids_are_not_held_and_are_free_once_they_are_given_back():
    free = FreeList(6)
    free.acquire(6)
    first, second = free.reclaim(ids(5, 4)), free.reclaim(ids(0))
    assert free.num_free == 0 and free.held_ids().tolist() == [1, 2, 3]
    free.check(np.concatenate((first, second)))
    with raises(CheckFailed, needed="one of free, waiting and held", available=[0, 4, 5]):
        free.check()
    with raises(CheckFailed, needed="one of free, waiting and held", available=[]):
        free.check(ids(0, 4, 5, 5))
    with raises(OutOfBlocks, needed=1, available=0):
        free.acquire(1)
    with pytest.raises(NotOwned):
        free.release(ids(4))
    free.give(first)
    free.check(second)
    assert free.acquire(2).tolist() == [4, 5]


def test_clear_frees_everything():
    free = FreeList(5, first=1)
    free.acquire(5)
    free.reclaim(ids(2, 4))
    free.clear()
    free.check()
    assert free.acquire(5).tolist() == [1, 2, 3, 4, 5]


def test_an_empty_list():
    free = FreeList(0)
    assert len(free.acquire(0)) == 0
    free.release(ids())
    free.clear()
    free.check()
    with raises(OutOfBlocks, needed=1, available=0):
        free.acquire(1)


def test_too_many_ids_for_int32_raise():
    with raises(BadInput, needed=2**31, available=0):
        FreeList(2**31)


@pytest.mark.parametrize(
    ("break_it", "figures"),
    [
        (lambda free: free._stack.__setitem__(0, free._stack[1]), {"needed": "once", "available": [2]}),
        (
            lambda free: free._held.flags.__setitem__(3, True),
            {"needed": "one of free, waiting and held", "available": [3]},
        ),
        (
            lambda free: free._held.flags.__setitem__(0, False),
            {"needed": "one of free, waiting and held", "available": [0]},
        ),
        (lambda free: free._stack.__setitem__(0, 99), {"needed": 4, "available": [99]}),
        (lambda free: setattr(free, "num_free", 5), {"needed": 4, "available": []}),
    ],
)
def test_check_sees_each_kind_of_damage(break_it, figures: dict[str, Any]):
    free = FreeList(4)
    free.acquire(2)
    break_it(free)
    with raises(CheckFailed, **figures):
        free.check()


def test_held_proves_without_torch_types():
    held = IdSet(3, 1, "things")
    held.flags[[1, 3]] = True
    assert held.prove(np.array([3, 1], np.uint8)).dtype == np.int32
    assert held.ids().tolist() == [1, 3]
    with raises(NotOwned, needed=2):
        held.prove(ids(1, 2))


@pytest.mark.parametrize("operations", [20_000, 100_000])
def test_random_operations_against_a_model(operations):
    """``check`` after each."""
    rng = np.random.default_rng(operations)
    free = FreeList(12, first=3, what="things")
    state = dict.fromkeys(range(3, 15), "free")
    for op in rng.integers(0, 6, operations):
        held, idle, waiting = ([i for i, where in state.items() if where == one] for one in ("held", "free", "waiting"))
        if op <= 1:
            n = int(rng.integers(0, 6))
            if n > len(idle):
                with pytest.raises(OutOfBlocks):
                    free.acquire(n)
            else:
                taken = free.acquire(n).tolist()
                assert all(state[i] == "free" for i in taken)
                state.update(dict.fromkeys(taken, "held"))
        elif op <= 3 and held:
            given = rng.permutation(held)[: rng.integers(1, 5)].tolist()
            (free.reclaim if op == 3 else free.release)(np.array(given))
            state.update(dict.fromkeys(given, "waiting" if op == 3 else "free"))
        elif op == 4:
            wrong = [*held[:1], int(rng.choice([*idle, *waiting, 2, 15, *held[:1]]))]
            with pytest.raises(NotOwned):
                free.release(np.array(wrong))
        elif op == 5:
            given = waiting[: int(rng.integers(0, len(waiting) + 1))]
            free.give(ids(*given))
            state.update(dict.fromkeys(given, "free"))
        free.check(ids(*(i for i, where in state.items() if where == "waiting")))
        assert free.num_free == sum(where == "free" for where in state.values())
    assert free.held_ids().tolist() == [i for i, where in state.items() if where == "held"]


def test_the_same_operations_give_the_same_ids():
    def run():
        free, rng, seen = FreeList(50), np.random.default_rng(5), []
        for _ in range(200):
            got = free.acquire(min(free.num_free, int(rng.integers(0, 9))))
            seen += got.tolist()
            free.release(rng.permutation(free.held_ids())[:6])
        return seen

    assert run() == run()


@pytest.mark.parametrize("wrong", [9, 14])
def test_check_finds_an_id_just_outside_of_the_range(wrong):
    free = FreeList(4, first=10)
    free._stack[0] = wrong
    with raises(CheckFailed, needed=4, available=ANY):
        free.check()
