#!/usr/bin/env bash
# mlx-lm 0.32.2 (mlx 0.32.4): what LRUPromptCache finds of a cached prompt if its last two tokens are others.
# Seen, tokens left to compute of 40, and of 200 (window of 64):
#   llama       2    2
#   gemma3      2  200   a rotating cache can go back only until its window is full
#   qwen3_next 40  200   a recurrent state cannot go back at all
# A prompt that only grows by 5 tokens leaves 5 to compute in all of them. So whether an edited prompt is found depends
# on its length, with no setting and no message. Random weights; nothing is fetched but the packages.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check mlx-lm==0.32.2 'mlx[cpu]==0.32.4'
"$folder/env/bin/python" - <<'PY'
import mlx.core as mx
from mlx_lm.models import gemma3_text, llama, qwen3_next
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

BASE = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=128, rms_norm_eps=1e-6,
    vocab_size=256,
)
MODELS = {
    "llama": (llama, dict(BASE, model_type="llama", num_hidden_layers=2)),
    "gemma3": (gemma3_text, dict(
        BASE, model_type="gemma3_text", num_hidden_layers=6, rope_theta=1e6, query_pre_attn_scalar=16, sliding_window=64,
        sliding_window_pattern=6,
    )),
    "qwen3_next": (qwen3_next, dict(
        BASE, model_type="qwen3_next", num_hidden_layers=4, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, linear_conv_kernel_dim=4, num_experts=0, num_experts_per_tok=0,
        decoder_sparse_step=1, shared_expert_intermediate_size=64, mlp_only_layers=[], moe_intermediate_size=64,
        rope_theta=1e4, partial_rotary_factor=0.5, max_position_embeddings=4096, norm_topk_prob=True,
        tie_word_embeddings=False, attention_bias=False, full_attention_interval=4,
    )),
}


def left(name, stored, prompt):
    """Return how many tokens of ``prompt`` are left to compute, if ``stored`` is cached."""
    module, config = MODELS[name]
    model = module.Model(module.ModelArgs.from_dict(config))
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array(stored)[None], cache=cache))
    prompts = LRUPromptCache()
    prompts.insert_cache("model", stored, cache)
    return len(prompts.fetch_nearest_cache("model", prompt)[1])


seen = {}
for name in MODELS:
    texts = [[i % 250 for i in range(n)] for n in (40, 200)]
    assert [left(name, text, [*text, *[7] * 5]) for text in texts] == [5, 5], name
    seen[name] = [left(name, text, [*text[:-2], 7, 7]) for text in texts]
    print(name, seen[name])
assert seen == {"llama": [2, 2], "gemma3": [2, 200], "qwen3_next": [40, 200]}, seen
PY
