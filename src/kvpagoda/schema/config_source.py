"""Configs by path or by name: a ``config.json``, a folder that holds one, or a preset."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike, fspath
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

from kvpagoda.errors import BadInput, SchemaError, did_you_mean, shown
from kvpagoda.schema.kv_scheme import BESIDE, TABLES
from kvpagoda.schema.presets import find_preset, presets
from kvpagoda.text import json_of, text_in


def config_named(source: str | PathLike[str], others: Iterable[str] = ()) -> tuple[str | None, dict[str, Any]]:
    """Return the config at the path ``source``, or of the preset with this name or hub name, and the name of the preset.

    A ``config.json`` without ``quantization_config`` has that of the ``hf_quant_config.json`` beside it, if there is one.
    ``others``: more names, for the suggestion of the error. Raises SchemaError, which says how to get a config.
    """
    name = fspath(source)
    path = Path(name) / "config.json" if isdir(name) else Path(name)
    if isfile(path):
        data = _json_object(path)
        if data.get(TABLES[0]) is None and path.name == "config.json" and isfile(path.with_name(BESIDE)):
            data[TABLES[0]] = _json_object(path.with_name(BESIDE))
        return None, data
    if (found := find_preset(name)) is not None:
        return found
    if name.count("/") == 1 and not name.startswith((".", "/")) and not name.endswith(".json"):
        raise SchemaError(
            f"no config at {shown(name)}, and no preset is of that model; if it is on the Hugging Face hub, get its config "
            f"with 'hf download {name} config.json' and give the path that this prints",
            needed=name,
        )
    hint = did_you_mean(name, [*others, *presets()])
    raise SchemaError(
        f"no config at {shown(name)}; give a config.json, a folder that holds one, or a preset ('kvpagoda plan --presets' "
        f"lists them{'; ' + hint if hint else ''})", hint=hint, needed=name,
    )  # fmt: skip


def _json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file ``path``. Raises SchemaError."""
    try:
        data = json_of(text_in(path), f"{path} is ")
    except BadInput as error:
        raise SchemaError(str(error), needed=str(path)) from None
    if not isinstance(data, dict):
        raise SchemaError(f"{path} must hold a JSON object, got {type(data).__name__}", needed=type(data).__name__)
    return data
