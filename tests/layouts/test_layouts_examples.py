"""The examples in the docstrings of the room do what they say."""

import doctest

import pytest

from kvpagoda.layouts import judge


@pytest.mark.parametrize("name", ["judge"])
def test_examples(name):
    import importlib

    failed, tried = doctest.testmod(importlib.import_module(f"{judge.__module__.rpartition('.')[0]}.{name}"))
    assert failed == 0 and tried
