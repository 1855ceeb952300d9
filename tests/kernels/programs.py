"""Kernels in Triton's interpreter: programs in any order, each with few or with many vectors."""

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from kvpagoda.core.kernels import launch, packed_rows, scaled_rows
from kvpagoda.core.kernels.dispatch import VARIABLE

for bits in (4, 8):
    launch.ELEMENTS[bits, False] = 256  # so that the few rows of tests are several programs
SIZES = pytest.mark.parametrize("is_large", [False, True], ids=["few", "many"])


def interpret(monkeypatch, kernel):
    """Let operations run ``kernel`` on CPU tensors, its programs in a random order. Return the list of the ids that ran.

    The interpreter runs programs ascending, so each gets another's id. NaN and inf may be among the rows.
    """
    assert isinstance(kernel, interpreter.InterpretedFunction)
    monkeypatch.setenv(VARIABLE, "triton")
    builder = interpreter.interpreter_builder
    set_grid_idx, set_grid_dim = builder.set_grid_idx, builder.set_grid_dim
    order, ran = [], []

    def sized(x, y, z):
        order[:] = torch.randperm(x, generator=torch.Generator().manual_seed(x)).tolist()
        if x > 1 and order == sorted(order):
            order.reverse()
        set_grid_dim(x, y, z)

    def permuted(x, y, z):
        ran.append(order[x])
        set_grid_idx(order[x], y, z)

    monkeypatch.setattr(builder, "set_grid_dim", sized)
    monkeypatch.setattr(builder, "set_grid_idx", permuted)
    return ran


def quiet():
    return np.errstate(all="ignore")


def sized(monkeypatch, is_large):
    """Let launches be large, or not, whatever the rows."""
    for module in (packed_rows, scaled_rows):
        monkeypatch.setattr(module, "LARGE", 0 if is_large else 1 << 60)
