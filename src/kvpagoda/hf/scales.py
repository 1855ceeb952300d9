"""Scales of K and V for formats with one scale a tensor: those of a checkpoint, or measured on running text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import numpy as np
from safetensors import safe_open

from kvpagoda.arrays import TokenIds
from kvpagoda.errors import BadInput, SchemaError, shown
from kvpagoda.formats.encoding import TENSOR
from kvpagoda.hf.model_cache import check_model, runner_of, schema_of
from kvpagoda.schema import Schema
from kvpagoda.schema.kv_format import KVFormatNames
from kvpagoda.units import path_of

Scales = dict[int, tuple[float, float]]
"""Layer index -> (scale of K, scale of V): the argument ``kv_scales``."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_NAMES = (
    r"\.(?:self_attn|attn|attention|mixer)(?:\.attn)?\.(kv|k|v)_scale$",
    r"\.(?:self_attn|attn|attention|mixer)\.(?:[kv]_proj|qkv_proj|qkqkv_proj)\.([kv])_scale$",
    r"\.self_attn\.([kv])_cache\.scale$",
)
"""Names of scales in checkpoints, as vLLM reads them (model_executor/model_loader/weight_utils.py). The group says whose:
K's, V's or one for both."""
_NOT_OF_TEXT = re.compile(r"(?:^|\.)(?:vision\w*|visual|audio\w*|mtp|draft\w*)\.")


