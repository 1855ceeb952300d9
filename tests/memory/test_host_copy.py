"""Rows are copied to host memory and back: rows of the host table of any width, both orders, shared memory."""

import numpy as np
import pytest
import torch

from kvpagoda.core.memory.arena import Arena
from kvpagoda.core.memory.host_copy import copy_from_host, copy_to_host
from kvpagoda.schema import Field, RowLayout
from kvpagoda.units import table_rows
from records import records_of


def layout() -> RowLayout:
    fields = [Field("k", 3, (5,), "float16"), Field("v", 2, (7,), "uint8")]
    made = RowLayout.build((layer, field) for layer in range(2) for field in fields)
    assert made.nbytes % 8 == 0
    return made


def arena(order: str, shared: bool) -> Arena:
    """Return an arena of 40 rows; ``shared``: as a part of a larger buffer."""
    made = layout()
    within = (torch.zeros(40 * (made.nbytes + 64), dtype=torch.uint8), made.nbytes + 64) if shared else None
    return Arena(made, 40, device="cpu", order=None if shared else order, within=within)


@pytest.mark.parametrize("width_of_record", [0.26, 0.5, 1, 1.5, 2, 3.2])
@pytest.mark.parametrize("order, shared", [("block", False), ("layer", False), ("block", True)])
def test_rows_copied_to_the_host_are_copied_back_elsewhere_bit_for_bit(
    width_of_record: float, order: str, shared: bool
) -> None:
    source, target, random = arena(order, shared), arena(order, shared), np.random.default_rng(1)
    nbytes = source.layout.nbytes
    width = max(1, int(nbytes * width_of_record))
    for one in (source, target):
        one.buffer[:] = torch.from_numpy(random.integers(0, 256, one.nbytes, np.uint8))
    before = records_of(target, range(40))
    for n in (0, 1, 2, 7, 20):
        out, into = (random.permutation(40)[:n].astype(np.int32) for _ in range(2))
        rows = random.permutation(100)[: table_rows(n, nbytes, width)].tolist()
        table = torch.from_numpy(random.integers(0, 256, (100, width + 9), np.uint8))[:, 4 : 4 + width]
        others = np.setdiff1d(np.arange(100), rows)
        untouched = table[others].clone()
        copy_to_host(source, out, table, rows)
        assert torch.equal(table[others], untouched)
        copy_from_host(target, into, table, rows)
        before[into] = records_of(source, out)
        assert torch.equal(records_of(target, range(40)), before)


def test_records_are_stored_in_rows_unchanged() -> None:
    """A row holds two narrow records, or a piece of a wide record: other readers of the table may rely on this."""
    source = arena("layer", False)
    nbytes = source.layout.nbytes
    source.buffer[:] = torch.randint(0, 256, (source.nbytes,), dtype=torch.uint8)
    records = records_of(source, [3, 9, 4])
    pairs = torch.zeros((2, 2 * nbytes), dtype=torch.uint8)
    copy_to_host(source, np.array([3, 9, 4]), pairs, [1, 0])
    assert torch.equal(pairs[1], records[:2].flatten()) and torch.equal(pairs[0, :nbytes], records[2])
    pieces = torch.zeros((3, nbytes - 10), dtype=torch.uint8)
    copy_to_host(source, np.array([9]), pieces, [2, 0])
    assert torch.equal(torch.cat((pieces[2], pieces[0, :10])), records[1])
