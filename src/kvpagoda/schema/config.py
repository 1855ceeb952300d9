"""One model config, from a transformers object or from ``config.json``, with every size checked as it is read."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from types import MappingProxyType
from typing import Any

from kvpagoda.errors import SchemaError
from kvpagoda.loading import read_json

ALIASES: Mapping[str, list[str]] = read_json("kvpagoda.schema", "families/spellings.json")["aliases"]
"""Other names under which configs have the same field; with a dot, one in a table of the config."""

REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "decoder_layers", "decoder_attention_heads")
"""What every whole ``config.json`` says. A default would be a guess at which model it is."""


class Config:
    """The fields of one text model. ``defaults`` stand in for fields that are absent (not for those that are null).
    ``fields``: names that take the place of a field's own and its aliases."""

    def __init__(
        self,
        raw: Mapping[str, Any],
        defaults: Mapping[str, Any],
        fields: Mapping[str, list[str]] = MappingProxyType({}),
    ) -> None:
        self.raw, self.defaults, self.fields = raw, defaults, fields

    def get(self, name: str, default: Any = None) -> Any:
        """The field, else its default, else ``default``."""
        spellings = self.fields.get(name) or (name, *ALIASES.get(name, ()))
        for spelling in spellings:
            table, _, field = spelling.rpartition(".")
            fields = self.table(table) if table else self.raw
            if field in fields:
                return fields[field]
        return next((self.defaults[one] for one in spellings if one in self.defaults), default)

    def spelled(self, name: str) -> str:
        """What the config itself calls the field."""
        return self.fields.get(name, [name])[0]

    def size(self, name: str, at_least: int = 1) -> int:
        """A whole number of at least ``at_least``, as an int. Raises SchemaError, which names the field and its value."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
            found = "is missing" if value is None else f"is {value!r}"
            raise SchemaError(f"{self.spelled(name)} {found}; expected a whole number of at least {at_least}")
        return int(value)

    def size_or(self, name: str, other: int) -> int:
        """A whole number of at least 1, or ``other`` where the field is absent or null. Raises SchemaError."""
        return other if self.get(name) is None else self.size(name)

    def item(self, name: str, index: int) -> Any:
        """Entry ``index`` of a list or text with one entry a layer. Raises SchemaError."""
        value = self.get(name)
        if not isinstance(value, list | tuple | str) or len(value) <= index:
            raise SchemaError(f"{name} is {value!r}; expected one entry for every layer, layer {index} has none")
        return value[index]

    def table(self, name: str) -> Mapping[Any, Any]:
        """A mapping; absent and null are empty. Raises SchemaError."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise SchemaError(f"{name} is {value!r}; expected a table of names and values")
        return value or {}

    def replaced(self, **changes: Any) -> Config:
        """This config with ``changes`` on top."""
        return Config({**self.raw, **changes}, self.defaults, self.fields)

    def ratio(self, name: str, by: str) -> int:
        """``name`` divided by ``by``. Raises SchemaError if it does not divide evenly."""
        whole, parts = self.size(name), self.size(by)
        if whole % parts:
            raise SchemaError(f"{name} is {whole}; expected a multiple of {self.spelled(by)} = {parts}")
        return whole // parts

    def indices(self, name: str) -> frozenset[int]:
        """A list of layer indices; absent is empty. Raises SchemaError."""
        value = self.get(name) or []
        if not isinstance(value, list | tuple) or not all(isinstance(index, int) for index in value):
            raise SchemaError(f"{name} is {value!r}; expected a list of layer indices")
        return frozenset(value)

    def at(self, index: int) -> Config:
        """This config with what it says for layer ``index`` alone (``per_layer_config``) on top."""
        table = self.table("per_layer_config")
        by_index = {str(int(key)): own for key, own in table.items() if str(key).isdigit()}
        return self.replaced(**Config(by_index, {}).table(str(index)))


def fields_of(config: Any) -> Mapping[str, Any]:
    """All fields of a config: a mapping as it is, an object by its ``to_dict`` or its attributes. Raises SchemaError."""
    to_dict = getattr(config, "to_dict", None)
    fields = (
        config if isinstance(config, Mapping) else to_dict() if callable(to_dict) else getattr(config, "__dict__", None)
    )
    if not isinstance(fields, Mapping):
        raise SchemaError(f"a config is a mapping or an object with fields, got {type(config).__name__}")
    return fields
