"""The checksum of records: xxh3-128, against faults, not against attackers."""

from __future__ import annotations

from typing import Any

from kvpagoda.errors import BadInput

try:
    import xxhash
except ImportError:
    xxhash = None  # type: ignore[assignment]


def xxh3_128(data: Any) -> bytes:
    """16 bytes for any bytes. Raises BadInput without the package xxhash."""
    if xxhash is None:
        raise BadInput("tiers need the package xxhash; install kvpagoda[disk]")
    return xxhash.xxh3_128_digest(data)
