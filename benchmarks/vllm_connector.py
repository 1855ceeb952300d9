"""Time to first token in vLLM's own engine, on a CPU: computed, from its own prefix cache, and loaded by the connector.

Run it in the environment that has vLLM: ``.venv-vllm/bin/python -m benchmarks vllm_connector --save``.

The model is a random Llama of 48 million parameters in bfloat16, on one thread; a prompt has 2,000 tokens. Each case starts
an engine, which is warm when it is measured: it has answered another prompt. ``seconds``: median over prompts from the
request to its first token, one request at a time. ``faster``: the time to compute, divided by ``seconds``.
``cached_tokens``: of each prompt. The system's page cache stays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.timing import Options, Row, tell

QUESTION = "How long does vLLM take to a first token if the connector finds the prompt on a disk?"
LENGTH, QUICK = 2_000, 300
MODEL: dict[str, Any] = dict(
    vocab_size=8192, hidden_size=768, intermediate_size=2304, num_hidden_layers=6, num_attention_heads=12,
    num_key_value_heads=4, head_dim=64, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    tie_word_embeddings=True,
)  # fmt: skip
CASES = (
    "computed, no connector", "computed and stored on a disk", "vLLM's own prefix cache", "loaded from a disk",
    "loaded from a disk, layer by layer", "loaded from host memory",
)  # fmt: skip
"""What is measured, in this order: the second case stores what the later ones load."""


def measure(options: Options) -> list[Row]:
    if find_spec("vllm") is None:
        return [{"who": "vllm", "absent": "no vLLM in this environment"}]
    found: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as root:
        save(Path(root) / "model", quick=options.quick)
        for number in range(options.runs):
            for case in CASES:
                if options.only in case:
                    found.setdefault(case, []).append(_process(Path(root), case, number, options))
    plain = median(row["seconds"] for row in found.get(CASES[0], ())) if CASES[0] in found else None
    return [
        {
            "case": case, "seconds": (taken := median(row["seconds"] for row in rows)),
            **({"faster": plain / taken} if plain else {}),
            "cached_tokens": rows[-1]["cached"],
        }
        for case, rows in found.items()
    ]  # fmt: skip


def save(folder: Path, *, quick: bool) -> None:
    """Write the model to ``folder``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    smaller = {"num_hidden_layers": 2, "hidden_size": 192, "intermediate_size": 256} if quick else {}
    config = AutoConfig.for_model("llama", **{**MODEL, **smaller})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def _process(root: Path, case: str, number: int, options: Options) -> Row:
    """Measure ``case`` in a process of its own. Round ``number`` has a folder of its own on the disk."""
    words = [sys.executable, "-m", "benchmarks.vllm_connector", str(root), case, str(number), str(options.quick)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def _one(root: Path, case: str, number: int, *, quick: bool) -> Row:
    """Start an engine, answer the prompts one after the other, and return the median seconds to a first token."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    from vllm import LLM, SamplingParams

    tiers = [f"disk:{root}/round{number}:1GiB"] if "disk" in case else ["host:1GiB"] if "host" in case else []
    extra = {"tiers": tiers, "load": "layerwise" if "layer" in case else "async"}
    transfer = dict(
        kv_connector="KvpagodaConnector", kv_connector_module_path="kvpagoda.adapters.vllm_connector", kv_role="kv_both",
        kv_connector_extra_config=extra,
    )  # fmt: skip
    length = QUICK if quick else LENGTH
    llm = LLM(
        str(root / "model"), skip_tokenizer_init=True, enforce_eager=True, max_model_len=4096, max_num_seqs=4, seed=0,
        max_num_batched_tokens=4096, kv_transfer_config=transfer if tiers else None,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    prompts = [np.random.default_rng(seed).integers(3, 8000, length).tolist() for seed in range(5)]

    def answer(prompt: list[int]) -> tuple[float, int]:
        start = time.perf_counter()
        found = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0]
        return time.perf_counter() - start, found.num_cached_tokens or 0

    answer(np.random.default_rng(99).integers(3, 8000, length).tolist())
    if "own prefix" in case or "host" in case:
        for prompt in prompts:
            answer(prompt)
        answer(prompts[-1][:64])  # one more step, in which the last blocks are handed over
        if "host" in case:
            time.sleep(0.5)
            llm.reset_prefix_cache()
    rows = [answer(prompt) for prompt in prompts]
    llm.llm_engine.engine_core.shutdown()
    return {"seconds": median(row[0] for row in rows), "cached": rows[0][1]}


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[2] in CASES:
        print(json.dumps(_one(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), quick=sys.argv[4] == "True")))
    else:
        tell("vllm_connector", QUESTION, measure)
