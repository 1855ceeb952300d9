"""Measures what a ``kv_format`` costs: bytes of memory, and bits per byte on text that the model was not trained on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from kvpagoda import KVCache
from kvpagoda.hf.model_cache import runner_over, schema_of
from kvpagoda.schema import Schema
from kvpagoda.schema.kv_format import KVFormatNames, as_text
from kvpagoda.units import format_bytes

STEP = 256
"""Bytes of text that one step computes."""


@dataclass(frozen=True)
class Cost:
    """The cost of one format: cache bytes per token and per request, and mean bits for a byte of a text."""

    bytes_per_token: float
    bytes_per_request: int
    bits_per_byte: float

    @classmethod
    def of(cls, model: Any, kv_format: KVFormatNames, text: bytes) -> Cost:
        schema = schema_of(model.config, dtype=_dtype(model), kv_format=kv_format)
        _, bits = logits_and_bits(model, schema, text)
        return cls(schema.bytes_per_token, schema.state_layout.payload_nbytes, bits)


@dataclass(frozen=True)
class FormatCost:
    """The cost of a ``kv_format`` beside that of raw rows of ``raw_dtype``, on a text of ``text_bytes`` bytes."""

    kv_format: str
    raw_dtype: str
    text_bytes: int
    packed: Cost
    raw: Cost

    @property
    def lost_bits_per_byte(self) -> float:
        """The bits per byte of text that the format costs; below 0 if rounding happens to help."""
        return self.packed.bits_per_byte - self.raw.bits_per_byte

    @property
    def saved(self) -> float:
        """The share of a token's bytes that the format saves."""
        return 1 - self.packed.bytes_per_token / self.raw.bytes_per_token

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the lost bits as plain data, for JSON."""
        return {**asdict(self), "lost_bits_per_byte": self.lost_bits_per_byte}

    def __str__(self) -> str:
        packed, raw = self.packed, self.raw
        return (
            f"{self.kv_format}: {packed.bytes_per_token:,.0f} bytes a token instead of {raw.bytes_per_token:,.0f} "
            f"({self.raw_dtype}), {self.saved:.0%} saved, and {format_bytes(packed.bytes_per_request)} a request instead of "
            f"{format_bytes(raw.bytes_per_request)}; {self.lost_bits_per_byte:+.4f} bits for each of {self.text_bytes:,} "
            f"bytes of text it was not trained on ({packed.bits_per_byte:.3f})"
        )


def format_cost(model: Any, kv_format: KVFormatNames, text: bytes, raw: Cost | None = None) -> FormatCost:
    """Measure what ``kv_format`` costs ``model``, a byte model, on ``text`` of at least two bytes. ``raw``: the cost of
    raw rows on the same text, if it is known. Raises SchemaError for an unknown format."""
    packed = Cost.of(model, kv_format, text)
    return FormatCost(as_text(kv_format), _dtype(model), len(text), packed, raw or Cost.of(model, "raw", text))


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def logits_and_bits(model: Any, schema: Schema, text: bytes, length: int = 1024) -> tuple[torch.Tensor, float]:
    """Return the logits after each byte of ``text``, float ``[bytes, vocab]``, and the mean bits that ``model`` needs for
    a byte, when it reads its past from a cache of ``schema``. The text is cut into pieces of ``length`` bytes. O(pieces)
    forward passes."""
    cache = KVCache(schema, num_blocks=length // schema.block_size() + 2, max_requests=1, device=model.device)
    runner, found, total, count = runner_over(model, cache), list[torch.Tensor](), 0.0, 0
    for start in range(0, len(text), length):
        piece = np.frombuffer(text[start : start + length], np.uint8).astype(np.int32)
        with cache.open(piece, lookup=False, capacity=0) as sequence:
            for step in np.split(piece, range(STEP, len(piece), STEP)):
                sequence.extend(len(step))
                logits = runner.step([(sequence, step)], [len(step)])
                targets = torch.from_numpy(piece[sequence.length + 1 :][: len(step)]).to(logits.device, torch.int64)
                total += cross_entropy(logits[: len(targets)], targets, reduction="sum").item()
                count += len(targets)
                sequence.commit(step)
                found.append(logits)
    cache.close()
    return torch.cat(found), total / math.log(2) / count
