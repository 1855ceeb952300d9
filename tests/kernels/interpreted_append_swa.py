"""Run with TRITON_INTERPRET=1 in a process of its own (``test_triton.py`` does): the kernel on CPU tensors."""

import numpy as np
import pytest
import torch
from ring_cases import CASES, check_ordered, compare, expected, expected_heads
from triton.runtime import interpreter

from kvpagoda.kernels import append_swa
from kvpagoda.kernels.append_swa import append_swa_kernel
from kvpagoda.kernels.dispatch import VARIABLE


@pytest.fixture(autouse=True)
def triton_on_the_cpu(monkeypatch):
    assert isinstance(append_swa_kernel, interpreter.InterpretedFunction)
    monkeypatch.setenv(VARIABLE, "triton")
    with np.errstate(all="ignore"):  # NaN and inf are among the rows
        yield


@pytest.fixture
def shuffle(monkeypatch):
    """Make programs run in a random order: the interpreter runs them ascending, so give each another one's id."""
    builder = interpreter.interpreter_builder
    set_grid_idx = builder.set_grid_idx
    seen = []

    def start(n, seed):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()

        def permuted(x, y, z):
            seen.append(order[x])
            set_grid_idx(order[x], y, z)

        monkeypatch.setattr(builder, "set_grid_idx", permuted)
        return seen

    return start


@pytest.mark.parametrize("order", ["layer", "block"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_same_bytes_as_the_reference(case, order, monkeypatch):
    pools, reference = case.pools(order), case.pools(order)
    heads = torch.full((case.requests + 1, 2), 7, dtype=torch.int32)
    append_swa(case.kv, case.slots, case.positions, *pools.views, swa_head=heads[:, 1])
    assert torch.equal(heads[:, 1], expected_heads(case)) and (heads[:, 0] == 7).all()
    monkeypatch.setenv(VARIABLE, "reference")
    append_swa(case.kv, case.slots, case.positions, *reference.views)
    compare(pools, reference)
    compare(pools, expected(case, case.pools(order)))


@pytest.mark.parametrize("name", ["decode", "wrap", "longer_than_the_ring", "longer_than_an_odd_ring", "padded_nan"])
def test_ordered_rows_need_no_search(name):
    check_ordered(CASES[name])


@pytest.mark.parametrize("name", ["wrap", "longer_than_the_ring", "interleaved", "shuffled", "padded", "odd_rows"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_programs_does_not_matter(name, seed, shuffle):
    case = CASES[name]
    pools = case.pools("block")
    seen = shuffle(len(case.kv), seed)
    append_swa(case.kv, case.slots, case.positions, *pools.views)
    assert sorted(seen) == list(range(len(case.kv))) != seen
    compare(pools, expected(case, case.pools("block")))


def test_replay_writes_the_same_bytes():
    case = CASES["longer_than_the_ring"]
    pools = case.pools()
    for _ in range(2):
        append_swa(case.kv, case.slots, case.positions, *pools.views)
        compare(pools, expected(case, case.pools()))