def checkpoint_scales(folder: str | PathLike[str], schema: Schema) -> Scales:
    """Return the scales of K and V in the safetensors files of a folder. Only the scales are read.

    A layer with a scale of K alone, or one for both (``kv_scale``), uses it for both, as vLLM does.

    Args:
        folder: with the files.
        schema: whose layers with one scale a tensor get scales.

    Raises:
        BadInput: there are no such files.
        SchemaError: scales that are missing, not one number, not finite or not above 0, or that two names give
            differently; with the layers and numbers.
    """
    files = sorted(path_of(folder, "the folder of a checkpoint").glob("*.safetensors"))
    if not files:
        text = f"{str(folder)!r} holds no *.safetensors file; give the folder of a checkpoint"
        raise BadInput(text, needed=str(folder))
    found: dict[int, dict[str, tuple[str, float]]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 -- no mapping
                if (place := _place(name)) is None:
                    continue
                layer, whose = place
                scale = _number(name, tensors.get_tensor(name))
                other, before = found.setdefault(layer, {}).setdefault(whose, (name, scale))
                if before != scale:
                    text = f"{name} is {scale!r} and {other} is {before!r}; a layer has one scale of {whose}"
                    raise SchemaError(text, field=name, needed=scale, available=before)
    scales = {layer: pair for layer, each in found.items() if (pair := _pair(each)) is not None}
    needed = [layer.index for layer in schema.layers if any(rows.encoding.is_scaled for rows in layer.rows())]
    if lacking := [layer for layer in needed if layer not in scales]:
        raise SchemaError.with_hint(
            f"{str(folder)!r} has no scales of K and V for {len(lacking)} of {len(needed)} layers: {lacking[:8]}",
            "leave kv_scales out for scales of 1.0, or measure them with calibrated_scales",
            needed=len(needed), available=len(needed) - len(lacking),
        )  # fmt: skip
    return {layer: scales[layer] for layer in needed}


def calibrated_scales(
    model: Any, texts: Iterable[TokenIds], kv_format: KVFormatNames = "fp8", *, step: int = 256
) -> Scales:
    """Return the scales with which the largest |K| and |V| of each layer become the largest code of a format.

    The scale is amax / 448 for e4m3, amax / 57344 for e5m2. Rows of other texts may be larger: these saturate.
    O(tokens) forward work.

    Args:
        model: a transformers causal language model.
        texts: token ids of each text, which run through ``model`` over a cache with raw rows.
        kv_format: "fp8" or another format with one scale a tensor, see ``Schema.from_hf_config``.
        step: tokens that run at once.

    Raises:
        BadInput: no texts.
        SchemaError: a format without such rows; or a layer's K or V that is 0 or not finite in all texts, with the
            layer and the number.
    """
    check_model(model)
    dtype = str(model.dtype).removeprefix("torch.")
    schema = schema_of(model.config, dtype=dtype, kv_format=kv_format)
    tops = {
        (layer.index, rows.name): TENSOR[rows.encoding.name][1]
        for layer in schema.layers
        for rows in layer.block_rows()
        if rows.encoding.is_scaled
    }
    if not tops:
        raise SchemaError(
            f"kv_format {shown(kv_format)} gives no layer of {schema.name} one scale a tensor", needed=kv_format
        )
    pieces = [np.asarray(text, dtype=np.int32) for text in texts]
    if not pieces or not all(len(text) for text in pieces):
        raise BadInput(
            f"calibration needs texts of at least one token, got {[len(text) for text in pieces][:8]}",
            needed=[len(text) for text in pieces][:8],
        )
    most = dict.fromkeys(tops, 0.0)
    blocks = -(-max(map(len, pieces)) // schema.block_size()) + step // schema.block_size() + 2
    for text in pieces:
        # new memory for each text is zeros wherever no row was written, so that the largest element is that of a row
        runner, _ = runner_of(model, step, 0, "raw", {"num_blocks": blocks, "max_requests": 1})
        with runner.cache.open(text, lookup=False, capacity=0) as sequence:
            while sequence.length < len(text):
                left = len(text) - sequence.length
                size = min(left, step, runner.most_tokens(sequence) or step, runner.cache.step_limit(sequence))
                sequence.extend(size)  # chunk by chunk: a window has no room for a long text at once
                runner.step([(sequence, text[sequence.length : sequence.length + size])])
                for layer, name in tops:
                    found = runner.cache.layer(layer)[name].abs().amax().item()
                    most[layer, name] = found if math.isnan(found) else max(most[layer, name], found)
                sequence.commit(text[sequence.length : sequence.length + size])
        runner.cache.close()
    for (layer, name), amax in most.items():
        if not 0 < amax < math.inf:
            raise SchemaError(
                f"the largest |{name.upper()}| of layer {layer} is {amax} in {len(pieces)} texts; no scale fits",
                field=name, needed=amax, available=layer,
            )  # fmt: skip
    layers = dict.fromkeys(layer for layer, _ in tops)
    return {layer: (most[layer, "k"] / tops[layer, "k"], most[layer, "v"] / tops[layer, "v"]) for layer in layers}


def _place(name: str) -> tuple[int, str] | None:
    """Return (layer, ``k``, ``v`` or ``kv``) of a scale named ``name``; None for other tensors."""
    layer = _LAYER.search(name)
    if layer is None or _NOT_OF_TEXT.search(name):
        return None
    whose = next((match[1] for pattern in _NAMES if (match := re.search(pattern, name))), None)
    return None if whose is None else (int(layer[1]), whose)


def _number(name: str, tensor: Any) -> float:
    """Return the one number of ``tensor``. Raises SchemaError unless it is finite and above 0."""
    if tensor.numel() != 1:
        text = f"{name} has shape {list(tensor.shape)}; expected one scale for the whole tensor"
        raise SchemaError(text, field=name, needed=1, available=list(tensor.shape))
    scale = float(tensor.float().item())
    if not 0 < scale < math.inf:
        raise SchemaError(f"{name} is {scale}; expected a finite scale above 0", field=name, needed=scale)
    return scale


def _pair(found: Mapping[str, tuple[str, float]]) -> tuple[float, float] | None:
    """Return the scales of K and V from those that a layer has; None for a scale of V alone."""
    k = found.get("k", found.get("kv"))
    return None if k is None else (k[1], found.get("v", k)[1])
