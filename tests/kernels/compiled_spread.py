"""Run in a process without TRITON_INTERPRET (``test_triton.py`` does): compile for GPUs that are not here."""

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpagoda.core.kernels.spread import WORDS, spread_kernel


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles_and_spills_nothing(capability):
    signature = {"runs": "*i64", "staged": "*i32", "begin": "i32", "WORDS": "constexpr"}
    source = ASTSource(fn=spread_kernel, signature=signature, constexprs={(3,): WORDS})
    text = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4}).asm["ptx"]
    assert len(re.findall(r"ld\.global\S*\.b32", text)) == len(re.findall(r"st\.global\S*\.b32", text)) == WORDS // 128
    assert not re.search(r"\.local\b|__local_depot", text)


def test_every_step_takes_the_same_kernel():
    """The number of runs, which differs from step to step, must not be compiled into it."""
    assert [one.name for one in spread_kernel.params if one.do_not_specialize] == ["begin"]
