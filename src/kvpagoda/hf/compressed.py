"""Compressed attention (CSA, HCA and sliding-window layers of the DeepSeek-V4 kind) over a ``LayerCacheHandle``.

transformers' own layers close their compression windows at the same step for the whole batch, but requests that run
together are at different phases. So the attention is computed here from the model's weights, for the tokens of any
requests: one forward pass takes prompt pieces and single tokens together, and reads and writes the cache only through
the handle. The formulas are those of arXiv 2606.19348, section 2.3, as transformers computes them.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear, relu

from kvpagoda import KVCache, Sequence
from kvpagoda.compat.layer_handle import ClosedWindows, LayerCacheHandle
from kvpagoda.errors import SchemaError
from kvpagoda.hf.rope_switch import RopeSwitch
from kvpagoda.hf.runner import Work

Tensor = torch.Tensor


class CompressedRunner:
    """A ``Runner`` that computes each step in one packed forward pass; its requests may be at any phases of their
    windows."""

    def __init__(self, model: Any, cache: KVCache) -> None:
        if not hasattr(model.model.layers[0].self_attn, "compressor"):
            raise SchemaError(f"{type(model).__name__} keeps compressed entries in an unknown way: no compressor")
        self.model, self.cache, self.switch = model, cache, RopeSwitch(model)
        if self.switch.lengths:
            raise SchemaError(f"{type(model).__name__} has LongRoPE beside compressed entries, which was not verified")

    @torch.no_grad()
    def step(self, work: Many[Work], kept: Many[int] | None = None, lengths: Many[int] | None = None) -> Tensor:
        batch = self.cache.batch([sequence for sequence, _ in work], [len(tokens) for _, tokens in work])
        ids = torch.from_numpy(np.concatenate([tokens for _, tokens in work])).to(self.cache.device, torch.int64)[None]
        body, positions = self.model.model, batch.positions.long()[None]
        embedded = body.embed_tokens(ids)
        hidden = embedded.unsqueeze(2).expand(-1, -1, self.model.config.hc_mult, -1).contiguous()
        rotations = {kind: body.rotary_emb(embedded, position_ids=positions, layer_type=kind) for kind in ROPE_KINDS}
        for index, layer in enumerate(body.layers):
            hidden = _layer(layer, hidden, ids, rotations, LayerCacheHandle.of(batch.layer(index)))
        counts = [1] * len(work) if kept is None else kept
        ends = np.cumsum([len(tokens) for _, tokens in work])
        last = torch.from_numpy(np.concatenate([np.arange(end - n, end) for end, n in zip(ends, counts)]))
        hidden = hidden[:, last.to(hidden.device)]
        return self.model.lm_head(body.norm(body.hc_head(hidden)))[0].float()  # type: ignore[no-any-return]

    def most_tokens(self, sequence: Sequence) -> int | None:
        return None


ROPE_KINDS = ("main", "compress")
Rotations = dict[str, tuple[Tensor, Tensor]]


def _layer(layer: Any, hidden: Tensor, ids: Tensor, rotations: Rotations, handle: LayerCacheHandle) -> Tensor:
    """Compute one decoder layer on ``hidden`` ``[1, n, streams, hidden]``; attention and MLP both mix the residual
    streams."""
    post, mix, inner = layer.attn_hc(hidden)
    out = attention(layer.self_attn, layer.input_layernorm(inner), rotations, handle)
    hidden = _mix(hidden, out, post, mix)
    post, mix, inner = layer.ffn_hc(hidden)
    return _mix(hidden, layer.mlp(layer.post_attention_layernorm(inner), input_ids=ids), post, mix)


def _mix(hidden: Tensor, out: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    kept = torch.matmul(mix.to(hidden.dtype).transpose(-1, -2), hidden)
    return post.to(hidden.dtype).unsqueeze(-1) * out.unsqueeze(-2) + kept


def attention(attn: Any, hidden: Tensor, rotations: Rotations, handle: LayerCacheHandle) -> Tensor:
    """Compute the attention of one layer for ``hidden`` ``[1, n, hidden]``, and write this step's rows. Returns ``[1,
    n, hidden]``."""
    cos, sin = rotations[attn.rope_layer_type]
    tokens = hidden.shape[1]
    shape = (1, tokens, -1, attn.head_dim)
    low_rank = attn.q_a_norm(attn.q_a_proj(hidden))
    query = rotate(attn.q_b_norm(attn.q_b_proj(low_rank).view(shape).transpose(1, 2)), cos, sin)[0].transpose(0, 1)
    kv = rotate(attn.kv_norm(attn.kv_proj(hidden)).view(shape).transpose(1, 2), cos, sin)[0, 0]
    rows, valid = handle.read_window(kv)
    handle.write_swa(kv)
    if attn.compressor is not None:
        entries, found = compressed_rows(attn.compressor, hidden, low_rank, (cos, sin), handle)
        rows, valid = torch.cat([rows, entries], dim=1), torch.cat([valid, found], dim=1)
    scores = torch.einsum("nhd,njd->nhj", query, rows) * attn.scaling
    scores = scores.masked_fill(~valid[:, None], float("-inf"))
    sinks = attn.sinks.view(1, -1, 1).expand(tokens, -1, 1).to(scores.dtype)
    weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1].to(rows.dtype)
    out = torch.einsum("nhj,njd->nhd", weights, rows)
    out = rotate(out[None].transpose(1, 2), cos, -sin).transpose(1, 2)
    out = attn.o_a_proj(out.reshape(1, tokens, attn.config.o_groups, -1)).flatten(2)
    return attn.o_b_proj(out)  # type: ignore[no-any-return]


def compressed_rows(
    compressor: Any, hidden: Tensor, low_rank: Tensor, rotation: tuple[Tensor, Tensor], handle: LayerCacheHandle
) -> tuple[Tensor, Tensor]:
    """Close this step's windows. Return the entries that each token attends to, ``[n, k, dim]``, and their validity
    ``[n, k]``."""
    closed, entries = pool_windows(compressor, hidden, handle)
    handle.write_entries(closed, entries)
    positions = handle.positions.long()
    visible = (positions + 1) // compressor.compress_rate
    count = int(visible.max()) if len(visible) else 0
    windows = torch.arange(count, device=positions.device).expand(len(positions), -1)
    windows = torch.where(windows < visible[:, None], windows, -1)
    if handle.kind.index_dim is not None:
        windows = select(compressor.indexer, hidden, low_rank, rotation, windows, handle)
    return handle.read_entries(windows).to(hidden.dtype), windows >= 0


def pool_windows(
    compressor: Any, hidden: Tensor, handle: LayerCacheHandle, prefix: str = ""
) -> tuple[ClosedWindows, Tensor]:
    """Return the ``c`` windows that close, and their entries ``[c, dim]``: a softmax over the rows of a window, channel
    by channel, then norm and RoPE at the position of the window's first token."""
    ratio = compressor.compress_rate
    bias = compressor.position_bias[handle.positions.long() % ratio]
    keys = compressor.kv_proj(hidden)[0]
    closed = handle.close_windows(keys, compressor.gate_proj(hidden)[0] + bias, prefix)
    weights = closed.scores.softmax(dim=1, dtype=torch.float32).to(closed.keys.dtype)
    entries = compressor.kv_norm((closed.keys * weights).sum(dim=1).to(keys.dtype))[None]
    if not closed.windows.numel():
        return closed, entries[0]  # some rotary modules compute the furthest position, which fails without windows
    cos, sin = compressor.rotary_emb(entries, position_ids=closed.windows[None] * ratio, layer_type="compress")
    return closed, rotate(entries[:, None], cos, sin)[0, 0]


