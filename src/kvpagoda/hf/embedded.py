"""The model that ``kvpagoda generate`` runs by default: DeepSeek-V4 from a config, tiny, random, over bytes.

It has the real mix of layers (sliding window, compressed sparse, heavily compressed) with the real ratios, window and
indexer; only the widths are small. Its text means nothing: it exercises the cache, without weights or a network.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

PROMPTS = (
    "The cache of a transformer grows with every token that it reads.",
    "Two prompts that begin alike ",
    "Two prompts that begin alike may end differently.",
    "A ring keeps the last 128 rows; a compressor folds four tokens, or a hundred and twenty-eight, into one entry. "
    * 3,
    "?",
)


def embedded_model(seed: int = 0) -> Any:
    """The tiny model, float32 on the CPU; the same for the same seed. Torch's own random state is left alone."""
    config = DeepseekV4Config(
        vocab_size=256, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=6, num_attention_heads=4, head_dim=32,
        q_lora_rank=32, partial_rotary_factor=0.25, num_experts_per_tok=2, n_routed_experts=4, n_shared_experts=1,
        compress_ratios=[0, 0, 4, 128, 4, 128, 0], num_hash_layers=2, sliding_window=128, o_groups=2, o_lora_rank=16,
        index_n_heads=32, index_head_dim=32, index_topk=16, hc_mult=2, max_position_embeddings=4096,
        initializer_range=0.2, eos_token_id=None, bos_token_id=None, dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = DeepseekV4ForCausalLM(config)
        for name, value in model.named_parameters():
            if name.endswith(("sinks", "position_bias")):
                value.normal_()
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):
                table.random_(0, config.n_routed_experts)
    return model.eval()


class ByteTokenizer:
    """Text to bytes and back: token id = byte value."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")
