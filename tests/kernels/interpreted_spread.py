"""Run with TRITON_INTERPRET=1 in a process of its own (``test_triton.py`` does): the kernel on CPU tensors."""

import pytest
from test_spread import LENGTHS, assert_spread
from triton.runtime import interpreter

from kvpagoda.core.kernels.dispatch import VARIABLE
from kvpagoda.core.kernels.spread import spread_kernel


@pytest.mark.parametrize("lengths", LENGTHS)
def test_same_words_as_the_reference(lengths, monkeypatch):
    assert isinstance(spread_kernel, interpreter.InterpretedFunction)
    monkeypatch.setenv(VARIABLE, "triton")
    for seed, many in enumerate((1, 2, 6)):
        assert_spread(seed, many, lengths)
