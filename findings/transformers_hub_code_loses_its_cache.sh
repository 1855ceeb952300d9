#!/usr/bin/env bash
# transformers 5.24.0 calls the cache of a forward pass `cache`, and 5.23.0 `past_key_values`. A model of one's own, or code from the
# hub, whose forward still names it `past_key_values` and takes other arguments by `**kwargs`, gets `cache=` from `generate`, ignores
# it, and computes each new token without its past: other tokens than without a cache, and no warning.
# Seen: 5.23.0 equal tokens with and without a cache; 5.24.0 other tokens with one (greedy, the same random weights).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip=("$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.3.5
cat > "$folder/run.py" <<'PY'
import inspect
import warnings

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

NAME = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


class OwnCode(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None, **kwargs):
        given = {} if past_key_values is None else {NAME: past_key_values}
        out = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache, **given
        )
        kept = {NAME: out[NAME]} if NAME in out else {}
        return CausalLMOutputWithPast(logits=self.lm_head(out.last_hidden_state[:, -1:]), **kept)


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    initializer_range=0.3,
)
model, ids, answers = OwnCode(config).eval(), torch.arange(5, 25)[None], []
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for use_cache in (False, True):
        out = model.generate(ids, use_cache=use_cache, max_new_tokens=6, do_sample=False, pad_token_id=0)
        answers.append(out[0, 20:].tolist())
about = [one for one in told if "past_key_values" in str(one.message)]
print(transformers.__version__, "equal" if answers[0] == answers[1] else "other tokens", "warned" if about else "silent")
PY
seen=""
for version in 5.23.0 5.24.0; do
    "${pip[@]}" "transformers==$version"
    seen+="$("$folder/env/bin/python" "$folder/run.py" 2> "$folder/err" | tail -1);"
done
echo "$seen"
test "$seen" = "5.23.0 equal silent;5.24.0 other tokens silent;"
