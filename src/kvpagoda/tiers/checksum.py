"""The checksum of records: xxh3-128, against faults, not against attackers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpagoda.errors import BadInput

xxh3_128: Callable[[Any], bytes]
"""16 bytes for any bytes. Raises BadInput without the package xxhash."""


def _absent(data: Any) -> bytes:
    raise BadInput("tiers need the package xxhash; install kvpagoda[disk]")


try:
    from xxhash import xxh3_128_digest
except ImportError:
    xxh3_128 = _absent
else:
    xxh3_128 = xxh3_128_digest
