"""Arguments of a cache given flat, for tests that vary one at a time."""

from dataclasses import fields
from typing import Any

from kvpagoda import Identity, Limits, Retention


def grouped(**flat: Any) -> dict[str, Any]:
    """Keyword arguments of ``KVCache`` in which fields of its values may be given by name."""
    arguments = dict(flat)
    for name, kind in (("retention", Retention), ("identity", Identity), ("limits", Limits)):
        given = {field.name: arguments.pop(field.name) for field in fields(kind) if field.name in arguments}
        if given:
            arguments[name] = kind(**given)
    return arguments
