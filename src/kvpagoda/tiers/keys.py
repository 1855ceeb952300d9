"""Keys of records that mean the same in every process: they name the text of a block and the layout of its bytes."""

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
    """Return 32 bytes that differ whenever the bytes of a record mean something else. Shapes alone would not tell.

    Args:
        weights: a digest of the weights and their epoch.
        schema: what the layers keep.
        formats: how rows are encoded, with digests of scales.
        layout: version of the record's own layout.
        block_size: tokens of a block.
        rank: the parallel part, of ``num_ranks``.
        num_ranks: parallel parts of the model.
    """
    return _digest(b"layout", json.dumps([weights, schema, formats, layout, block_size, rank, num_ranks]).encode())


def prefix_root(namespace: bytes, secret: bytes = b"") -> bytes:
    """Return the hash, 32 bytes, with which the hash chains of a namespace begin.

    Args:
        namespace: its key (``kvpagoda.namespace.namespace_key``).
        secret: at most 64 bytes; with one, only processes that know it can compute the hashes of a prompt.

    Raises:
        BadInput: a longer ``secret``, or no namespace.
    """
    if not isinstance(secret, bytes):
        raise BadInput(f"a secret is bytes, got {type(secret).__name__}", field="secret", needed=type(secret).__name__)
    if len(secret) > 64:
        text = f"a secret is at most 64 bytes, got {len(secret)}; give a digest of it"
        raise BadInput(text, field="secret", needed=len(secret), available=64)
    return _digest(b"root", namespace, secret)


def prefix_hashes(
    root: bytes, tokens: npt.NDArray[np.int32], block_size: int, extras: Mapping[int, bytes] | None = None
) -> list[bytes]:
    """Return a chained hash of 32 bytes for each full block of a text. O(n).

    Two blocks have the same hash if their tokens and everything before them are the same.

    Args:
        root: the result of ``prefix_root``, or the hash of the block before the first.
        tokens: int32 ``[n]``.
        block_size: tokens of a block.
        extras: block number -> digest of other content of that block, such as an image.

    Raises:
        BadInput: ``tokens`` are not int32 ``[n]``, or ``block_size`` is below 1.
    """
    if block_size < 1 or tokens.ndim != 1 or tokens.dtype != np.int32:
        raise BadInput(
            f"tokens must be int32 [n] and block_size at least 1, got {tokens.dtype} {tokens.shape} and {block_size}",
            needed=tokens.dtype, available=block_size,
        )  # fmt: skip
    text = np.ascontiguousarray(tokens, "<i4").data.cast("B")
    step, hashes = 4 * block_size, []
    for block in range(len(tokens) // block_size):
        root = _digest(b"block", text[block * step : (block + 1) * step], root, (extras or {}).get(block, b""))
        hashes.append(root)
    return hashes


def record_key(fingerprint: bytes, prefix_hash: bytes, kind: bytes = b"") -> bytes:
    """Return the key of a record, 32 bytes.

    Args:
        fingerprint: of its layout.
        prefix_hash: of the text up to its end.
        kind: separates the records of one prefix: blocks of a group, or a checkpoint.
    """
    return _digest(b"record", fingerprint + prefix_hash, kind)


def _digest(domain: bytes, content: bytes | memoryview, key: bytes = b"", more: bytes = b"") -> bytes:
    """Return the BLAKE2b-256 hash of ``content`` and ``more``, unambiguously joined, for one use (``domain``) only."""
    hasher = blake2b(len(content).to_bytes(8, "little"), digest_size=KEY_NBYTES, key=key, person=b"kvpagoda/" + domain)
    hasher.update(content)
    hasher.update(more)
    return hasher.digest()
