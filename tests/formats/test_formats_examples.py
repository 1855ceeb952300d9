"""The examples in the docstrings of the room do what they say."""

from __future__ import annotations

import doctest

import pytest

from kvpagoda.formats import codec, encoding, quantise, small_floats, tensor_scale


@pytest.mark.parametrize(
    "module", [codec, encoding, quantise, small_floats, tensor_scale], ids=lambda module: module.__name__
)
def test_examples(module: object) -> None:
    failed, tried = doctest.testmod(module)  # type: ignore[arg-type]
    assert failed == 0 and tried
