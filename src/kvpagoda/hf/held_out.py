"""What a form of the cache costs: bytes of memory, and bits on text that the model has not seen."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from kvpagoda.hf.compressed import CompressedRunner
from kvpagoda.kv_cache import KVCache
from kvpagoda.schema import Schema
from kvpagoda.units import format_bytes

STEP = 256
"""Bytes that are computed at a time."""


@dataclass(frozen=True)
class FormatCost:
    """A ``kv_format`` beside raw rows: bytes for each token and each request, and mean bits for a byte of a text."""

    kv_format: str
    raw_dtype: str
    bytes_per_token: float
    raw_bytes_per_token: float
    bytes_per_request: int
    raw_bytes_per_request: int
    text_bytes: int
    bits_per_byte: float
    raw_bits_per_byte: float

    @property
    def lost_bits_per_byte(self) -> float:
        """Bits that the format costs for a byte of the text; below 0 where rounding happens to help."""
        return self.bits_per_byte - self.raw_bits_per_byte

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {**asdict(self), "lost_bits_per_byte": self.lost_bits_per_byte}

    def __str__(self) -> str:
        saved = 1 - self.bytes_per_token / self.raw_bytes_per_token
        return (
            f"{self.kv_format}: {self.bytes_per_token:,.0f} bytes a token instead of {self.raw_bytes_per_token:,.0f} "
            f"({self.raw_dtype}), {saved:.0%} saved, and {format_bytes(self.bytes_per_request)} a request instead of "
            f"{format_bytes(self.raw_bytes_per_request)}; {self.lost_bits_per_byte:+.4f} bits for each of {self.text_bytes:,} "
            f"bytes of text it was not trained on ({self.bits_per_byte:.3f})"
        )


def format_cost(model: Any, kv_format: str, text: bytes) -> FormatCost:
    """What ``kv_format`` costs ``model``, a byte model with compressed attention, on ``text``.

    Raises SchemaError for a format that there is not, BadInput for a text of less than two bytes.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    schemas = [Schema.from_hf_config(model.config, dtype=dtype, kv_format=name) for name in (kv_format, "raw")]
    (packed, raw), (bits, raw_bits) = schemas, [bits_per_byte(model, schema, text) for schema in schemas]
    return FormatCost(
        kv_format, dtype, packed.bytes_per_token, raw.bytes_per_token,
        packed.state_layout.payload_nbytes, raw.state_layout.payload_nbytes, len(text), bits, raw_bits,
    )  # fmt: skip


def bits_per_byte(model: Any, schema: Schema, text: bytes, length: int = 1024) -> float:
    """Mean bits that ``model`` needs for a byte of ``text``, cut into pieces of ``length``, when it reads its past from a
    cache of ``schema``. O(pieces) forward passes."""
    cache = KVCache(schema, num_blocks=length // schema.block_size() + 2, max_requests=1, device=model.device)
    runner, total, count = CompressedRunner(model, cache), 0.0, 0
    for start in range(0, len(text) - 1, length):
        piece = np.frombuffer(text[start : start + length], np.uint8).astype(np.int32)
        with cache.open(piece, lookup=False) as sequence:
            for step in np.split(piece, range(STEP, len(piece), STEP)):
                logits = runner.step([(sequence, step)], [len(step)])
                targets = torch.from_numpy(piece[sequence.length + 1 :][: len(step)]).to(logits.device, torch.int64)
                total += cross_entropy(logits[: len(targets)], targets, reduction="sum").item()
                count += len(targets)
                sequence.commit(step)
    cache.close()
    return total / math.log(2) / count
