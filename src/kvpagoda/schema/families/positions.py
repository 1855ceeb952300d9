"""How long a text of a model may be, by family. The functions are named in ``model_types.json``.

A limit is what the config itself names. Where it names none the answer is None: a default would be a guess.
"""

from __future__ import annotations

from kvpagoda.schema.config import Config


def named(c: Config) -> int | None:
    """``max_position_embeddings``, if the config has it. Raises SchemaError."""
    own = Config(c.raw, {}, c.fields)
    return None if own.get("max_position_embeddings") is None else own.size("max_position_embeddings")


def after_padding(c: Config) -> int | None:
    """Positions are counted from behind that of the padding token, in one table with it."""
    rows = named(c)
    return None if rows is None else rows - c.size("pad_token_id", 0) - 1
