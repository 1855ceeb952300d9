"""The checksum of records, xxh3-128. It detects faults; it does not protect against attackers."""

from __future__ import annotations

from typing import Any

from kvpagoda.errors import BadInput

try:
    import xxhash
except ImportError:
    xxhash = None  # type: ignore[assignment]


def xxh3_128(data: Any) -> bytes:
    """Return the checksum of ``data``, any bytes, as 16 bytes. Raises BadInput without the package xxhash."""
    if xxhash is None:
        raise BadInput("tiers need the package xxhash; install kvpagoda[disk]")
    return xxhash.xxh3_128_digest(data)
