"""A validator for the part of JSON Schema that ``docs/json`` uses, so that the tests need no package for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "json"
TYPES = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    "null": type(None),
}  # fmt: skip
KNOWN = {
    "$schema", "title", "type", "required", "properties", "additionalProperties", "items", "minItems", "enum", "anyOf",
    "minimum", "maximum",
}  # fmt: skip


def schema_of(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def violations(value: Any, schema: Any, where: str = "$") -> list[str]:
    """Return a sentence for each part of ``value`` that breaks ``schema``. ``where``: the path of ``value``."""
    assert schema.keys() <= KNOWN, f"{where}: {schema.keys() - KNOWN} is not looked at here"
    if "anyOf" in schema:
        return (
            []
            if any(not violations(value, item) for item in schema["anyOf"])
            else [f"{where} is {value!r}: none of anyOf"]
        )
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{where} is {value!r}, not one of {schema['enum']}")
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, TYPES[kind]) or isinstance(value, bool) != (kind == "boolean")):
        return [*found, f"{where} is {value!r}, not of type {kind}"]
    if kind in ("integer", "number") and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        found.append(f"{where} is {value!r}, out of range")
    if kind == "array":
        if len(value) < schema.get("minItems", 0):
            found.append(f"{where} has {len(value)} items")
        found += [
            text for i, item in enumerate(value) for text in violations(item, schema.get("items", {}), f"{where}[{i}]")
        ]
    if kind == "object":
        named, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        found += [f"{where} has no {name!r}" for name in schema.get("required", ()) if name not in value]
        for name, item in value.items():
            if name not in named and others is False:
                found.append(f"{where} has {name!r}, which is not described")
            else:
                found += violations(item, named.get(name, others or {}), f"{where}.{name}")
    return found
