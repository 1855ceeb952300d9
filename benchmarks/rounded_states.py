"""What do checkpoints in fewer bytes cost in logits and tokens?

Models of transformers with random weights, three layers with states for one with attention where they have both. A text of
192 tokens is computed; then a text with the same first 160 tokens and 32 others starts from the checkpoint after these 160.
Compared with a cache that keeps float32 are the logits after its prompt, and the 32 tokens that follow greedily.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.timing import Options, Row, tell
from kvpagoda.errors import MissingExtra
from kvpagoda.schema.at_rest import FORMATS

QUESTION = "What do checkpoints in fewer bytes cost in logits and tokens?"
_BASE: dict[str, Any] = dict(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=4096,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": dict(
        head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
        linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        shared_expert_intermediate_size=64, decoder_sparse_step=1,
    ),
    "bamba": dict(
        attn_layer_indices=[2], mamba_d_state=64, mamba_d_conv=4, mamba_expand=2, mamba_n_heads=8, mamba_d_head=32,
        mamba_n_groups=1, mamba_chunk_size=32,
    ),
    "mamba2": dict(num_heads=8, head_dim=32, state_size=64, expand=2, conv_kernel=4, n_groups=1, chunk_size=32),
}  # fmt: skip
COMMON, OWN, NEW = 160, 32, 32


def measure(options: Options) -> list[Row]:
    with MissingExtra.unless("transformers", "this question needs transformers; pip install 'kvpagoda[hf]'"):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    rows, seeds = list[Row](), range(1 if options.quick else 8)
    for name, fields in MODELS.items():
        if options.only not in name:
            continue
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**_BASE, **fields}), dtype=torch.float32)
        exact = [_run(model, None, seed) for seed in seeds]
        for format in FORMATS:
            begun = time.process_time()
            found = [_run(model, format, seed) for seed in seeds]
            errors = [one[0] - other[0] for one, other in zip(found, exact)]
            rows.append(
                {
                    "model": name,
                    "format": format,
                    "rms": float(np.sqrt(np.mean(np.square(errors)))),
                    "most": float(np.abs(errors).max()),
                    "spread": float(np.std([other[0] for other in exact])),
                    "same_percent": 100 * float(np.mean([one[1] == other[1] for one, other in zip(found, exact)])),
                    "seconds": time.process_time() - begun,
                }
            )
    return rows


def _run(model: Any, format: str | None, seed: int) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Return the logits after a prompt that starts from a checkpoint in ``format``, and the tokens that follow."""
    from kvpagoda import Retention
    from kvpagoda.hf import Generator

    random = np.random.default_rng(seed)
    text = random.integers(1, 500, COMMON + OWN)
    other = np.concatenate((text[:COMMON], random.integers(1, 500, OWN)))
    generator = Generator(
        model, "64MiB", retention=Retention(checkpoint_every=1, checkpoint_format=format), max_requests=2
    )
    generator.generate([text.tolist()], 1)
    seen: list[Any] = []
    own = generator._runner.step

    def step(*arguments: Any) -> Any:
        seen.append(own(*arguments))
        return seen[-1]

    generator._runner.step = step  # type: ignore[method-assign]
    tokens = generator.generate([other.tolist()], NEW)[0]
    assert generator.stats().cached_tokens == COMMON
    return seen[0][-1].numpy(), tokens


if __name__ == "__main__":
    tell("rounded_states", QUESTION, measure)
