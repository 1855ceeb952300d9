"""TokenToKVPoolAllocator: pages, the second buffer, groups, and the named faults."""

import time

import numpy as np
import pytest
import torch

from kvpagoda.compat.token_allocator import TokenToKVPoolAllocator
from kvpagoda.errors import BadInput, CheckFailed, NotOwned


def make(size, page_size=1, need_sort=True):
    return TokenToKVPoolAllocator(size, device="cpu", page_size=page_size, need_sort=need_sort)


def snapshot(tokens):
    pages = tokens._pages
    places = pages.free_ids().tolist(), pages.waiting_ids().tolist(), pages.held_ids().tolist()
    return tokens.available_size(), places, tokens._tokens.ids().tolist(), tokens._live.tolist()


def test_alloc_gives_unique_int32_indices_from_1():
    tokens = make(6)
    out = tokens.alloc(4)
    assert out.dtype == torch.int32 and out.device.type == "cpu" and out.tolist() == [1, 2, 3, 4]
    assert tokens.available_size() == 2
    assert tokens.alloc(3) is None and tokens.available_size() == 2
    assert tokens.alloc(2).tolist() == [5, 6]
    assert tokens.alloc(1) is None and tokens.alloc(0).tolist() == []
    tokens.check()


@pytest.mark.parametrize("size", [*range(20), 64, 100])
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 7, 16])
def test_max_index_is_below_the_rows_for_every_size_and_page_size(size, page_size):
    tokens, seen = make(size, page_size), []
    honest = tokens.available_size()
    assert honest == size // page_size * page_size
    while (out := tokens.alloc(page_size)) is not None:
        seen += out.tolist()
    assert len(seen) == len(set(seen)) == honest
    assert all(1 <= i <= size for i in seen)
    assert tokens.available_size() == 0
    tokens.free(torch.tensor(seen, dtype=torch.int32))
    assert tokens.available_size() == honest
    whole = tokens.alloc(honest)
    assert whole is not None and sorted(whole.tolist()) == sorted(seen)
    tokens.check()


@pytest.mark.parametrize("need_sort", [True, False])
def test_pages_are_contiguous_inside(need_sort):
    tokens = make(40, 4, need_sort)
    first, second = tokens.alloc(20), tokens.alloc(20)
    tokens.free(second.flip(0))
    tokens.free(first)
    pages = tokens.alloc(32).reshape(-1, 4)
    assert bool((pages[:, 1:] - pages[:, :-1] == 1).all()) and bool(((pages[:, 0] - 1) % 4 == 0).all())


def test_a_number_that_is_no_multiple_of_the_page_takes_whole_pages():
    tokens = make(12, 4)
    assert tokens.alloc(5).tolist() == [1, 2, 3, 4, 5]
    assert tokens.available_size() == 4
    with pytest.raises(NotOwned):  # reserved with its page, but nobody's
        tokens.free([6])
    tokens.free([5])
    assert tokens.available_size() == 8
    tokens.check()


def test_freeing_part_of_a_page_never_rehands_the_page():
    tokens = make(8, 4)
    a = tokens.alloc(8)
    tokens.free(a[:3])
    assert tokens.available_size() == 0 and tokens.alloc(1) is None
    tokens.merge_and_sort_free()
    assert tokens.alloc(4) is None
    with pytest.raises(NotOwned, match="freed twice"):
        tokens.free(a[2:4])
    tokens.check()
    tokens.free(a[3:4])
    assert tokens.available_size() == 4
    assert tokens.alloc(4).tolist() == [1, 2, 3, 4]
    tokens.check()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("bad", [[1, 1], [0], [13], [-1], [5], [1, 5], [2**32 + 1], [2**31]])
def test_double_free_raises_and_the_state_is_unchanged(page_size, bad):
    tokens = make(13, page_size)
    tokens.alloc(8)
    tokens.free([5])
    before = snapshot(tokens)
    with pytest.raises(NotOwned) as caught:
        tokens.free(torch.tensor(bad))
    assert isinstance(caught.value, ValueError)
    assert snapshot(tokens) == before
    tokens.check()


