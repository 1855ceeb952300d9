"""Run in a process without TRITON_INTERPRET (``test_triton.py`` does): compile for GPUs that are not here."""

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpagoda.kernels.state_steps import VALUES, delta_steps_kernel


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("by_key", [False, True])
def test_it_compiles_and_spills_nothing(capability, by_key):
    """With the head size of Qwen3-Next and Kimi-Linear: 128."""
    names = delta_steps_kernel.arg_names
    floats, ids = {"q", "k", "v", "g", "beta", "states", "out"}, {"reads", "writes", "indptr"}
    kinds = {name: "*fp32" if name in floats else "*i32" if name in ids else "i32" for name in names}
    constants = {"KEYS": 128, "VALUES": VALUES, "BY_KEY": by_key}
    source = ASTSource(
        fn=delta_steps_kernel,
        signature={**kinds, **dict.fromkeys(constants, "constexpr")},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    text = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4}).asm["ptx"]
    assert re.search(r"ld\.global", text) and re.search(r"st\.global", text)
    assert not re.search(r"\.local\b|__local_depot", text)