def select(
    indexer: Any, hidden: Tensor, low_rank: Tensor, rotation: tuple[Tensor, Tensor], windows: Tensor,
    handle: LayerCacheHandle,
) -> Tensor:  # fmt: skip
    """Return the ``index_topk`` best of ``windows`` ``[n, w]`` (-1: not visible) for each token, as the indexer scores
    them; -1 is padding."""
    closed, keys = pool_windows(indexer, hidden, handle, "idx_")
    handle.write_indexer_keys(closed, keys)
    tokens = hidden.shape[1]
    query = indexer.q_b_proj(low_rank).view(1, tokens, -1, indexer.head_dim).transpose(1, 2)
    query = rotate(query, *rotation)[0].transpose(0, 1)
    scorer = indexer.scorer
    scores = torch.einsum("nhd,nwd->nhw", query.float(), handle.read_indexer_keys(windows).float())
    weights = linear(hidden, scorer.weights_proj.weight)[0].float() * scorer.weights_scaling
    ranked = (
        (relu(scores) * scorer.softmax_scale * weights[..., None]).sum(dim=1).masked_fill(windows < 0, float("-inf"))
    )
    best = ranked.topk(min(indexer.index_topk, windows.shape[1]), dim=-1).indices
    return windows.gather(1, best)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to the last ``2 * cos.shape[-1]`` channels of ``x`` ``[b, heads, n, dim]``; neighbouring channels are
    a pair."""
    plain, turned = torch.tensor_split(x, [x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    even, odd = turned[..., 0::2].float(), turned[..., 1::2].float()
    cos, sin = cos[:, None], sin[:, None]
    pairs = torch.stack((even * cos + -odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat([plain, pairs.to(x.dtype)], dim=-1)
