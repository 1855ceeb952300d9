"""A plug-in of vLLM that plants the fault which ``KVPAGODA_FAULT`` names; vLLM calls ``plant`` in each of its processes."""

from __future__ import annotations

import os
from typing import Any

BLOCKS = 60
"""Blocks of the cache, as ``--num-gpu-blocks-override`` says."""


def plant() -> None:
    """Change vLLM so that the fault happens."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    fault = os.environ["KVPAGODA_FAULT"]
    if fault == "rows":  # of a hit, in the last layer that has some, rows of one block stand at another place
        update = GPUModelRunner._update_states

        def update_states(self: Any, scheduled: Any) -> Any:
            for new in scheduled.scheduled_new_reqs:
                if new.num_computed_tokens:
                    _turn(self.kv_caches[-1], new.block_ids[-1][0])
            return update(self, scheduled)

        GPUModelRunner._update_states = update_states
    elif fault == "key":  # the key of a block does not depend on the blocks before it
        hashed = kv_cache_utils.hash_block_tokens

        def hash_block_tokens(function: Any, parent: Any, *rest: Any) -> Any:
            return hashed(function, None, *rest)

        kv_cache_utils.hash_block_tokens = hash_block_tokens
    elif fault == "state":  # a hit begins with states that are a little old
        update = GPUModelRunner._update_states

        def update_states(self: Any, scheduled: Any) -> Any:
            for new in scheduled.scheduled_new_reqs:
                if new.num_computed_tokens:
                    for states in (one for one in self.kv_caches if isinstance(one, list | tuple)):
                        for group in new.block_ids:
                            for block in group:
                                if 0 < block < len(states[-1]):
                                    states[-1][block].mul_(0.9)
            return update(self, scheduled)

        GPUModelRunner._update_states = update_states
    else:
        raise SystemExit(f"no fault {fault!r}")


def _turn(rows: Any, block: int) -> None:
    """Turn the rows of ``block`` around."""
    axis = [*rows.shape].index(BLOCKS)
    one = rows.select(axis, block)
    one.copy_(one.roll(7, dims=-2))
