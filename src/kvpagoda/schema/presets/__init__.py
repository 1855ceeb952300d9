"""Configs of public models by name, for plans without a download: ``models.json``, one entry a model.

``hub``: where the model lies on the Hugging Face hub. ``config``: of its ``config.json`` there, the fields that decide what
is cached and how long a text may be.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kvpagoda.loading import read_json


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Name -> {"hub": .., "config": ..}. To be read, not changed."""
    return read_json(__name__, "models.json")


def find_preset(name: str) -> tuple[str, dict[str, Any]] | None:
    """(preset name, config) for a preset's name, or its name on the hub, in any case; None for another name.

    >>> find_preset("Qwen/Qwen3-8B")[0], find_preset("qwen3-8b")[1]["num_key_value_heads"], find_preset("qwen")
    ('qwen3-8b', 8, None)
    """
    for preset, entry in presets().items():
        if name.lower() in (preset, entry["hub"].lower()):
            return preset, entry["config"]
    return None
