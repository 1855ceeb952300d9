"""A plug-in of vLLM with faults, of which a file says which one strikes now: one server is audited without and with them.

vLLM calls ``plant`` in each of its processes, if the entry point of ``installed`` is on its path.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

_PLUGIN = "vllm-fault"


def installed(folder: Path) -> str:
    """Install the plug-in into ``folder``, and return what is then to be on vLLM's path."""
    plugin = folder / "vllm_fault-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_PLUGIN}\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nfault = vllm_fault:plant\n")
    choose(folder, "")
    return f"{folder}:{Path(__file__).parent}"


def choose(folder: Path, fault: str) -> None:
    """Let ``fault`` strike from now on: a key of ``FAULTS``, "loaded", or none."""
    (folder / "fault").write_text(fault)


def _chosen() -> str:
    return Path(str(distribution(_PLUGIN).locate_file("fault"))).read_text()


def _block(cache: Any, num_blocks: int, block_id: int) -> Any:
    """Return the rows of a block of a layer: (.., tokens, dim)."""
    return cache.select([*cache.shape].index(num_blocks), block_id)


def _turn(rows: Any) -> None:
    rows.copy_(rows.roll(7, dims=-2))


def turned(runner: Any, new: Any, scheduled: Any) -> None:
    """The rows of the first block of a hit stand at other places, in the last layer."""
    _turn(_block(runner.kv_caches[-1], runner.kv_cache_config.num_blocks, new.block_ids[-1][0]))


def edge(runner: Any, new: Any, scheduled: Any) -> None:
    """The oldest value in the window of the first token after a hit is that of the token before it, in one layer."""
    config = runner.kv_cache_config
    for group, ids in zip(config.kv_cache_groups, new.block_ids):
        if (window := getattr(group.kv_cache_spec, "sliding_window", None)) is not None:
            size = group.kv_cache_spec.block_size
            block, row = divmod(new.num_computed_tokens - window + 1, size)
            cache = runner.compilation_config.static_forward_context[group.layer_names[0]].kv_cache
            rows = _block(cache, config.num_blocks, ids[block])
            values = rows.view(len(rows), 2 * size, -1)[:, size:]  # keys, then values, of each head
            values[:, row] = values[:, row - 1]
            return


def uncopied(runner: Any, new: Any, scheduled: Any) -> None:
    """The states of a hit are not copied to the block in which they go on: it has what was there before."""
    size = next(
        group.kv_cache_spec.block_size
        for group in runner.kv_cache_config.kv_cache_groups
        if hasattr(group.kv_cache_spec, "mamba_type")
    )
    end = new.num_computed_tokens + scheduled.num_scheduled_tokens[new.req_id]
    runner.mamba_state_idx[new.req_id] = -(-end // size) - 1


FAULTS: dict[str, Callable[[Any, Any, Any], None]] = {"turned": turned, "edge": edge, "uncopied": uncopied}
"""Faults of hits: of the runner, a request that found something, and what is scheduled."""


def plant() -> None:
    """Plant the faults, which strike when they are chosen."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    update = GPUModelRunner._update_states

    def update_states(self: Any, scheduled: Any) -> Any:
        if (fault := FAULTS.get(_chosen())) is not None:
            for new in scheduled.scheduled_new_reqs:
                if new.num_computed_tokens:
                    fault(self, new, scheduled)
        return update(self, scheduled)

    GPUModelRunner._update_states = update_states
    _plant_loaded()


def _plant_loaded() -> None:
    """Plant "loaded": of several records that a tier gives back at once, the last one's rows stand at other places."""
    from kvpagoda.adapters.connector.worker import WorkerSide

    make, copy_in = WorkerSide.__init__, WorkerSide._copy_in

    def made(self: Any, specs: Any, identity: Any, grid: Any, caches: Any, num_blocks: int, **options: Any) -> None:
        make(self, specs, identity, grid, caches, num_blocks, **options)
        self.caches, self.num_blocks = caches, num_blocks

    def copied_in(self: Any, load: Any, ones: Any, *arguments: Any) -> None:
        copy_in(self, load, ones, *arguments)
        index, number = ones[-1]
        if len(ones) > 1 and _chosen() == "loaded":
            group = self._grid.groups[index]
            block_id = load.ids[index][self._grid.blocks(group, number)[0]]
            _turn(_block(self.caches[group.layers[-1]], self.num_blocks, block_id))

    WorkerSide.__init__, WorkerSide._copy_in = made, copied_in
