"""The counters of tiers as vLLM's statistics: what was counted since they were last taken."""

from __future__ import annotations

from collections.abc import Sequence

from kvpagoda.tiers import LevelStats

COUNTED = {
    "stored": "records stored", "loaded": "records loaded", "missed": "records that were gone when they were read",
    "failed": "calls that were late, unavailable or corrupt", "dropped": "records that were not stored",
    "loaded_tokens": "tokens of prompts whose blocks were loaded",
}  # fmt: skip
"""Field of ``LevelStats`` -> what it counts."""
HELD = ("num_records", "nbytes", "capacity_nbytes")
"""Fields of ``LevelStats`` that say what a tier holds now."""

Figures = dict[str, dict[str, float]]
"""Name of a tier -> field -> number."""


def since(before: Figures, stats: Sequence[LevelStats]) -> tuple[Figures, Figures]:
    """Return what changed since ``before``, and the numbers now. Two tiers of one name are told apart by a number."""
    now: Figures = {}
    for index, one in enumerate(stats):
        name = one.name if one.name not in now else f"{one.name}{index}"
        now[name] = {field: float(getattr(one, field)) for field in (*COUNTED, *HELD)}
    changed = {
        name: {
            field: value - before.get(name, {}).get(field, 0.0) if field in COUNTED else value
            for field, value in fields.items()
        }
        for name, fields in now.items()
        if fields != before.get(name)
    }
    return changed, now


def added(first: Figures, second: Figures) -> Figures:
    """Return the sum of two lists of changes: of two intervals, or of two workers."""
    made = {name: dict(fields) for name, fields in first.items()}
    for name, fields in second.items():
        mine = made.setdefault(name, dict.fromkeys(fields, 0.0))
        for field, value in fields.items():
            mine[field] = value if field in HELD else mine.get(field, 0.0) + value
    return made