@pytest.mark.parametrize("bad", [torch.tensor([1.0]), [True], [[1], [1, 2]], ["1"]])
def test_indices_that_are_no_whole_numbers_raise(bad):
    tokens = make(4)
    tokens.alloc(2)
    with pytest.raises(BadInput):
        tokens.free(bad)
    assert tokens.available_size() == 2


@pytest.mark.parametrize("bad", [-1, 1.0, True, None])
def test_a_number_that_is_not_whole_raises(bad):
    tokens = make(4)
    with pytest.raises(BadInput):
        tokens.alloc(bad)
    with pytest.raises(BadInput):
        make(bad)
    with pytest.raises(BadInput):
        make(4, bad)
    with pytest.raises(BadInput, match="at least 1"):
        make(4, 0)
    assert tokens.available_size() == 4


@pytest.mark.parametrize("page_size", [1, 2])
def test_freed_indices_wait_until_an_alloc_cannot_be_met_without_them(page_size):
    tokens = make(8 * page_size, page_size)
    out = tokens.alloc(6 * page_size)
    tokens.free(out[: 2 * page_size])
    assert tokens.available_size() == 4 * page_size
    assert tokens.alloc(page_size).min() == 6 * page_size + 1  # not yet one of the freed
    rest = tokens.alloc(3 * page_size)  # merged, and the lowest go out first
    assert rest.tolist() == [*range(1, 2 * page_size + 1), *range(7 * page_size + 1, 8 * page_size + 1)]
    tokens.check()


def test_merge_and_sort_free_puts_low_indices_first():
    tokens = make(6)
    out = tokens.alloc(5)
    tokens.free(out[[3, 0]])
    tokens.merge_and_sort_free()
    assert tokens.alloc(3).tolist() == [1, 4, 6]
    unsorted = make(6, need_sort=False)
    out = unsorted.alloc(5)
    unsorted.free(out[[3, 0]])
    unsorted.merge_and_sort_free()
    assert sorted(unsorted.alloc(3).tolist()) == [1, 4, 6]


@pytest.mark.parametrize("page_size", [1, 2])
def test_frees_of_a_group_come_back_at_its_end(page_size):
    tokens = make(6 * page_size, page_size)
    out = tokens.alloc(6 * page_size).reshape(6, page_size)
    tokens.free(out[0])
    tokens.free_group_begin()
    tokens.free(out[1])
    tokens.free_group_begin()
    tokens.free(out[2:4])
    tokens.free_group_end()
    assert tokens.available_size() == page_size  # only what was freed before
    assert tokens.alloc(2 * page_size) is None
    assert tokens.alloc(page_size).tolist() == out[0].tolist()  # merged inside the group, without the group's own
    tokens.check()
    tokens.merge_and_sort_free()
    assert tokens.available_size() == 0
    tokens.free_group_end()
    assert tokens.available_size() == 3 * page_size
    assert tokens.alloc(3 * page_size).tolist() == out[1:4].reshape(-1).tolist()
    tokens.check()


def test_a_double_free_inside_a_group_is_seen_at_the_free():
    tokens = make(6)
    out = tokens.alloc(6)
    tokens.free_group_begin()
    tokens.free(out[:2])
    with pytest.raises(NotOwned):
        tokens.free(out[1:3])
    assert tokens.available_size() == 2  # the error closed the group; what was freed before it is back
    tokens.free_group_end()
    tokens.free(out[2:])
    assert tokens.available_size() == 6
    tokens.check()


def test_a_group_is_closed_when_an_exception_passes_through_it():
    tokens = make(6)
    out = tokens.alloc(6)
    with pytest.raises(KeyError), tokens.free_group():
        tokens.free(out[:2])
        with tokens.free_group():
            tokens.free(out[2])
            raise KeyError("something else")
    assert tokens.available_size() == 3
    with tokens.free_group():
        tokens.free(out[3:])
        assert tokens.available_size() == 3
    assert tokens.available_size() == 6
    tokens.free_group_end()
    tokens.check()


