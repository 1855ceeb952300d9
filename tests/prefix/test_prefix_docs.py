"""The examples in the docstrings of the prefix room, and of the policies and ids below it, run and print what they show."""

import doctest
import importlib
import pkgutil

import numpy as np
import pytest

import kvpagoda.core.blocks
import kvpagoda.core.prefix
import kvpagoda.policies

MODULES = [
    "kvpagoda.abc",
    "kvpagoda.arrays",
    "kvpagoda.core.probe",
    "kvpagoda.free_list",
    *(
        info.name
        for room in (kvpagoda.core.blocks, kvpagoda.policies, kvpagoda.core.prefix)
        for info in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), extraglobs={"np": np})
    assert not failed


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    with_examples = {
        found.name.rpartition(".")[2]
        for name in MODULES
        for found in finder.find(importlib.import_module(name))
        if found.examples
    }
    assert {"PrefixTree", "EvictionPolicy", "LazyHeap", "Ring", "IdPool", "GhostIndex"} <= with_examples
