"""Every public class and function of the faces shows how it is used, and the examples run."""

import doctest
from importlib import import_module

import pytest

import kvpagoda
from kvpagoda.compat import NAMES

FILES = sorted(file for file in NAMES if file.startswith("kvpagoda.compat."))
SHOWN_ELSEWHERE = {"dequantize_entries", "dequantize_swa"}  # with the views that they read


@pytest.mark.parametrize("file", FILES)
def test_examples_run(file: str) -> None:
    module, run = import_module(file), 0
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(module):
        run += len(test.examples)
        runner.run(test)
    assert run and not runner.failures


@pytest.mark.parametrize("name", [name for names in NAMES.values() for name in names])
def test_every_public_name_has_an_example(name: str) -> None:
    examples = doctest.DocTestParser().get_examples(getattr(kvpagoda, name).__doc__)
    assert examples or name in SHOWN_ELSEWHERE
