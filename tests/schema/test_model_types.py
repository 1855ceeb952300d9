"""The data file of model types: its rows name fields and rules that exist, and no rule is left over."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import fields
from importlib.resources import files
from typing import Any

import pytest

from kvpagoda.schema.families import RULES, Family, heads, layer_types, model_types, read_family, states

TABLE = json.loads(files("kvpagoda.schema.families").joinpath("model_types.json").read_text("utf-8"))
SERVED = json.loads(files("kvpagoda.schema.families").joinpath("served_types.json").read_text("utf-8"))
ENCODERS = json.loads(files("kvpagoda.schema.families").joinpath("encoder_decoders.json").read_text("utf-8"))
ROWS = {**TABLE["model_types"], **SERVED["model_types"], **ENCODERS["model_types"]}
FAMILIES = {**TABLE["families"], **ENCODERS["families"]}
INLINE = {name: row["family"] for name, row in ROWS.items() if not isinstance(row["family"], str)}
SPELLED = {**FAMILIES, **INLINE}
PARTS = {"conv", "delta", "recurrent", "inner_channels", "has_rope", "_blocks_of_a_layer"}
"""Functions that rules are made of."""


def rules_of(family: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(field, name of the function) of every rule of a family."""
    for field, given in family.items():
        if field in RULES:
            yield field, given if isinstance(given, str) else next(iter(given))


def test_the_file_says_where_its_figures_come_from() -> None:
    for table in (TABLE, ENCODERS):
        assert table["source"].startswith("transformers ")
        assert table["about"]


def test_rows_are_sorted_and_have_a_family_and_defaults() -> None:
    for table in (TABLE, SERVED, ENCODERS):
        assert list(table["model_types"]) == sorted(table["model_types"])
    assert len(ROWS) == sum(len(table["model_types"]) for table in (TABLE, SERVED, ENCODERS))
    for name, row in ROWS.items():
        assert row.keys() - {"remark"} == {"family", "defaults"}, name
        assert all(type(value) in (int, float, str, bool, list) for value in row["defaults"].values()), name
        assert isinstance(row["family"], dict) or row["family"] in FAMILIES, name


def test_a_family_that_has_a_name_is_used_by_several_model_types() -> None:
    used = [row["family"] for row in ROWS.values() if isinstance(row["family"], str)]
    assert {name: used.count(name) >= 2 for name in FAMILIES} == dict.fromkeys(FAMILIES, True)


@pytest.mark.parametrize("name", SPELLED)
def test_every_field_of_a_family_is_known(name: str) -> None:
    assert SPELLED[name].keys() <= {field.name for field in fields(Family)}
    assert isinstance(read_family(SPELLED[name]), Family)


def test_every_rule_is_used() -> None:
    named = {rule for family in SPELLED.values() for _, rule in rules_of(family)}
    defaults = {field.default.__name__ for field in fields(Family) if inspect.isfunction(field.default)}
    for module in (layer_types, heads, states):
        functions = {name for name, value in vars(module).items() if inspect.isfunction(value)}
        own = {name for name in functions if getattr(module, name).__module__ == module.__name__}
        assert own - PARTS <= named | defaults, module.__name__


def test_model_types_are_read_once_and_only_when_asked_for() -> None:
    assert model_types() is model_types()
    with pytest.raises(AttributeError, match="no_such_rule"):
        read_family({"heads": "no_such_rule"})
