"""Bind an attention kernel to the memory of a layer: what the kernel demands, whether the layout fits, how to call it.

The table of demands is data, with a source for every line (``kvpagoda.layouts``). ``judge`` reads only shapes, strides
and dtypes. It therefore needs no GPU, and it is called once, before the first step, not in every step.

    python examples/kernels.py
"""

from __future__ import annotations

import torch

from kvpagoda import KVCache, LayerView, Schema
from kvpagoda.layouts import judge
from kvpagoda.layouts.demands import kernel

KERNELS = (
    "flash_attention_2",
    "flash_attention_3",
    "flashinfer_fa2_decode",
    "flashinfer_trtllm_gqa",
    "vllm_triton_unified",
)
LLAMA = dict(
    model_type="llama", num_hidden_layers=2, hidden_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
    vocab_size=512, torch_dtype="bfloat16",
)  # fmt: skip


def verdicts(view: LayerView, block_table: torch.Tensor) -> dict[str, str]:
    """Return for each kernel "ok", or what it would do with this layer's memory, the reason, and the remedy."""
    results = {}
    for name in KERNELS:
        verdict = judge(name, {**view.kernel_tensors(name), "table": block_table})
        results[name] = (
            "ok" if verdict.expect == "ok" else f"{verdict.expect}: {verdict.reason}; {verdict.remedy or verdict.rule}"
        )
    return results


def demands_of(name: str) -> list[str]:
    """Return the lines of the table for the kernel ``name``."""
    return [
        f"{' '.join(demand.of)} {demand.comparison} {demand.value} (else {demand.outcome}) [{demand.source}]"
        for demand in kernel(name).demands
    ]


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, causal=True):
    """Compute attention for one new token per row, with the signature of FlashAttention's function of this name.

    ``q``: ``[B, 1, heads, dim]``. ``k_cache``, ``v_cache``: ``[blocks, block_size, kv_heads, dim]``. Returns the shape
    of ``q``. With a GPU, use ``from flash_attn import flash_attn_with_kvcache`` in its place."""
    out = torch.empty_like(q)
    for row, length in enumerate(cache_seqlens.tolist()):
        blocks = block_table[row].long()
        k, v = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1) for cache in (k_cache, v_cache))
        k, v = (rows.repeat_interleave(q.shape[2] // len(rows), 0) for rows in (k, v))
        out[row, 0] = torch.nn.functional.scaled_dot_product_attention(q[row, 0, :, None], k, v)[:, 0]
    return out


def decode_step(cache: KVCache) -> float:
    """Run a decode step of two requests through the kernel. Return the largest difference from attention over the same
    rows in contiguous memory."""
    random = torch.Generator().manual_seed(0)
    texts = [list(range(300)), list(range(400, 437))]
    rows = [torch.randn(2, len(text) + 1, 2, 64, generator=random).bfloat16() for text in texts]  # K, V of each text
    sequences = [cache.open([*text, 7]) for text in texts]
    for sequence, text, (k, v) in zip(sequences, texts, rows):
        new = slice(sequence.length, len(text))
        cache.batch([sequence], [len(text) - sequence.length]).layer(0).write(k=k[new], v=v[new])
        sequence.commit(text[new])
    running = cache.persistent_batch(sequences, tokens_per_row=1)  # the last token of each is not computed yet
    view = running.extend().layer(0)
    k, v = torch.stack([pair[:, -1] for pair in rows], 1)
    view.write(k=k, v=v)  # write the rows of the new tokens before attention reads all rows
    q = torch.randn(2, 1, 8, 64, generator=random).bfloat16()
    found = flash_attn_with_kvcache(
        q, view["k"], view["v"], cache_seqlens=view.cache_seqlens, block_table=view.block_table, causal=True
    )
    worst = 0.0
    for row, (k, v) in enumerate(rows):
        k, v = (tensor.transpose(0, 1).repeat_interleave(4, 0) for tensor in (k, v))
        dense = torch.nn.functional.scaled_dot_product_attention(q[row, 0, :, None], k, v)[:, 0]
        worst = max(worst, float((found[row, 0] - dense).abs().max()))
    for sequence in sequences:
        sequence.close()
    return worst


def main() -> dict[int, dict[str, str]]:
    print("What flash_attention_2 demands:", *demands_of("flash_attention_2"), sep="\n  ")
    results = {}
    for block_size in (16, 256):
        cache = KVCache(Schema.from_hf_config(LLAMA), "4MiB", device="cpu", block_size=block_size, max_requests=4)
        view = cache.layer(0)  # works before the first step: to bind memory, or to warm up a CUDA graph
        results[block_size] = verdicts(view, torch.zeros(4, 8, dtype=torch.int32))
        print(f"\nblocks of {block_size} tokens, k {[*view['k'].shape]} with strides {view['k'].stride()}")
        for name, verdict in results[block_size].items():
            print(f"  {name:24} {verdict}")
        difference = decode_step(cache)
        print(f"  a decode step through the block table: largest difference from contiguous rows {difference}")
        assert difference == 0
        cache.check()
    return results


if __name__ == "__main__":
    main()
