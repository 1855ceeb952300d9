"""``kv_indices`` from the block table: the reference against slices, and what is refused."""

import numpy as np
import pytest
import torch

from kvpagoda.core.kernels.flatten_table import flatten_table
from kvpagoda.errors import BadInput
from raises import raises


def case(random, rows, columns, size, spare=0):
    """A table as it may be in a step, and what the array is to hold."""
    end = random.integers(0, columns + 1, rows)
    first = random.integers(0, end + 1)
    table = torch.from_numpy(random.integers(1, 1 << 30, (rows, columns + 3)).astype(np.int32))[:, :columns]
    indptr = np.concatenate(([0], np.cumsum(end - first)))
    starts, pointers = (torch.from_numpy(column.astype(np.int32)) for column in (first * size, indptr))
    expected = torch.cat([row[left:right] for row, left, right in zip(table, first, end)])
    return table, starts, pointers, torch.full((int(indptr[-1]) + spare,), -7, dtype=torch.int32), expected


@pytest.mark.parametrize("spare", [0, 5])
def test_rows_lie_behind_each_other(spare):
    random = np.random.default_rng(spare)
    for rows, columns, size in [(1, 1, 1), (5, 7, 4), (64, 3, 16), (3, 2500, 16)]:
        *arguments, out, expected = case(random, rows, columns, size, spare)
        flatten_table(*arguments, out, size)
        assert out[: len(expected)].equal(expected)


def test_what_it_does_not_take():
    table, starts, indptr, out, _ = case(np.random.default_rng(0), 4, 6, 2)
    for arguments, figures in [
        ((table.long(), starts, indptr, out, 2), {"field": "table", "needed": [4, 6], "available": [4, 6]}),
        ((table, starts[:3], indptr, out, 2), {"field": "starts", "needed": [4], "available": [3]}),
        ((table, starts, indptr[1:], out, 2), {"field": "indptr", "needed": [5], "available": [4]}),
        ((table, starts, indptr, out.float(), 2), {"field": "out", "needed": [12], "available": [12]}),
        ((table[:, ::2], starts, indptr, out, 2), {"needed": (9, 2), "available": 2}),
        ((table, starts, indptr, out, 0), {"needed": (9, 1), "available": 0}),
    ]:
        with raises(BadInput, **figures):
            flatten_table(*arguments)
    assert (out == -7).all()
