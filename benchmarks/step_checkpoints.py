"""What does it save that a step leaves states at positions inside of it?

Steps: a prompt of 8,192 tokens of Qwen3-Next-80B's schema, in chunks of 2,048, without memory. Time to the first token: a
small Qwen3-Next of transformers (random weights, hidden size 256, 4 layers), a prompt of 1,024 tokens in chunks of 512; median
of the runs, in turns. "every": a checkpoint at every so many tokens besides those that a cache keeps by itself.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.one_budget import QWEN3_NEXT_80B, schema_of
from benchmarks.timing import Options, Row, medians, tell
from kvpagoda import KVCache, Limits, Retention
from kvpagoda.errors import MissingExtra

QUESTION = "What does it save that a step leaves states at positions inside of it?"
EVERY = (0, 1024, 256)
PROMPT, CHUNK, RUN_PROMPT, RUN_CHUNK = 8192, 2048, 1024, 512
_SMALL: dict[str, Any] = dict(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64,
    linear_value_head_dim=64, linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128,
    shared_expert_intermediate_size=128, decoder_sparse_step=1, max_position_embeddings=8192,
)  # fmt: skip


def measure(options: Options) -> list[Row]:
    return [*_steps(), *_first_token(options)]


def _steps() -> list[Row]:
    rows = list[Row]()
    for every in EVERY:
        for named in (0, 64):
            cache = KVCache(
                schema_of(QWEN3_NEXT_80B), "40GiB", "none", max_requests=4, block_size=16,
                limits=Limits(step_tokens=CHUNK, step_checkpoints=named), retention=Retention(checkpoint_every=every // 16),
            )  # fmt: skip
            prompt, steps = np.arange(PROMPT, dtype=np.int32) % 500, 0
            begun = time.perf_counter()
            with cache.open(prompt, capacity=0, reserve=PROMPT) as sequence:
                while sequence.length < PROMPT:
                    n = min(CHUNK, PROMPT - sequence.length, cache.step_limit(sequence))
                    sequence.extend(n)
                    cache.batch([sequence], [n])
                    sequence.commit(prompt[sequence.length : sequence.length + n], sequence.step_checkpoints)
                    steps += 1
            assert not cache.stats().passed_boundaries
            rows.append(
                {
                    "what": "steps of 8,192 tokens",
                    "every": every,
                    "inside": bool(named),
                    "steps": steps,
                    "us": 1e6 * (time.perf_counter() - begun),
                }
            )
    return rows


def _first_token(options: Options) -> list[Row]:
    with MissingExtra.unless("transformers", "this question needs transformers; pip install 'kvpagoda[hf]'"):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from kvpagoda.hf import Generator
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_next", **_SMALL)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    rows, random = list[Row](), np.random.default_rng(0)
    for every in EVERY[:: 2 if options.quick else 1]:
        generators = {
            named: Generator(
                model, "256MiB", prefill_chunk=RUN_CHUNK, max_requests=2, limits=Limits(step_checkpoints=named),
                retention=Retention(checkpoint_every=every // 16),
            )
            for named in (0, 16)
        }  # fmt: skip
        length = 128 if options.quick else RUN_PROMPT
        for generator in generators.values():
            generator.generate([random.integers(1, 500, length).tolist()], 1)

        def first(generator: Any, length: int = length) -> Any:
            return lambda: generator.generate([random.integers(1, 500, length).tolist()], 1)

        taken = medians({str(bool(named)): first(one) for named, one in generators.items()}, options.runs)
        rows += [
            {"what": "first token", "every": every, "inside": inside == "True", "seconds": seconds}
            for inside, seconds in taken.items()
        ]
    return rows


if __name__ == "__main__":
    tell("step_checkpoints", QUESTION, measure)
