"""FreeList: every id free, waiting or held; errors change nothing."""

import pickle

import numpy as np
import pytest

from kvpagoda.blocks import FreeList
from kvpagoda.blocks.ids import IdSet
from kvpagoda.errors import BadInput, CheckFailed, NotOwned, OutOfBlocks


def frozen(free: FreeList) -> bytes:
    """Everything observable, as bytes."""
    return pickle.dumps(
        (free.free_ids(), free.waiting_ids(), free.held_ids(), free.generation, free.num_free, free.num_waiting)
    )


def ids(*values):
    return np.array(values, np.int32)


def test_lowest_ids_go_out_first_and_the_last_freed_next():
    free = FreeList(4, first=10)
    assert free.acquire(3).tolist() == [10, 11, 12]
    free.release(ids(10, 12))
    assert free.acquire(2).tolist() == [12, 10]
    assert free.generation[10:].tolist() == [2, 1, 2, 0]


@pytest.mark.parametrize(
    "bad",
    [ids(2, 2), ids(3), ids(-1), ids(4), ids(2, 3), np.array([2**32], np.int64), np.array([2**64 - 1], np.uint64)],
)
@pytest.mark.parametrize("later", [False, True])
def test_a_bad_release_raises_and_changes_nothing(bad, later):
    free = FreeList(4)
    free.acquire(3)
    before = frozen(free)
    with pytest.raises(NotOwned, match="id"):
        free.release(bad, later=later)
    assert frozen(free) == before
    free.check()


@pytest.mark.parametrize("bad", [np.array([0.0]), np.array([True]), np.array([[0]]), np.array(["a"])])
def test_ids_that_are_no_vector_of_integers_raise(bad):
    free = FreeList(4)
    free.acquire(1)
    with pytest.raises(BadInput, match="vector of integers"):
        free.release(bad)
    assert free.num_free == 3


@pytest.mark.parametrize("n", [-1, 1.0, True, None, "2", np.bool_(True)])
def test_a_count_that_is_no_whole_number_raises(n):
    free = FreeList(4)
    with pytest.raises(BadInput, match="number of ids to take"):
        free.acquire(n)
    with pytest.raises(BadInput):
        FreeList(n)
    assert free.num_free == 4


def test_exhaustion_names_the_numbers_and_takes_nothing():
    free = FreeList(7, what="blocks")
    free.acquire(2)
    before = frozen(free)
    with pytest.raises(OutOfBlocks, match=r"OOM: need 6 blocks, 5 free of 7"):
        free.acquire(6)
    assert frozen(free) == before


def test_named_ids():
    free = FreeList(4)
    assert free.acquire_id(np.int64(2)) == 2
    assert free.acquire_id(0, fresh=True) == 0
    assert free.generation.tolist() == [1, 0, 0, 0]
    for bad in (2, 4, -1, 1.0, True, None):
        with pytest.raises(NotOwned):
            free.acquire_id(bad)
    for bad in (1, 4, -1, 2.0, False):
        with pytest.raises(NotOwned):
            free.release_id(bad)
    assert free.release_id(2) == 2
    assert free.acquire(3).tolist() == [2, 1, 3]
    free.check()


def test_waiting_ids_go_out_only_after_a_merge_the_oldest_first():
    free = FreeList(6)
    free.acquire(6)
    free.release(ids(5, 4), later=True)
    free.release(ids(0), later=True)
    assert free.num_free == 0 and free.waiting_ids().tolist() == [0, 4, 5]
    with pytest.raises(OutOfBlocks, match="0 free and 3 waiting of 6"):
        free.acquire(1)
    with pytest.raises(NotOwned, match="waiting"):
        free.acquire_id(4)
    with pytest.raises(NotOwned):
        free.release(ids(4))
    free.merge(2)
    free.check()
    assert free.free_ids().tolist() == [4, 5] and free.waiting_ids().tolist() == [0]
    free.merge()
    free.sort()
    assert free.acquire(3).tolist() == [0, 4, 5]
    with pytest.raises(BadInput):
        free.merge(1)


def test_sort_gives_the_same_order_for_few_and_for_many_free_ids():
    for num_free in (3, 100):
        free = FreeList(100, first=7)
        taken = np.random.default_rng(0).permutation(free.acquire(100))
        free.release(taken[:num_free])
        free.sort()
        assert free.acquire(num_free).tolist() == sorted(taken[:num_free].tolist())
        free.check()


