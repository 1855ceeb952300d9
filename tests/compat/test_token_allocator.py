"""TokenToKVPoolAllocator: pages, the second buffer, groups, and the named faults."""

import time

import numpy as np
import pytest
import torch

from kvpagoda.compat.token_allocator import TokenToKVPoolAllocator
from kvpagoda.errors import BadInput, CheckFailed, NotOwned
from raises import raises


def make(size, page_size=1, need_sort=True):
    return TokenToKVPoolAllocator(size, device="cpu", page_size=page_size, need_sort=need_sort)


def snapshot(tokens):
    pages, waiting = tokens._pages, [*tokens._waiting, *tokens._grouped]
    places = pages.free_ids().tolist(), [ids.tolist() for ids in waiting if len(ids)], pages.held_ids().tolist()
    return tokens.available_size(), places, tokens._unfreed.ids().tolist()


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


@pytest.mark.parametrize(("need_size", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (12, 3)])
def test_alloc_hands_out_whole_pages(need_size, pages):
    tokens = make(14, 4)
    out = tokens.alloc(need_size=need_size)
    assert out.tolist() == list(range(1, 4 * pages + 1)) and tokens.available_size() == 12 - 4 * pages
    assert tokens.alloc(need_size=4 * (3 - pages) + 1) is None and tokens.available_size() == 12 - 4 * pages
    tokens.check()


def test_an_engine_that_used_6_of_8_returns_6():
    tokens = make(16, 8)
    for _ in range(5):
        used = tokens.alloc(6)[:6]
        tokens.free(used)
        assert tokens.available_size() == 16
        tokens.check()


def test_the_first_index_of_a_page_that_comes_back_frees_it_and_later_ones_change_nothing():
    tokens = make(8, 4)
    out = tokens.alloc(8)
    tokens.free(out[2:3])
    assert tokens.available_size() == 4
    before = snapshot(tokens)[:2]
    for half in (out[:2], out[3:4]):  # the other indices of that page
        tokens.free(half)
        assert snapshot(tokens)[:2] == before
        tokens.check()
    with raises(NotOwned, needed=3):
        tokens.free(out[2:3])
    assert tokens.alloc(4).tolist() == [1, 2, 3, 4]  # once, though it came back in three pieces
    assert tokens.alloc(4) is None
    tokens.check()


def test_an_index_freed_twice_raises_while_another_of_its_page_may_come():
    tokens = make(8, 4)
    tokens.alloc(8)
    tokens.free([1, 5])
    for twice in ([1], [5], [2, 1], [3, 3], [6, 5]):
        before = snapshot(tokens)
        with pytest.raises(NotOwned):
            tokens.free(twice)
        assert snapshot(tokens) == before
    tokens.free([2, 6])
    with pytest.raises(NotOwned):
        tokens.free([2])
    tokens.check()


def test_once_a_page_is_handed_out_again_everything_starts_anew():
    tokens = make(4, 4)
    tokens.free(tokens.alloc(4)[:3])
    again = tokens.alloc(4)
    assert again.tolist() == [1, 2, 3, 4] and tokens.available_size() == 0
    tokens.free(again[3:])  # never freed in its first life: it frees the page of the second
    assert tokens.available_size() == 4
    tokens.free(again[:3])
    assert tokens.available_size() == 4
    with pytest.raises(NotOwned):
        tokens.free(again)
    tokens.check()


def test_a_page_freed_in_two_halves_is_handed_out_once_whatever_lies_between():
    tokens = make(8, 4)
    out = tokens.alloc(8)
    tokens.free(out[:2])
    tokens.merge_and_sort_free()  # free, no longer waiting
    tokens.free(out[2:4])
    tokens.merge_and_sort_free()
    with tokens.free_group():
        tokens.free(out[4:6])
        tokens.free(out[6:8])
    assert tokens.available_size() == 8
    assert sorted(tokens.alloc(8).tolist()) == list(range(1, 9)) and tokens.alloc(1) is None
    tokens.check()


