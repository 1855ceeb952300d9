"""Configs of public models by name, for plans without a download. The table is ``models.json``, one entry per model.

``hub``: the name of the model on the Hugging Face hub. ``config``: the fields of its ``config.json`` that decide what
is cached and how long a context may be. ``unverified``: why no engine could be asked what the model keeps.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kvpagoda.loading import read_json


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Return preset name -> {"hub": .., "config": ..}. The result is cached and shared: do not change it."""
    return read_json(__name__, "models.json")


def find_preset(name: str) -> tuple[str, dict[str, Any]] | None:
    """Return (preset name, config) for the name of a preset or its name on the hub, in any case; None if unknown.

    >>> find_preset("Qwen/Qwen3-8B")[0], find_preset("qwen3-8b")[1]["num_key_value_heads"], find_preset("qwen")
    ('qwen3-8b', 8, None)
    """
    for preset, entry in presets().items():
        if name.lower() in (preset, entry["hub"].lower()):
            return preset, entry["config"]
    return None
