"""Run with TRITON_INTERPRET=1 in a process of its own (``test_triton.py`` does): the kernel on CPU tensors."""

import numpy as np
import pytest
from test_flatten_table import case
from triton.runtime import interpreter

from kvpagoda.core.kernels.dispatch import VARIABLE
from kvpagoda.core.kernels.flatten_table import flatten_table, flatten_table_kernel


@pytest.mark.parametrize("spare", [0, 5])
def test_same_as_slices(spare, monkeypatch):
    assert isinstance(flatten_table_kernel, interpreter.InterpretedFunction)
    monkeypatch.setenv(VARIABLE, "triton")
    random = np.random.default_rng(spare)
    for rows, columns, size in [(1, 1, 1), (5, 7, 4), (3, 2500, 16)]:
        *arguments, out, expected = case(random, rows, columns, size, spare)
        flatten_table(*arguments, out, size)
        assert out[: len(expected)].equal(expected) and (out[len(expected) :] == -7).all()
