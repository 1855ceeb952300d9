"""Models by name, as data, one file each. With ``families`` the only place in the library where models have names."""

from __future__ import annotations

from collections.abc import Callable

from kvpagoda.errors import BadInput
from kvpagoda.schema.fields import MXFP4, RAW
from kvpagoda.schema.presets.deepseek_v4 import FP8_UE8M0, DSV4Config
from kvpagoda.schema.schema import Schema


def _deepseek_v4(config: DSV4Config) -> Callable[[str], Schema]:
    def preset(kv_format: str) -> Schema:
        if kv_format not in ("raw", "fp8"):
            raise BadInput(f"kv_format is 'raw' or 'fp8', got {kv_format!r}")
        entry, key = (RAW, RAW) if kv_format == "raw" else (FP8_UE8M0, MXFP4)
        return config.schema(encoding=entry, index_encoding=key)

    return preset


PRESETS: dict[str, Callable[[str], Schema]] = {
    "deepseek-v4-flash": _deepseek_v4(DSV4Config.flash()),
    "deepseek-v4-pro": _deepseek_v4(DSV4Config.pro()),
}
"""Name -> schema for a ``kv_format``: ``raw`` (bfloat16 rows) or ``fp8`` (584-byte entries, MXFP4 index keys)."""
