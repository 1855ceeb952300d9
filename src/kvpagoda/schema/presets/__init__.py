"""Models by name. Beside ``families`` the only place in the library where models have names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvpagoda.errors import BadInput
from kvpagoda.schema.fields import MXFP4, RAW
from kvpagoda.schema.presets.deepseek_v4 import FP8_UE8M0, DSV4Config
from kvpagoda.schema.schema import Schema


def schema_in(config: DSV4Config, kv_format: str) -> Schema:
    """``config``'s schema with rows in ``kv_format``. Raises BadInput."""
    if kv_format not in ("raw", "fp8"):
        raise BadInput(f"kv_format is 'raw' or 'fp8', got {kv_format!r}")
    is_raw = kv_format == "raw"
    return config.schema(encoding=RAW if is_raw else FP8_UE8M0, index_encoding=RAW if is_raw else MXFP4)


PRESETS: dict[str, Callable[[str], Schema]] = {
    "deepseek-v4-flash": partial(schema_in, DSV4Config.flash()),
    "deepseek-v4-pro": partial(schema_in, DSV4Config.pro()),
}
"""Name -> schema for a ``kv_format``: ``raw`` (bfloat16 rows) or ``fp8`` (584-byte entries, MXFP4 index keys)."""
