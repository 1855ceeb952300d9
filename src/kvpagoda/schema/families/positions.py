"""How long a text of a model may be, by family. The functions are named in ``model_types.json``.

A limit is what the config itself names. Where it names none the answer is None: a default would be a guess.
"""

from __future__ import annotations

from kvpagoda.schema.config import Config


def named(c: Config, field: str = "max_position_embeddings") -> int | None:
    """``field``, if the config has it. Raises SchemaError."""
    own = Config(c.raw, {})
    return None if own.get(field) is None else own.size(field)


def after_padding(c: Config) -> int | None:
    """Positions are counted from behind that of the padding token, in one table with it."""
    rows = named(c)
    return None if rows is None else rows - c.size("pad_token_id", 0) - 1


def target(c: Config) -> int | None:
    return named(c, "max_target_positions")
