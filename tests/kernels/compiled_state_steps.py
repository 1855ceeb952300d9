"""Run in a process without TRITON_INTERPRET (``test_triton.py`` does): compile for GPUs that are not here."""

import re

import pytest
from ptx import ptx

from kvpagoda.core.kernels.state_steps import VALUES, delta_steps_kernel


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("by_key", [False, True])
def test_it_compiles_and_spills_nothing(capability, by_key):
    """With the head size of Qwen3-Next and Kimi-Linear: 128."""
    floats, ids = ("q", "k", "v", "g", "beta", "states", "out"), ("reads", "writes", "indptr")
    pointers = {**dict.fromkeys(floats, "*fp32"), **dict.fromkeys(ids, "*i32")}
    text = ptx(delta_steps_kernel, pointers, {"KEYS": 128, "VALUES": VALUES, "BY_KEY": by_key}, [], capability)
    assert re.search(r"ld\.global", text) and re.search(r"st\.global", text)
    assert not re.search(r"\.local\b|__local_depot", text)
