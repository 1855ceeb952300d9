"""Names that mean the same in every process: what a block holds, and how it was laid out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import BadInput

KEY_NBYTES = 32


def layout_fingerprint(
    *, weights: str, schema: str, formats: str, layout: int, block_size: int, rank: int = 0, num_ranks: int = 1
) -> bytes:
    """32 bytes that differ as soon as bytes mean something else: never guessed from shapes.

    ``weights``: a digest of the weights and their epoch. ``schema``: what the layers keep, ``formats``: how rows are encoded,
    with digests of scales. ``layout``: version of the record's own layout. ``rank`` of ``num_ranks`` parallel parts.
    """
    return _digest(b"layout", json.dumps([weights, schema, formats, layout, block_size, rank, num_ranks]).encode())


def prefix_root(namespace: bytes, secret: bytes = b"") -> bytes:
    """What the chains of one namespace begin with. With a ``secret``, at most 64 bytes, nobody else can guess a prompt by
    its name. Raises BadInput."""
    if len(secret) > 64:
        raise BadInput(f"a secret is at most 64 bytes, got {len(secret)}; give a digest of it")
    return _digest(b"root", namespace, secret)


def prefix_hashes(
    root: bytes, tokens: npt.NDArray[np.int32], block_size: int, extras: Mapping[int, bytes] | None = None
) -> list[bytes]:
    """One chained hash of 32 bytes for each full block of ``tokens``, int32 ``[n]``: equal where all before it is equal too.

    ``root``: of ``prefix_root``, or the hash of the block above. ``extras``: block number -> digest of what else the block
    shows, such as an image. Raises BadInput. O(n).
    """
    if block_size < 1 or tokens.ndim != 1 or tokens.dtype != np.int32:
        raise BadInput(
            f"hashes are of int32 [n] in blocks of at least 1, got {tokens.dtype} {tokens.shape}, {block_size}"
        )
    text = np.ascontiguousarray(tokens, "<i4").data.cast("B")
    step, hashes = 4 * block_size, []
    for at in range(len(tokens) // block_size):
        root = _digest(b"block", text[at * step : (at + 1) * step], root, (extras or {}).get(at, b""))
        hashes.append(root)
    return hashes


def record_key(fingerprint: bytes, prefix_hash: bytes, kind: bytes = b"") -> bytes:
    """The key of a record, 32 bytes. ``kind`` tells apart what is kept of one prefix: a block of some group, a checkpoint."""
    return _digest(b"record", fingerprint + prefix_hash, kind)


def _digest(domain: bytes, content: bytes | memoryview, key: bytes = b"", more: bytes = b"") -> bytes:
    """BLAKE2b-256 of ``content`` and ``more``, whose lengths are told apart, for one use only (``domain``)."""
    made = blake2b(len(content).to_bytes(8, "little"), digest_size=KEY_NBYTES, key=key, person=b"kvpagoda/" + domain)
    made.update(content)
    made.update(more)
    return made.digest()
