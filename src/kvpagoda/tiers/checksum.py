"""The checksum of records: xxh3-128, against faults, not against attackers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpagoda.errors import BadInput

if TYPE_CHECKING:
    from typing_extensions import Buffer

try:
    from xxhash import xxh3_128_digest as xxh3_128
except ImportError:

    def xxh3_128(data: Buffer, seed: int = 0) -> bytes:
        """Raises BadInput."""
        raise BadInput("tiers need the package xxhash; install kvpagoda[disk]")


__all__ = ["xxh3_128"]
