"""Run with TRITON_INTERPRET=1 in a process of its own (``test_triton.py`` does): the kernel on CPU tensors."""

import importlib

import pytest
import torch
from programs import interpret, quiet
from ring_cases import CASES, check_ordered, compare, expected, expected_heads

from kvpagoda.core.kernels import append_swa
from kvpagoda.core.kernels.dispatch import VARIABLE

module = importlib.import_module("kvpagoda.core.kernels.append_swa")


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    with quiet():
        yield interpret(monkeypatch, module.append_swa_kernel)


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
@pytest.mark.parametrize("is_large", [False, True])
def test_rows_of_one_ring_in_one_program_and_in_several(name, is_large, ran, monkeypatch):
    monkeypatch.setattr(module, "LARGE", 0 if is_large else 1 << 60)
    case = CASES[name]
    pools = case.pools("block")
    append_swa(case.kv, case.slots, case.positions, *pools.views)
    compare(pools, expected(case, case.pools("block")))
    assert len(ran) <= 2 if is_large else sorted(ran) == list(range(len(ran))) != ran


def test_replay_writes_the_same_bytes():
    case = CASES["longer_than_the_ring"]
    pools = case.pools()
    for _ in range(2):
        append_swa(case.kv, case.slots, case.positions, *pools.views)
        compare(pools, expected(case, case.pools()))
