"""The examples in the docstrings of the room do what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import kvpagoda.schema as room

MODULES = [found.name for found in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")]
WITH_EXAMPLES = {
    "fields",
    "kv_format",
    "row_formats",
    "kinds",
    "layers",
    "layout",
    "plan",
    "schema",
    "sectors",
    "families",
}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert failed == 0
    assert tried or name.rpartition(".")[2] not in WITH_EXAMPLES


def test_the_public_classes_have_an_example() -> None:
    for public in (
        room.Schema, room.Plan, room.Layer, room.Attention, room.Latent, room.Recurrent, room.Shared, room.Compressed,
        room.Rows, room.Encoding, room.Growth, room.RowLayout,
    ):  # fmt: skip
        assert ">>>" in str(public.__doc__), public
