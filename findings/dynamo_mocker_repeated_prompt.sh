#!/usr/bin/env bash
# ai-dynamo-runtime 1.6.1, its mocker (`run_mocker_trace_replay`), blocks of 64 tokens, ample memory: the tokens that the second
# of two requests finds, one at a time, each prompt computed in one step.
# Seen:             256, the same   250, the same   256, then 320 that go on   250, then 314
#   vllm                     192             192                        256            192   whole blocks but the last token
#   trtllm                   256             192                        256            192   a prompt of whole blocks whole
#   vllm, state_cache          0               0                        256              0   where a step ended, at a block's end
# So for traffic that only repeats itself three models of one engine give 75, 100 and 0 %: figures of one do not stand for
# the others, and those of state_cache not for an engine that ends a step at a prompt's last block.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check ai-dynamo-runtime==1.6.1
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import json
from pathlib import Path

from dynamo._core import run_mocker_trace_replay

STATES = dict(state_cache={"bytes_per_request": 64}, kv_cache_bytes_per_token=1)
SETTINGS = {"vllm": {}, "trtllm": {"backend": "trtllm"}, "state_cache": STATES}


def reused(first, second, settings):
    """Return the tokens that a request of ``second`` tokens finds after one of ``first`` tokens that begins the same."""
    lines = [
        dict(timestamp=i, input_length=n, output_length=1, hash_ids=list(range(1, -(-n // 64) + 1)))
        for i, n in enumerate((first, second))
    ]
    Path("trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine = dict(backend="vllm", num_gpu_blocks=100, block_size=64, max_num_seqs=1, max_num_batched_tokens=1000)
    done = run_mocker_trace_replay(
        [Path("trace.jsonl")], {"engine": {**engine, **settings}}, trace_block_size=64, capture_per_request=True,
        replay_concurrency=1,
    )
    hits = {one["session_id"]: one["admission_history"][0]["reused_input_tokens"] for one in done.per_request}
    return hits["request_2"]


PAIRS = ((256, 256), (250, 250), (256, 320), (250, 314))
seen = {name: [reused(*pair, settings) for pair in PAIRS] for name, settings in SETTINGS.items()}
print(seen)
assert seen == {"vllm": [192, 192, 256, 192], "trtllm": [256, 192, 256, 192], "state_cache": [0, 0, 256, 0]}, seen
PY
