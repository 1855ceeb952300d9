"""A plug-in of vLLM with a fault: rows of a block that a request found cached stand at other places.

vLLM calls ``plant`` in each of its processes, if the entry point of ``installed`` is on its path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

BLOCKS = 60
"""Blocks of the cache, as ``--num-gpu-blocks-override`` says."""


def installed(folder: Path) -> str:
    """Install the plug-in into ``folder``, and return what is then to be on vLLM's path."""
    plugin = folder / "fault-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: fault\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nfault = vllm_fault:plant\n")
    return f"{folder}:{Path(__file__).parent}"


def plant() -> None:
    """Turn the rows of the first block of every hit, in the last layer."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    update = GPUModelRunner._update_states

    def update_states(self: Any, scheduled: Any) -> Any:
        for new in scheduled.scheduled_new_reqs:
            if new.num_computed_tokens:
                rows = self.kv_caches[-1]
                one = rows.select([*rows.shape].index(BLOCKS), new.block_ids[-1][0])
                one.copy_(one.roll(7, dims=-2))
        return update(self, scheduled)

    GPUModelRunner._update_states = update_states
