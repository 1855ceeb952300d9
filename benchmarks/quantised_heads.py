"""What each ``kv_format`` saves and costs, for models with K/V heads and for the model of ``kvpagoda generate``.

The models with heads (``trained``) are like Llama, and like Gemma-3 with windows of 64 tokens. Formats that a model's rows
do not have are listed as absent, with the reason; ``fp8_e4m3`` of heads is ``fp8``. "calibrated": with scales a tensor of
the largest K and V on 8 pieces of the training text; else such scales are 1.0.

    layers           which layers have the format; the others keep raw rows of float32
    bytes_per_token  of a token in all layers; ``saved_percent``: of those of raw rows
    lost_millibits   thousandths of a bit per byte of held-out text that the model needs more than with raw rows
    rms_error        root mean square of the difference of all logits of that text; ``error_percent``: of the standard
                     deviation of the raw logits
    warm_is_cold     whether the logits after a cached beginning are those of a cache that computed it, bit for bit
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.timing import Options, Row, tell
from benchmarks.trained import FAMILIES, trained_model, training_text
from kvpagoda.core.kv_cache import KVCache
from kvpagoda.errors import SchemaError
from kvpagoda.hf import calibrated_scales
from kvpagoda.hf.held_out import logits_and_bits
from kvpagoda.hf.model_cache import next_piece, runner_over
from kvpagoda.schema import Attention, Layer, Schema
from kvpagoda.schema.kv_format import KV_FORMATS, KVFormatNames

QUESTION = "What do quantised K/V heads save, and what do they cost on held-out text?"
CALLED = {"llama": "Llama-like", "gemma3_text": "Gemma-3-like", "deepseek_v4": "DeepSeek-V4-like"}
QUICK = ("raw", "fp8", "int8")
STEP, CACHED = 128, 512
"""For ``warm_is_cold``: how many bytes a step computes, so few that none is cut shorter to end at a checkpoint, since
products of other shapes round their last bit otherwise; how many bytes are cached."""


def measure(options: Options) -> list[Row]:
    from kvpagoda.hf.embedded import embedded_model, held_out_text

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        text, rows = held_out_text()[: 640 if options.quick else None], list[Row]()
        for model_type in (*FAMILIES, "deepseek_v4"):
            if options.only not in CALLED[model_type]:
                continue
            is_own = model_type not in FAMILIES
            model = embedded_model() if is_own else trained_model(model_type, is_quick=options.quick)
            rows += rows_of(model, CALLED[model_type], text, is_quick=options.quick)
        return rows
    finally:
        torch.set_num_threads(threads)


def rows_of(model: Any, name: str, text: bytes, *, is_quick: bool = False) -> list[Row]:
    """Return a row for each format in all layers of ``model``, and in each kind of layers alone where it has windows
    too."""
    raw = Schema.from_hf_config(model.config, dtype="float32")
    case = f"{name}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M"
    plain, bits = logits_and_bits(model, raw, text)
    rows, measured = list[Row](), list[tuple[Layer, ...]]()
    formats = [name for name in KV_FORMATS if not is_quick or name in QUICK]
    for label, layers, asked, is_calibrated in ways(raw, formats):
        try:
            scales = calibrated_scales(model, calibration(is_quick), asked) if is_calibrated else None
            schema = Schema.from_hf_config(model.config, dtype="float32", kv_format=asked, kv_scales=scales)
        except SchemaError as error:
            rows.append({"who": f"{name}, {label}", "absent": str(error)})
            continue
        if schema.layers in measured:
            continue
        measured.append(schema.layers)
        logits, packed = logits_and_bits(model, schema, text)
        error = float((logits - plain).square().mean().sqrt())
        rows.append({
            "case": case,
            "kv_format": label,
            "layers": layers,
            "bytes_per_token": schema.bytes_per_token,
            "saved_percent": 100 * (1 - schema.bytes_per_token / raw.bytes_per_token),
            "bits_per_byte": packed,
            "lost_millibits": 1000 * (packed - bits),
            "rms_error": error,
            "error_percent": 100 * error / float(plain.std()),
            "warm_is_cold": warm_is_cold(model, schema, text),
        })  # fmt: skip
    return rows


def ways(raw: Schema, formats: list[str]) -> Iterator[tuple[str, str, KVFormatNames, bool]]:
    """Yield (name of the format, which layers have it, argument ``kv_format``, whether scales are calibrated) of what is
    measured of ``formats`` for a model whose raw schema is ``raw``."""
    kinds = ("full", "window") if len({layer.growth for layer in raw.layers}) > 1 else ()
    is_heads = all(isinstance(kind, Attention) for layer in raw.layers for kind in layer.kinds)
    for kv_format in formats:
        yield kv_format, "all", kv_format, False
        if kv_format == "raw" or not is_heads:
            continue
        if KV_FORMATS[kv_format].heads.is_scaled:
            yield f"calibrated {kv_format}", "all", kv_format, True
        for kind in kinds:
            yield kv_format, kind, {kind: kv_format}, False


def calibration(is_quick: bool) -> list[np.ndarray[Any, Any]]:
    """Return texts of the training text, from its whole length."""
    ids = np.frombuffer(training_text(), np.uint8).astype(np.int32)
    length, number = (64, 1) if is_quick else (1024, 8)
    return [ids[begin : begin + length] for begin in range(0, len(ids) - length, len(ids) // number)][:number]


def warm_is_cold(model: Any, schema: Schema, text: bytes) -> bool:
    """Whether the logits after the first ``CACHED`` bytes of ``text`` are the same, bit for bit, if these were found in
    the cache."""
    tokens = np.frombuffer(text[: 2 * CACHED], np.uint8).astype(np.int32)
    cold, number = logits_after(model, schema, tokens, num_cached=0)
    warm, found = logits_after(model, schema, tokens, num_cached=CACHED)
    assert (number, found) == (0, CACHED), f"{found} tokens were found, not {CACHED}"
    return torch.equal(cold[CACHED:], warm)


def logits_after(model: Any, schema: Schema, tokens: Any, num_cached: int) -> tuple[torch.Tensor, int]:
    """Compute ``tokens`` after another request computed the first ``num_cached`` of them. Return the logits of what was
    computed, and how many tokens were found in the cache."""
    cache = KVCache(schema, num_blocks=2 * len(tokens) // schema.block_size() + 2, max_requests=2)
    runner, logits = runner_over(model, cache), list[torch.Tensor]()
    for part in (tokens[:num_cached], tokens):
        if not len(part):
            continue
        with cache.open(part, capacity=0) as sequence:
            found, logits = sequence.cached_tokens, []
            while sequence.length < len(part):
                step = next_piece(runner, sequence, part, STEP)
                sequence.extend(len(step))
                logits.append(runner.step([(sequence, step)], [len(step)]))
                sequence.commit(step)
    cache.close()
    return torch.cat(logits), found


if __name__ == "__main__":
    tell("quantised_heads", QUESTION, measure)
