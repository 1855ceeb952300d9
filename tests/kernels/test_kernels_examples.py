"""The examples in the docstrings of the room do what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest

from kvpagoda.core.kernels.dispatch import VARIABLE


@pytest.mark.parametrize(
    "name", ["append_swa", "copy_rows", "dispatch", "flatten_table", "packed_rows", "scaled_rows", "state_steps"]
)
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    failed, tried = doctest.testmod(importlib.import_module(f"kvpagoda.core.kernels.{name}"))
    assert failed == 0 and tried
