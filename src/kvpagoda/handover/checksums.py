"""Checksums of records: XXH3-128, or BLAKE2b where the package xxhash is not installed. They detect faults; the seal of a
lease, which is signed as its ticket is, protects against forgery."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from kvpagoda.errors import MissingExtra, TicketRefused
from kvpagoda.pages import Bytes

try:
    import xxhash
except ImportError:
    xxhash = None  # type: ignore[assignment]

KNOWN = XXH3, BLAKE2B = "xxh3-128", "blake2b-128"


def algorithm() -> str:
    """Return the name of the algorithm that this process uses."""
    return XXH3 if xxhash is not None else BLAKE2B


def checksums_of(tables: list[Bytes], name: str) -> Bytes:
    """Return the checksum of every record of ``tables``, uint8 ``[n, nbytes]`` each: uint8 ``[records, 16]``. Raises
    TicketRefused for an unknown algorithm, MissingExtra without its package. One pass over the records."""
    if name == BLAKE2B:
        found = b"".join(blake2b(row.data, digest_size=16).digest() for table in tables for row in table)
    elif name == XXH3:
        if xxhash is None:
            raise MissingExtra(
                "this ticket's checksums need the package xxhash; pip install 'kvpagoda[disk]'", name="xxhash"
            )
        found = b"".join([xxhash.xxh3_128_digest(row) for table in tables for row in table])
    else:
        raise TicketRefused(
            f"unknown checksum {name!r}; known: {XXH3}, {BLAKE2B}", needed=name, available=(XXH3, BLAKE2B)
        )
    return np.frombuffer(found, np.uint8).reshape(-1, 16)
