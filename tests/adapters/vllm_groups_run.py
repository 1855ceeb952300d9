"""An engine of vLLM with a tiny model, in a process of its own, under churn: KIND CHANGES OPTIONS, as ``main`` reads them.

Prints a line of JSON: the tokens of every request that ended, for each of them the tokens that were as likely but for
rounding, the groups and the block size of vLLM's memory, how many requests were preempted, and how many tokens were cached.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROUNDING = 0.25
"""Nats: log-probabilities of the models here differ by multiples of 1/32, as logits in bfloat16 do."""


def workload(llm: Any) -> dict[str, Any]:
    """Serve waves of requests that share beginnings; some are aborted, some preempted, and the cache is reset once."""
    import numpy as np
    from vllm import SamplingParams

    engine, random = llm.llm_engine, np.random.default_rng(5)
    scheduler = engine.engine_core.engine_core.scheduler if hasattr(engine.engine_core, "engine_core") else None
    preempted = 0
    if scheduler is not None:
        own = scheduler._preempt_request

        def preempt(*arguments: Any, **more: Any) -> Any:
            nonlocal preempted
            preempted += 1
            return own(*arguments, **more)

        scheduler._preempt_request = preempt

    def tokens(low: int, high: int) -> list[int]:
        return [*map(int, random.integers(3, 500, int(random.integers(low, high))))]

    heads, ended, cached = [tokens(150, 500) for _ in range(3)], dict[str, list[int]](), 0
    likely = dict[str, list[list[int]]]()
    for wave in range(3):
        for number in range(10):
            name, prompt = f"{wave}.{number}", [*heads[number % 3], *tokens(5, 60)] if number % 4 else tokens(10, 90)
            sampling = SamplingParams(
                temperature=0, max_tokens=int(random.integers(20, 120)), ignore_eos=True, detokenize=False, logprobs=4
            )
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        aborted, steps = [f"{wave}.3", f"{wave}.7"], 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                name = output.request_id.split("-")[0]
                if output.finished and name not in aborted:
                    ended[name] = [*output.outputs[0].token_ids]
                    likely[name] = [
                        [token for token, one in top.items() if one.logprob >= top[ended[name][at]].logprob - ROUNDING]
                        for at, top in enumerate(output.outputs[0].logprobs)
                    ]
                    cached += output.num_cached_tokens or 0
            if hasattr(getattr(scheduler, "kv_cache_manager", None), "check"):
                scheduler.kv_cache_manager.check()
            steps += 1
            if steps == 3:
                engine.abort_request(aborted)
        if wave == 1:
            assert llm.reset_prefix_cache()
    found: dict[str, Any] = {"tokens": ended, "likely": likely, "preempted": preempted, "cached": cached}
    if scheduler is not None:
        groups = scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
        found |= {"groups": [len(group.layer_names) for group in groups], "block_size": scheduler.block_size}
        found["manager"] = type(scheduler.kv_cache_manager).__module__.partition(".")[0]
    return found


def plant(fault: str) -> None:
    """Plant "overlap": states lie half as far apart as they are large; "short": a state takes fewer ids than its bytes
    need; "hashes": nothing refuses hashes inside of blocks."""
    from kvpagoda.adapters.vllm import manager, memory, spans

    if fault == "overlap":
        own = memory._page_nbytes
        memory._page_nbytes = lambda spec: own(spec) // (2 if type(spec).__name__ == "MambaSpec" else 1)
    elif fault == "short":
        units = manager.units_per_state
        manager.units_per_state = lambda groups: units(groups) - 9
    elif fault == "hashes":
        memory.refuse_beside_exact = lambda *_: None
        spans.Spans._check_hashes = lambda *_: None


def main() -> None:
    """KIND: a model of ``benchmarks.vllm_memory``; CHANGES: of its config; OPTIONS: of vLLM's ``LLM``, "processes", and
    "fault": see ``plant``."""
    kind, changes, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    for name in {"additional_config", "kv_transfer_config"} & {*options}:
        options[name] = json.loads(options[name])
    processes, fault = options.pop("processes", 1), options.pop("fault", None)
    from benchmarks.vllm_engine import _fill
    from benchmarks.vllm_memory import SERVED

    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0" if processes == 1 else "1", OMP_NUM_THREADS="1", VLLM_TARGET_DEVICE="cpu"
    )
    if processes > 1:
        options["distributed_executor_backend"] = "mp"
    if fault:
        plant(fault)
    from vllm import LLM

    usual = dict(
        load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=8, seed=0, block_size=32,
        max_num_batched_tokens=1024, max_model_len=704, enable_prefix_caching=True, async_scheduling=False,
        dtype="bfloat16" if kind == "Qwen3-Next-like" else "float32", mamba_ssm_cache_dtype="float32",  # as in tiny_vllm
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**SERVED[kind], **changes}))
        llm = LLM(folder, **{**usual, **options})
    llm.apply_model(_fill)
    print(json.dumps(workload(llm)), flush=True)


if __name__ == "__main__":
    main()