def test_keyword_names_and_defaults():
    tokens = TokenToKVPoolAllocator(size=6, device="cpu")
    assert (tokens.size, tokens.page_size, tokens.need_sort, tokens.device.type) == (6, 1, True, "cpu")
    tokens = TokenToKVPoolAllocator(6, "cpu", 2, False)
    assert (tokens.page_size, tokens.need_sort) == (2, False)
    tokens.free(indices=tokens.alloc(need_size=3))
    assert tokens.available_size() == 6
    with raises(BadInput, needed=2**31, available=2**31 - 1):
        make(2**31, 16)


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
    with raises(BadInput, field="page_size", needed=0, available=1):
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
        lambda tokens: tokens._unfreed.flags.__setitem__(1, False),
        lambda tokens: tokens._unfreed.flags.__setitem__(slice(5, 7), True),
        lambda tokens: tokens._pages.release_id(2),
        lambda tokens: setattr(tokens, "_num_waiting", 2),
    ],
)
def test_check_sees_damage(break_it):
    tokens = make(8, 2)
    tokens.alloc(4)
    tokens.free_group_begin()
    break_it(tokens)
    with pytest.raises(CheckFailed):
        tokens.check()


class Model:
    """Which pages somebody holds, and which indices of each page were not freed since it was handed out."""

    def __init__(self, page_size):
        self.page_size, self.held, self.unfreed = page_size, set(), set()

    def page(self, i):
        return (i - 1) // self.page_size

    def take(self, indices):
        pages = {self.page(i) for i in indices}
        assert not pages & self.held and len(indices) == len(set(indices)) == len(pages) * self.page_size
        self.held |= pages
        self.unfreed |= set(indices)

    def free(self, indices):
        self.unfreed -= set(indices)
        self.held -= {self.page(i) for i in indices}


@pytest.mark.parametrize(("page_size", "need_sort"), [(1, True), (1, False), (3, True), (3, False)])
def test_random_operations_against_a_model(page_size, need_sort):
    """4 times 15,000 operations; ``check`` after each."""
    rng = np.random.default_rng(page_size)
    size = 20
    tokens, model, depth = make(size, page_size, need_sort), Model(page_size), 0
    for op in rng.integers(0, 8, 15_000).tolist():
        before = tokens.available_size()
        if op <= 1:
            n = int(rng.integers(0, 8))
            out = tokens.alloc(n)
            pages = -(-n // page_size)
            assert (out is None) == (pages * page_size > before)
            if out is not None:
                assert len(out) == pages * page_size and all(1 <= i <= size for i in out.tolist())
                assert tokens.available_size() == before - len(out)
                model.take(out.tolist())
        elif op <= 3:
            some = rng.permutation(sorted(model.unfreed))[: int(rng.integers(0, 8))].tolist()
            tokens.free(some)
            model.free(some)
            assert tokens.available_size() >= before
        elif op == 4:
            wrong = sorted(set(range(-1, size + 3)) - model.unfreed)
            with pytest.raises(NotOwned):
                tokens.free([*sorted(model.unfreed)[:2], int(rng.choice(wrong))])
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
        hidden = tokens.num_pages - len(model.held) - tokens.available_size() // page_size
        assert hidden == 0 if depth == 0 else hidden >= 0
    for _ in range(depth):
        tokens.free_group_end()
    tokens.free(sorted(model.unfreed))
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


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_alloc_that_fails_on_its_way_to_the_device_takes_nothing(page_size, monkeypatch):
    def fail(staging, ids):
        raise MemoryError("no device memory")

    tokens = make(16, page_size)
    before = snapshot(tokens)
    monkeypatch.setattr("kvpagoda.compat.token_allocator.Staging.to_device", fail)
    with pytest.raises(MemoryError):
        tokens.alloc(6)
    monkeypatch.undo()
    assert snapshot(tokens) == before and tokens.alloc(2).tolist()[:2] == [1, 2]
    tokens.check()


@pytest.mark.gpu
def test_indices_live_on_the_device_by_default():
    tokens = TokenToKVPoolAllocator(16, page_size=4)
    out = tokens.alloc(8)
    assert out.is_cuda and out.dtype == torch.int32
    tokens.free(out)
    assert tokens.available_size() == 16
