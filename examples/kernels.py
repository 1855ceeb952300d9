"""Bind an attention kernel to the memory of a layer: what it demands, whether the layout meets it, and how it is called.

The table of demands is data with a source for every line (``kvpagoda.layouts``). ``judge`` reads shapes, strides and
types, so that it can be asked before there is a GPU, and whatever is asked here costs nothing at run time.

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


def described(tensor: torch.Tensor) -> dict:
    """A tensor as ``judge`` reads it."""
    address = tensor.data_ptr()
    return {
        "shape": list(tensor.shape), "strides": list(tensor.stride()), "dtype": str(tensor.dtype).removeprefix("torch."),
        "base_alignment": min(address & -address, 4096),
    }  # fmt: skip


def verdicts(view: LayerView, block_table: torch.Tensor) -> dict[str, str]:
    """What each kernel would do with this layer's memory: ok, or what it does not like, and the remedy."""
    tensors = {"k": described(view["k"]), "v": described(view["v"]), "table": described(block_table)}
    told = {}
    for name in KERNELS:
        verdict = judge(name, tensors=tensors)
        told[name] = (
            "ok" if verdict.expect == "ok" else f"{verdict.expect}: {verdict.reason}; {verdict.remedy or verdict.rule}"
        )
    return told


def demands_of(name: str) -> list[str]:
    """The lines of the table for one kernel."""
    return [
        f"{' '.join(demand.of)} {demand.comparison} {demand.value} (else {demand.outcome}) [{demand.source}]"
        for demand in kernel(name).demands
    ]


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, causal=True):
    """A stand-in with FlashAttention's signature, for one new token of each row: ``q`` ``[B, 1, heads, dim]``, ``k_cache`` and
    ``v_cache`` ``[blocks, block_size, kv_heads, dim]``. With a GPU: ``from flash_attn import flash_attn_with_kvcache``."""
    out = torch.empty_like(q)
    for row, length in enumerate(cache_seqlens.tolist()):
        blocks = block_table[row].long()
        k, v = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1) for cache in (k_cache, v_cache))
        k, v = (rows.repeat_interleave(q.shape[2] // len(rows), 0) for rows in (k, v))
        out[row, 0] = torch.nn.functional.scaled_dot_product_attention(q[row, 0, :, None], k, v)[:, 0]
    return out


def decode_step(cache: KVCache) -> float:
    """A step of two requests through the kernel; the largest difference from attention over rows that lie densely."""
    random = torch.Generator().manual_seed(0)
    texts = [list(range(300)), list(range(400, 437))]
    rows = [torch.randn(2, len(text) + 1, 2, 64, generator=random).bfloat16() for text in texts]  # K and V of each
    sequences = [cache.open([*text, 7]) for text in texts]
    for sequence, text, (k, v) in zip(sequences, texts, rows):
        new = slice(sequence.length, len(text))
        cache.batch([sequence], [len(text) - sequence.length]).layer(0).write(k=k[new], v=v[new])
        sequence.commit(text[new])
    running = cache.persistent_batch(sequences, tokens_per_row=1)  # their last token is still to be computed
    view = running.extend().layer(0)
    k, v = torch.stack([one[:, -1] for one in rows], 1)
    view.write(k=k, v=v)  # first the rows of the new tokens, then attention over all
    q = torch.randn(2, 1, 8, 64, generator=random).bfloat16()
    found = flash_attn_with_kvcache(
        q, view["k"], view["v"], cache_seqlens=view.cache_seqlens, block_table=view.block_table, causal=True
    )
    worst = 0.0
    for row, (k, v) in enumerate(rows):
        k, v = (one.transpose(0, 1).repeat_interleave(4, 0) for one in (k, v))
        dense = torch.nn.functional.scaled_dot_product_attention(q[row, 0, :, None], k, v)[:, 0]
        worst = max(worst, float((found[row, 0] - dense).abs().max()))
    for sequence in sequences:
        sequence.close()
    return worst


def main() -> dict[int, dict[str, str]]:
    print("What flash_attention_2 demands:", *demands_of("flash_attention_2"), sep="\n  ")
    told = {}
    for block_size in (16, 256):
        cache = KVCache(Schema.from_hf_config(LLAMA), "4MiB", device="cpu", block_size=block_size, max_requests=4)
        view = cache.layer(0)  # there is no step yet: memory can be bound, and a graph warmed up
        told[block_size] = verdicts(view, torch.zeros(4, 8, dtype=torch.int32))
        print(f"\nblocks of {block_size} tokens, k {[*view['k'].shape]} with strides {view['k'].stride()}")
        for name, verdict in told[block_size].items():
            print(f"  {name:24} {verdict}")
        difference = decode_step(cache)
        print(f"  a decode step through the block table, beside dense rows: largest difference {difference}")
        assert difference == 0
        cache.check()
    return told


if __name__ == "__main__":
    main()
