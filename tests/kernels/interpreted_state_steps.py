"""Run with TRITON_INTERPRET=1 in a process of its own (``test_triton.py`` does): the kernel on CPU tensors."""

import numpy as np
import pytest
import torch
from test_state_steps import COUNTS, inputs, pool
from triton.runtime import interpreter

from kvpagoda.core.kernels.dispatch import VARIABLE
from kvpagoda.core.kernels.state_steps import delta_steps, delta_steps_kernel


@pytest.mark.parametrize("order", ["dense", "strided"])
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("places", [1, 4])
def test_same_as_the_reference(places, by_key, order, monkeypatch):
    assert isinstance(delta_steps_kernel, interpreter.InterpretedFunction)
    random, found = np.random.default_rng(places), []
    given = inputs(random, sum(COUNTS), by_key=by_key)["delta"]
    table = torch.from_numpy(random.permutation(np.arange(1, 40))[: len(COUNTS) * places].reshape(-1, places)).int()
    states, ends = pool("delta", 41, random, order), torch.tensor([0, *np.cumsum(COUNTS)]).int()
    for name in ("reference", "triton"):
        monkeypatch.setenv(VARIABLE, name)
        own = states.clone(memory_format=torch.preserve_format)
        found.append((delta_steps(*given, own, table[:, -1], table, ends), own))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    others = torch.ones(41, dtype=torch.bool)
    others[table.long().flatten()] = False
    assert torch.equal(found[1][1][others], states[others])
