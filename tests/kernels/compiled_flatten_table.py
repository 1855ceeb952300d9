"""Run in a process without TRITON_INTERPRET (``test_triton.py`` does): compile for GPUs that are not here."""

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpagoda.kernels.flatten_table import flatten_table_kernel


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles_and_spills_nothing(capability):
    names = flatten_table_kernel.arg_names
    kinds = {name: "i32" if name in ("stride", "block_size") else "*i32" for name in names}
    source = ASTSource(fn=flatten_table_kernel, signature={**kinds, "CELLS": "constexpr"}, constexprs={(6,): 1024})
    text = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4}).asm["ptx"]
    assert re.search(r"ld\.global", text) and re.search(r"st\.global", text)
    assert not re.search(r"\.local\b|__local_depot", text)