@pytest.mark.parametrize("page_size", [1, 3])
def test_clear(page_size):
    tokens = make(10, page_size)
    out = tokens.alloc(6)
    tokens.free_group_begin()
    tokens.free(out[:3])
    tokens.clear()
    assert tokens.available_size() == 10 // page_size * page_size
    with pytest.raises(NotOwned):
        tokens.free(out)
    assert tokens.alloc(6).tolist() == [1, 2, 3, 4, 5, 6]
    tokens.check()


def test_indices_of_a_batch_are_freed_whatever_their_shape():
    tokens = make(8)
    tokens.free(tokens.alloc(8).reshape(2, 4).to(torch.int64))
    assert tokens.available_size() == 8


@pytest.mark.parametrize(
    "break_it",
    [
        lambda tokens: tokens._live.__setitem__(1, 3),
        lambda tokens: tokens._tokens.flags.__setitem__(1, False),
        lambda tokens: tokens._pages.release_id(2),
        lambda tokens: setattr(tokens, "_before_group", 2),
    ],
)
def test_check_sees_damage(break_it):
    tokens = make(8, 2)
    tokens.alloc(4)
    tokens.free_group_begin()
    break_it(tokens)
    with pytest.raises(CheckFailed):
        tokens.check()


@pytest.mark.parametrize(("page_size", "need_sort"), [(1, True), (1, False), (3, True), (3, False)])
def test_a_page_is_in_exactly_one_place_through_random_operations(page_size, need_sort):
    """4 times 25,000 operations against a set; ``check`` after each."""
    rng = np.random.default_rng(page_size)
    size = 20
    tokens, held, depth = make(size, page_size, need_sort), [], 0
    for op in rng.integers(0, 8, 25_000).tolist():
        before = tokens.available_size()
        if op <= 1:
            n = int(rng.integers(0, 8))
            out = tokens.alloc(n)
            pages = -(-n // page_size)
            assert (out is None) == (pages * page_size > before)
            if out is not None:
                got = out.tolist()
                assert len(set(got)) == n and not set(got) & set(held) and all(1 <= i <= size for i in got)
                assert tokens.available_size() == before - pages * page_size
                held += got
        elif op <= 3:
            rng.shuffle(held)
            n = int(rng.integers(0, 8))
            tokens.free(held[:n])
            held = held[n:]
            assert tokens.available_size() >= before
        elif op == 4:
            wrong = sorted(set(range(-1, size + 3)) - set(held))
            with pytest.raises(NotOwned):
                tokens.free([*held[:2], int(rng.choice(wrong))])
            depth = 0
        elif op == 5:
            tokens.free_group_begin()
            depth += 1
        elif op == 6:
            tokens.free_group_end()
            depth = max(0, depth - 1)
        else:
            tokens.merge_and_sort_free()
            assert tokens.available_size() == before
        tokens.check()
        live_pages = {(i - 1) // page_size for i in held}
        hidden = tokens.num_pages - len(live_pages) - tokens.available_size() // page_size
        assert hidden == 0 if depth == 0 else hidden >= 0
    tokens.free(held)
    for _ in range(depth):
        tokens.free_group_end()
    assert tokens.available_size() == size // page_size * page_size


@pytest.mark.parametrize("page_size", [1, 16])
def test_cost_is_flat_from_1_000_to_1_000_000_tokens(page_size):
    def cost(size):
        tokens, best = make(size, page_size), float("inf")
        tokens.alloc(size // 16 * 16 - 512)  # so that every eighth round merges, at either size
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(300):
                tokens.free(tokens.alloc(64))
            best = min(best, time.perf_counter() - start)
        return best

    cost(1_000)
    small, large = cost(1_024), cost(1_000_000)
    assert large < 5 * small, f"{large / small:.1f} times the cost at a thousand times the size"


@pytest.mark.gpu
def test_indices_live_on_the_device_by_default():
    tokens = TokenToKVPoolAllocator(16, page_size=4)
    out = tokens.alloc(8)
    assert out.is_cuda and out.dtype == torch.int32
    tokens.free(out)
    assert tokens.available_size() == 16
