"""vLLM's OpenAI server with a fault planted in it: ``FAULT OPTIONS``; "" plants none. It is run where vLLM is."""

from __future__ import annotations

import os
import runpy
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def plant(fault: str) -> None:
    """Change vLLM so that ``fault`` happens."""
    from vllm.v1.worker import gpu_model_runner

    Runner = gpu_model_runner.GPUModelRunner
    if fault == "rows":  # of a hit, the rows of one block are another's, in one layer
        update = Runner._update_states

        def update_states(self, scheduler_output):  # type: ignore[no-untyped-def]
            for new in scheduler_output.scheduled_new_reqs:
                if new.num_computed_tokens:
                    block = new.block_ids[0][0]
                    layer = self.kv_caches[-1]
                    _swap(layer, block)
            return update(self, scheduler_output)

        Runner._update_states = update_states
    elif fault == "key":  # keys of blocks do not depend on the blocks before
        from vllm.v1.core import kv_cache_utils

        hashed = kv_cache_utils.hash_block_tokens

        def hash_block_tokens(function, parent, tokens, extra=None):  # type: ignore[no-untyped-def]
            return hashed(function, parent and kv_cache_utils.NONE_HASH, tokens, extra)

        kv_cache_utils.hash_block_tokens = hash_block_tokens
    else:
        raise SystemExit(f"no fault {fault!r}")


def _swap(layer, block):  # type: ignore[no-untyped-def]
    """Turn the rows of ``block`` around."""
    import torch

    tensors = layer if isinstance(layer, list | tuple) else [layer]
    for tensor in tensors:
        axis = 0 if tensor.shape[0] != 2 or tensor.dim() < 5 else 1
        rows = tensor.select(axis, block)
        rows.copy_(torch.roll(rows, 7, dims=-2))


if __name__ == "__main__":
    fault = sys.argv.pop(1)
    if fault:
        plant(fault)
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
