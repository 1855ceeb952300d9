"""Read the fields of one model config (a transformers object or ``config.json``) and check every size as it is read."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from types import MappingProxyType
from typing import Any

from kvpagoda.errors import SchemaError, shown
from kvpagoda.loading import read_json

ALIASES: Mapping[str, list[str]] = read_json("kvpagoda.schema", "families/spellings.json")["aliases"]
"""Field name -> other names of it in configs. ``"a.b"``: field ``b`` of the config's table ``a``."""

REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "decoder_layers", "decoder_attention_heads")
"""Fields that every complete ``config.json`` names. A default would be a guess of the model's size."""

MOST = 2**31
"""Positions, tokens and rows are counted in int32: no size of a model is as large."""


class Config:
    """The fields of one text model's config, read by name.

    ``raw``: the fields as the config has them. ``defaults``: values for fields that are absent (a field that is null
    stays null). ``fields``: field name -> the names to look for instead of the field's own name and its aliases.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        defaults: Mapping[str, Any],
        fields: Mapping[str, list[str]] = MappingProxyType({}),
    ) -> None:
        self.raw, self.defaults, self.fields = raw, defaults, fields

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of field ``name``; if it is absent, its entry in ``defaults``; else ``default``."""
        spellings = self.fields.get(name) or (name, *ALIASES.get(name, ()))
        for spelling in spellings:
            table, _, field = spelling.rpartition(".")
            fields = self.table(table) if table else self.raw
            if field in fields:
                return fields[field]
        return next((self.defaults[key] for key in spellings if key in self.defaults), default)

    def spelled(self, name: str) -> str:
        """Return the name under which this config has field ``name``, for error messages."""
        return self.fields.get(name, [name])[0]

    def size(self, name: str, at_least: int = 1) -> int:
        """Return field ``name`` as an int of at least ``at_least``. Raises SchemaError with the field and its value."""
        value = self.get(name)
        number = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
        if number is None or not at_least <= number < MOST:
            found = "is missing" if value is None else f"is {shown(value)}"
            large = ", below 2^31" if number is not None and number >= MOST else ""
            text = f"{self.spelled(name)} {found}; expected a whole number of at least {at_least}{large}"
            raise SchemaError(text, field=self.spelled(name), needed=value, available=at_least)
        return number

    def size_or(self, name: str, other: int) -> int:
        """Return field ``name`` as an int of at least 1, or ``other`` if it is absent or null. Raises SchemaError."""
        return other if self.get(name) is None else self.size(name)

    def item(self, name: str, index: int) -> Any:
        """Return entry ``index`` of field ``name``, a list or string with one entry per layer. Raises SchemaError."""
        value = self.get(name)
        if not isinstance(value, list | tuple | str) or len(value) <= index:
            raise SchemaError(
                f"{name} is {shown(value)}; expected one entry for every layer, layer {index} has none",
                field=name, needed=index, available=len(value) if hasattr(value, "__len__") else None,
            )  # fmt: skip
        return value[index]

    def size_of(self, name: str, index: int) -> int:
        """Return entry ``index`` of field ``name`` as an int of at least 1. Raises SchemaError."""
        return self.replaced(**{name: self.item(name, index)}).size(name)

    def table(self, name: str) -> Mapping[Any, Any]:
        """Return field ``name``, which is a mapping; an absent or null field gives an empty one. Raises SchemaError."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            text = f"{name} is {shown(value)}; expected a table of names and values"
            raise SchemaError(text, field=name, needed=value)
        return value or {}

    def replaced(self, **changes: Any) -> Config:
        """Return a copy of this config in which ``changes`` replace or add fields."""
        return Config({**self.raw, **changes}, self.defaults, self.fields)

    def ratio(self, name: str, by: str) -> int:
        """Return field ``name`` divided by field ``by``. Raises SchemaError if it does not divide evenly."""
        whole, parts = self.size(name), self.size(by)
        if whole % parts:
            text = f"{name} is {whole}; expected a multiple of {self.spelled(by)} = {parts}"
            raise SchemaError(text, field=name, needed=whole, available=parts)
        return whole // parts

    def indices(self, name: str) -> frozenset[int]:
        """Return field ``name``, a list of layer indices, as a set; absent or null is empty. Raises SchemaError."""
        value = self.get(name) or []
        if not isinstance(value, list | tuple) or not all(isinstance(index, int) for index in value):
            raise SchemaError(f"{name} is {shown(value)}; expected a list of layer indices", field=name, needed=value)
        return frozenset(value)

    def at(self, index: int) -> Config:
        """Return the config of layer ``index``: this one, updated with the layer's entry in ``per_layer_config``."""
        table = self.table("per_layer_config")
        by_index = {str(int(key)): fields for key, fields in table.items() if str(key).isdigit()}
        return self.replaced(**Config(by_index, {}).table(str(index)))


def fields_of(config: Any) -> Mapping[str, Any]:
    """Return the fields of ``config``: a mapping, or an object's ``to_dict()`` or attributes. Raises SchemaError."""
    to_dict = getattr(config, "to_dict", None)
    fields = (
        config if isinstance(config, Mapping) else to_dict() if callable(to_dict) else getattr(config, "__dict__", None)
    )
    if not isinstance(fields, Mapping):
        text = f"a config is a mapping or an object with fields, got {shown(config)}"
        raise SchemaError(text, needed=type(config).__name__)
    return fields
