"""Configs of public models by name, for plans without a download: ``models.json``, one entry a model.

``hub``: where the model lies on the Hugging Face hub. ``config``: of its ``config.json`` there, the fields that decide what
is cached and how long a text may be.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Name -> {"hub": .., "config": ..}. To be read, not changed."""
    found: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text())
    return found


def find_preset(name: str) -> tuple[str, dict[str, Any]] | None:
    """(preset name, config) for a preset's name, or its name on the hub, in any case; None for another name.

    >>> find_preset("Qwen/Qwen3-8B")[0], find_preset("qwen3-8b")[1]["num_key_value_heads"], find_preset("qwen")
    ('qwen3-8b', 8, None)
    """
    for preset, entry in presets().items():
        if name.lower() in (preset, entry["hub"].lower()):
            return preset, entry["config"]
    return None