def test_clear_frees_everything_and_keeps_generations():
    free = FreeList(5, first=1)
    free.acquire(5)
    free.release(ids(2, 4), later=True)
    free.clear()
    free.check()
    assert free.acquire(5).tolist() == [1, 2, 3, 4, 5]
    assert free.generation.tolist() == [0, 2, 2, 2, 2, 2]


def test_an_empty_list():
    free = FreeList(0)
    assert len(free.acquire(0)) == 0
    free.release(ids())
    free.merge()
    free.sort()
    free.clear()
    free.check()
    with pytest.raises(OutOfBlocks, match="of 0"):
        free.acquire(1)


def test_too_many_ids_for_int32_raise():
    with pytest.raises(BadInput, match=r"2\^31"):
        FreeList(2**31)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda free: free._stack.__setitem__(0, free._stack[1]), "not exactly one"),
        (lambda free: free._held.flags.__setitem__(3, True), r"\[3\]"),
        (lambda free: free._held.flags.__setitem__(0, False), r"\[0\]"),
        (lambda free: free._place.__setitem__(2, 0), "index disagree"),
        (lambda free: free._stack.__setitem__(0, 99), "out of range"),
        (lambda free: setattr(free, "num_free", 5), "5 free"),
    ],
)
def test_check_sees_each_kind_of_damage(break_it, message):
    free = FreeList(4)
    free.acquire(2)
    break_it(free)
    with pytest.raises(CheckFailed, match=message):
        free.check()


def test_held_proves_without_torch_types():
    held = IdSet(3, 1, "things")
    held.flags[[1, 3]] = True
    assert held.prove(np.array([3, 1], np.uint8)).dtype == np.int32
    assert held.ids().tolist() == [1, 3]
    with pytest.raises(NotOwned, match=r"id 2 of things"):
        held.prove(ids(1, 2))


def test_random_operations_against_a_model():
    """100,000 operations; ``check`` after each."""
    rng = np.random.default_rng(1)
    free = FreeList(12, first=3, what="things")
    state = dict.fromkeys(range(3, 15), "free")
    versions = dict.fromkeys(state, 0)
    waiting: list[int] = []
    for step, op in enumerate(rng.integers(0, 8, 100_000)):
        held = [i for i, where in state.items() if where == "held"]
        idle = [i for i, where in state.items() if where == "free"]
        if op <= 1:
            n = int(rng.integers(0, 6))
            if n > len(idle):
                with pytest.raises(OutOfBlocks):
                    free.acquire(n)
            else:
                for i in free.acquire(n).tolist():
                    assert state[i] == "free"
                    state[i] = "held"
                    versions[i] += 1
        elif op <= 3 and held:
            given = rng.permutation(held)[: rng.integers(1, 5)].tolist()
            free.release(np.array(given), later=op == 3)
            state.update(dict.fromkeys(given, "waiting" if op == 3 else "free"))
            waiting += given if op == 3 else []
        elif op == 4:
            i = int(rng.integers(2, 16))
            if i in idle:
                free.acquire_id(i)
                state[i] = "held"
            else:
                with pytest.raises(NotOwned):
                    free.acquire_id(i)
        elif op == 5:
            wrong = [*held[:1], int(rng.choice([*idle, *waiting, 2, 15, *held[:1]]))]
            with pytest.raises(NotOwned):
                free.release(np.array(wrong), later=bool(step & 1))
        elif op == 6:
            n = int(rng.integers(0, len(waiting) + 1))
            free.merge(n)
            state.update(dict.fromkeys(waiting[:n], "free"))
            waiting = waiting[n:]
        elif op == 7:
            free.sort()
        free.check()
        assert free.num_free == sum(where == "free" for where in state.values())
        assert free.num_waiting == len(waiting)
    assert free.held_ids().tolist() == [i for i, where in state.items() if where == "held"]
    assert free.generation[3:].tolist() == list(versions.values())


def test_the_same_operations_give_the_same_ids():
    def run():
        free, rng, seen = FreeList(50), np.random.default_rng(5), []
        for _ in range(200):
            got = free.acquire(min(free.num_free, int(rng.integers(0, 9))))
            seen += got.tolist()
            free.release(rng.permutation(free.held_ids())[:6], later=bool(rng.integers(2)))
            free.merge()
        return seen

    assert run() == run()
