#!/usr/bin/env bash
# mlx-lm 0.32.2 with mlx 0.32.4 on a CPU, its server, a Llama with random weights, temperature 0, 5 `top_logprobs`.
# Seen: of 64 tokens of 8 answers all 64 entries of `choices[0].logprobs.content` have the id and the log-probability of
# another token than the one that was chosen, whose text stands in `choices[0].text`: an entry is the first of its
# `top_logprobs`, and these are in no order (64 of 64). The chosen token is the one with the largest `logprob` of the list.
# So a sum of `content[i].logprob` is not the log-probability of the answer, and two servers that are compared by
# `content[i].id` differ though their answers are the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check \
    "mlx[cpu]==0.32.4" mlx-lm==0.32.2 transformers==5.23.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - <<'PY'
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CONFIG = dict(
    model_type="llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=128,
    rms_norm_eps=1e-6, vocab_size=512, rope_theta=1e4, max_position_embeddings=4096, tie_word_embeddings=False,
    num_hidden_layers=2, bos_token_id=1, eos_token_id=2,
)
folder = Path("model")
folder.mkdir()
mx.random.seed(0)
model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
drawn = tree_map(lambda one: mx.random.normal(one.shape) * 0.3 if one.ndim > 1 else one, model.parameters())
mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(drawn)), metadata={"format": "mlx"})
(folder / "config.json").write_text(json.dumps(CONFIG))
names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
names += [f"<{i}>" for i in range(len(names), 512)]
tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
fast.save_pretrained(folder)

with socket.socket() as free:
    free.bind(("localhost", 0))
    port = str(free.getsockname()[1])
url = f"http://localhost:{port}"
server = subprocess.Popen(
    [sys.executable, "-m", "mlx_lm", "server", "--model", str(folder), "--port", port, "--host", "localhost"],
    stderr=subprocess.DEVNULL,
)
try:
    for _ in range(300):
        try:
            urlopen(f"{url}/health", timeout=5)
            break
        except OSError:
            time.sleep(0.2)
    others = below = total = said = firsts = 0
    for letter in "abcdefgh":
        body = dict(model=str(folder), prompt=letter * 9, max_tokens=8, temperature=0, logprobs=True, top_logprobs=5)
        request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        choice = json.load(urlopen(request, timeout=300))["choices"][0]
        likeliest = [max(entry["top_logprobs"], key=lambda one: one["logprob"]) for entry in choice["logprobs"]["content"]]
        said += tokenizer.decode([one["id"] for one in likeliest]) == choice["text"]
        firsts += all(entry["id"] == entry["top_logprobs"][0]["id"] for entry in choice["logprobs"]["content"])
        for entry, best in zip(choice["logprobs"]["content"], likeliest):
            total += 1
            others += entry["id"] != best["id"]  # at temperature 0 the likeliest is the one that was chosen
            below += [one["logprob"] for one in entry["top_logprobs"]] != sorted(
                (one["logprob"] for one in entry["top_logprobs"]), reverse=True
            )
finally:
    server.terminate()
    server.wait(30)
print(f"{total} tokens: {others} entries of other tokens, {below} lists in no order; of 8 answers {said} are the likeliest")
print(f"tokens of the lists, and in {firsts} each entry is the first of its list")
assert total == 64 and others > 32 and below > 32 and said == firsts == 8
PY
