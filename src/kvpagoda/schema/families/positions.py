"""Rules for the longest context of a model, in tokens. ``model_types.json`` names these functions.

The limit is what the config itself names, else None: a default would be a guess.
"""

from __future__ import annotations

from kvpagoda.schema.config import Config


def named(c: Config) -> int | None:
    """Return ``max_position_embeddings``, or None if the config has no such field. Raises SchemaError."""
    own = Config(c.raw, {}, c.fields)
    return None if own.get("max_position_embeddings") is None else own.size("max_position_embeddings")


def after_padding(c: Config) -> int | None:
    """Return ``max_position_embeddings`` less ``pad_token_id + 1``: positions start after that of the padding token."""
    rows = named(c)
    return None if rows is None else rows - c.size("pad_token_id", 0) - 1
