"""Tiny random models for the installed vLLM, and its whole engine on a CPU, started and stopped in this process.

As a program, an engine in a process of its own: ``FOLDER OPTIONS`` reads a line of JSON for each batch of prompts and prints a
line with tokens and cached tokens.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
os.environ.update(ENVIRONMENT)  # vLLM reads some of it when it is imported

SHAPE: dict[str, Any] = dict(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=8192, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
    initializer_range=0.3, num_hidden_layers=4,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(SHAPE),
    "gemma3_text": dict(
        SHAPE, num_hidden_layers=6, sliding_window=64, query_pre_attn_scalar=32,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    ),
    "gpt_oss": dict(
        SHAPE, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 2, num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "qwen3_next": dict(
        SHAPE, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, layer_types=["linear_attention"] * 3 + ["full_attention"], num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32, decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
}  # fmt: skip
BLOCK = {"llama": 128, "gemma3_text": 128, "gpt_oss": 128, "qwen3_next": 1152}
"""Tokens of a block, as vLLM chooses them on a CPU when states have four bytes a number (``STATES``)."""
STATES = "float32"
"""Of states: vLLM 0.32 chooses this alone where the CPU has AVX-512's bf16, and the model's own type elsewhere."""


def save(root: Path, kind: str, seed: int = 0, **changes: Any) -> str:
    """Write a model with random weights, and return its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    said = "-".join([kind, str(seed), *(f"{name}={value}" for name, value in changes.items())])
    folder = root / re.sub(r"[^\w=.-]+", "_", said)  # no pattern, as which vLLM would read it
    if not folder.exists():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(kind, **{**MODELS[kind], **changes})
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


class Run(NamedTuple):
    """The tokens of each answer, and how many tokens of each prompt were cached."""

    tokens: list[list[int]]
    cached: list[int]


class Engine:
    """vLLM's engine for the model in ``folder``. ``tiers``: of the connector; None: without it."""

    def __init__(
        self, folder: str, tiers: Sequence[Any] | None = None, *, blocks: int = 200, batched: int = 1024,
        options: dict[str, Any] | None = None, **arguments: Any,
    ) -> None:  # fmt: skip
        from vllm import LLM

        transfer = None
        if tiers is not None:
            transfer = dict(
                kv_connector="KvpagodaConnector", kv_connector_module_path="kvpagoda.adapters.vllm_connector",
                kv_role="kv_both", kv_connector_extra_config={"tiers": tiers, **(options or {})},
            )  # fmt: skip
        self.llm: Any = None
        try:
            self.llm = LLM(
                folder, skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=8, seed=0,
                max_num_batched_tokens=batched, num_gpu_blocks_override=blocks, kv_transfer_config=transfer,
                **{"enable_prefix_caching": True, "max_model_len": 4096, "mamba_ssm_cache_dtype": STATES, **arguments},
            )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def run(self, prompts: Sequence[Sequence[int]], count: int = 6, salt: str | None = None) -> Run:
        """Answer ``prompts``, all at once, with ``count`` tokens each."""
        from vllm import SamplingParams

        asked = [{"prompt_token_ids": [*prompt]} | ({} if salt is None else {"cache_salt": salt}) for prompt in prompts]
        greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        answers = self.llm.generate(asked, greedy, use_tqdm=False)
        return Run([[*one.outputs[0].token_ids] for one in answers], [one.num_cached_tokens for one in answers])

    @property
    def core(self) -> Any:
        """vLLM's EngineCore."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        """The worker's connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def tier(self) -> Any:
        """The counters of the first tier."""
        return self.connector.tier_stats()[0]

    def close(self) -> None:
        """Stop the engine; what it stores is stored then."""
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        ensure_kv_transfer_shutdown()
        gc.collect()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """See the top of this file."""
    folder, options = sys.argv[1], json.loads(sys.argv[2])
    with Engine(folder, **options) as engine:
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            print(json.dumps(engine.run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
