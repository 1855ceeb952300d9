"""The examples in the docstrings of the room do what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["axes", "judge", "layout", "named", "packed", "pages"])
def test_examples(name):
    failed, tried = doctest.testmod(importlib.import_module(f"kvpagoda.layouts.{name}"))
    assert failed == 0 and tried
