"""Run with TRITON_INTERPRET=1 in a process of its own (``test_triton.py`` does): copies to the host and back by the kernel."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from kvpagoda.core.kernels.dispatch import VARIABLE
from kvpagoda.core.memory import host_copy
from kvpagoda.core.memory.arena import Arena
from kvpagoda.core.memory.host_copy import HostCopies
from kvpagoda.core.memory.page_locks import PageLocks
from kvpagoda.pages import pages
from kvpagoda.schema import Field, RowLayout
from kvpagoda.units import table_rows
from records import records_of
from streams import FakePages, FakeStreams

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
FIELDS = [Field("k", 3, (8,), "float16"), Field("v", 2, (40,), "uint8")]
LAYOUT = RowLayout.build((layer, field) for layer in range(3) for field in FIELDS)


def arena(order, shared, seed):
    within = (torch.zeros(20 * (LAYOUT.nbytes + 64), dtype=torch.uint8), LAYOUT.nbytes + 64) if shared else None
    made = Arena(LAYOUT, 20, device="cpu", order=None if shared else order, within=within)
    made.buffer[:] = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, made.nbytes, np.uint8))
    return made


@pytest.mark.parametrize("width_of_record", [0.3, 1, 2.3])
@pytest.mark.parametrize("order, shared", [("block", False), ("layer", False), ("block", True)])
@pytest.mark.parametrize("stage", [0, 1 << 20])
def test_bytes_are_those_of_the_reference(width_of_record, order, shared, stage, monkeypatch):
    """Through a stage and without one, whatever the widths; one launch for all regions of all blocks."""
    launches, launch = [], host_copy.copy_regions
    monkeypatch.setattr(host_copy, "copy_regions", lambda *given: launches.append(given) or launch(*given))
    monkeypatch.setattr(host_copy, "_STAGE_NBYTES", stage)
    source, target, random = arena(order, shared, 1), arena(order, shared, 2), np.random.default_rng(3)
    width, locks = int(LAYOUT.nbytes * width_of_record), PageLocks(FakePages(), 1 << 60)
    table = pages(50 * (width + 8)).reshape(50, width + 8)[:, 4 : 4 + width]
    locks.watch(table)
    locks.settle()
    copies, before = HostCopies(torch.device("cpu"), locks, FakeStreams(is_late=False)), records_of(target, range(20))
    for n in (1, 7):
        out, into = (random.permutation(20)[:n].astype(np.int32) for _ in range(2))
        rows = random.permutation(50)[: table_rows(n, LAYOUT.nbytes, width)].tolist()
        others = np.setdiff1d(np.arange(50), rows)
        untouched, before[into] = table[others].copy(), records_of(source, out)
        del launches[:]
        with monkeypatch.context() as kernel:
            kernel.setenv(VARIABLE, "triton")
            copies.out(source, out, table, rows)
            copies.into(target, into, table, rows)
        assert len(launches) == (3 if stage else 2), "the stage takes one more"
        assert np.array_equal(table[others], untouched) and torch.equal(records_of(target, range(20)), before)


@pytest.mark.parametrize("order", ["block", "layer"])
def test_layers_one_by_one(order, monkeypatch):
    source, target = arena(order, False, 1), arena(order, False, 2)
    table, locks = pages(20 * LAYOUT.nbytes).reshape(20, -1), PageLocks(FakePages(), 1 << 60)
    locks.watch(table)
    locks.settle()
    copies = HostCopies(torch.device("cpu"), locks, FakeStreams(is_late=False))
    monkeypatch.setenv(VARIABLE, "triton")
    copies.out(source, np.array([3, 1, 4]), table, [7, 2, 5])
    before = [records_of(target, range(20))]
    for layer in range(3):
        copies.into(target, np.array([8, 9, 2]), table, [7, 2, 5], layer)
        before.append(records_of(target, range(20)))
    assert torch.equal(before[-1][[8, 9, 2]], records_of(source, [3, 1, 4]))
    assert all((a != b).any() for a, b in pairwise(before)), "each layer brings bytes of its own"


@pytest.mark.parametrize("order", ["block", "layer"])
def test_what_is_compiled_ahead_is_what_copies_launch_and_moves_nothing(order, monkeypatch):
    """Of each launch all that Triton compiles for: the width and the number of the words."""
    shapes, launch = [], host_copy.copy_regions
    monkeypatch.setattr(host_copy, "copy_regions", lambda *given: shapes.append(given[0][1:]) or launch(*given))
    one = arena(order, False, 1)
    table, locks = pages(20 * LAYOUT.nbytes).reshape(20, -1), PageLocks(FakePages(), 1 << 60)
    locks.watch(table)
    locks.settle()
    copies, before = HostCopies(torch.device("cpu"), locks, FakeStreams(is_late=False)), records_of(one, range(20))
    monkeypatch.setenv(VARIABLE, "triton")
    copies.warm_up(one)
    assert torch.equal(records_of(one, range(20)), before)
    ahead = {*shapes}
    copies.out(one, np.array([3, 1]), table, [7, 2])
    copies.into(one, np.array([8, 9]), table, [7, 2])
    copies.into(one, np.array([8, 9]), table, [7, 2], 1)
    assert {*shapes} == ahead and len(ahead) > 1
