"""Smaller groups of layers in vLLM's memory, with vLLM's own pool, tables and schedulers.

One id names a block of any group, so vLLM makes all blocks equally large: a block of attention as large as a state, which
in Qwen3-Next is 1,056 tokens, and groups of equally many layers. Here a group of states has as many as a smaller block
holds, side by side, and windows share groups without padding layers::

    vLLM    id 7   attention  | layer 0: 1056 tokens | layer 1 .. | .. layer 11 |     12 pages
            id 8   states     | layer 0  | layer 1   | ..         | .. layer 11 |     12 states, 3 such groups
    here    id 7   attention  | layer 0: 176 tokens  | layer 1 .. | .. layer 11 |     12 smaller pages
            id 8   states     | layer 0             | layer 1             | - |        2 states, 18 such groups
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllm.model_executor.layers.mamba import abstract
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MambaSpec
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

from kvpagoda.adapters.vllm.group_sizes import LEAST_GAIN, StateGroups, groups_of_states, held_nbytes, layers_per_group
from kvpagoda.adapters.vllm.log import announce
from kvpagoda.errors import BadInput
from kvpagoda.units import align_up, ceil_div

_FULL = {"FullAttentionSpec", "MLAAttentionSpec"}
_ALIKE = {"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"}
"""Kinds whose blocks may lie in one another's place without being looked at. All others stay as vLLM has them."""
_STATE_ALIGNMENT = 128
"""Bytes at multiples of which a state begins: a kernel loads 16 at once, a cache line has 128."""
_CONNECTOR = "KvpagodaConnector"
_HINT = 'leave it out, or start vLLM without "memory"'

Specs = Mapping[str, Any]
"""Name of a layer -> vLLM's spec of it."""


def refuse(vllm_config: Any) -> None:
    """Raise BadInput for what nobody has tried with smaller groups."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    asked = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--decode-context-parallel-size": parallel.decode_context_parallel_size > 1,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
        "--speculative-config": vllm_config.speculative_config is not None,
        "--disable-hybrid-kv-cache-manager": bool(vllm_config.scheduler_config.disable_hybrid_kv_cache_manager),
        "--kv-cache-dtype-skip-layers": bool(cache.kv_cache_dtype_skip_layers),
        "--use-replayssm": bool(cache.use_replayssm),
        "hisparse in --attention-config": vllm_config.attention_config.hisparse_config is not None,
    }
    for option, is_asked in asked.items():
        if is_asked:
            text = f'"memory" of kvpagoda in --additional-config does not go with {option}'
            raise BadInput.with_hint(text, _HINT, needed="memory", available=option)


# -- states beside attention ---------------------------------------------------------------------------------------------


def align(vllm_config: Any, own: Callable[[], None]) -> None:
    """Choose the tokens of a block. ``own``: vLLM's choice, which stays where smaller groups save nothing.

    Raises:
        BadInput: what ``refuse`` names, or kernels that take no block in which a state has room.
    """
    refuse(vllm_config)
    cache = vllm_config.cache_config
    if cache.mamba_cache_mode == "all":
        text = "--mamba-cache-mode all keeps a state after every block, of which smaller ones are more"
        raise BadInput.with_hint(text, f"use align, {_HINT}", needed="align", available="all")
    least = cache.block_size if cache.user_specified_block_size else 1
    own()
    specs = get_kv_cache_spec(vllm_config)
    chosen = states_beside(specs, least_block(vllm_config, specs, least))
    if chosen is None:
        return
    cache.block_size = chosen.block_size
    cache.mamba_page_size_padded = None
    if cache.mamba_cache_mode == "align":
        cache.mamba_block_size = chosen.block_size


def least_block(vllm_config: Any, specs: Specs, least: int = 1) -> int:
    """Return the tokens of which a block has a multiple: of ``least``, of ``--prefix-match-unit``, of what every kernel
    takes, and of where it may leave a state inside of a prompt.

    Raises:
        BadInput: kernels that take blocks of some sizes alone: blocks that do not lie side by side cannot be divided.
    """
    units = [least, vllm_config.cache_config.prefix_match_unit or 1]
    layers = vllm_config.compilation_config.static_forward_context
    for backend in {layers[name].get_attn_backend() for name, spec in specs.items() if isinstance(spec, AttentionSpec)}:
        sizes = backend.get_supported_kernel_block_sizes()
        bases = [size.base for size in sizes if isinstance(size, MultipleOf)]
        if sizes and not bases:
            raise BadInput.with_hint(
                f"kernels of {backend.get_name()} take blocks of {sizes} tokens; smaller groups need one that takes multiples",
                "--attention-backend FLASH_ATTN or TRITON_ATTN, where they do, or start vLLM without \"memory\"",
                needed="MultipleOf", available=tuple(sizes),
            )  # fmt: skip
        units += [min(bases)] if bases else []
    aligned = getattr(abstract, "get_mamba_prefill_checkpoint_alignment", None)  # 0.33
    if aligned is not None and vllm_config.cache_config.mamba_cache_mode == "align":
        units.append(aligned(vllm_config) or 1)
    return math.lcm(*units)


def states_beside(specs: Specs, unit: int) -> StateGroups | None:
    """Return smaller groups for ``specs`` with blocks of a multiple of ``unit`` tokens; None: vLLM's hold fewer bytes.

    None also unless the layers are of two kinds, one with attention to the whole text and one with states.
    """
    attention, states = _split(specs)
    if not states:
        return None
    spec, state = next(iter(attention.values())), next(iter(states.values()))

    def block_nbytes(size: int) -> int:
        return len(attention) * int(replace(spec, block_size=size).page_size_bytes)

    sizes = range(unit, max(unit, spec.block_size) + 1, unit)
    chosen = groups_of_states(len(states), _state_nbytes(state), block_nbytes, sizes)
    if chosen is None:
        return None
    layers = layers_of_vllm([len(attention), len(states)])
    theirs = held_nbytes(ceil_div(len(states), layers), layers * spec.page_size_bytes)
    ours = held_nbytes(chosen.num_groups, block_nbytes(chosen.block_size))
    return chosen if ours <= (1 - LEAST_GAIN) * theirs else None


def layers_of_vllm(counts: list[int]) -> int:
    """Return how many layers vLLM's own groups have."""
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)


def _split(specs: Specs) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the layers with attention and those with states, both in their order; none unless all of each are alike, and
    the former see the whole text."""
    attention = {name: spec for name, spec in specs.items() if type(spec).__name__ in _FULL}
    states = {name: spec for name, spec in specs.items() if isinstance(spec, MambaSpec)}
    is_whole = len(attention) + len(states) == len(specs) and len({*attention.values()}) == len({*states.values()}) == 1
    if not is_whole or any(spec.page_size_padded is not None for spec in attention.values()):
        return {}, {}
    return attention, states


def _state_nbytes(spec: Any) -> int:
    """Return the bytes from one state to the next."""
    return align_up(spec.state_content_size_bytes, _STATE_ALIGNMENT)


# -- groups ----------------------------------------------------------------------------------------------------------------


def groups_of(vllm_config: Any, specs: Specs, own: Callable[[Any, Specs], list[Any]]) -> list[Any]:
    """Return vLLM's groups for ``specs``; ``own`` makes those that vLLM would have, which stay where ours save nothing.

    Raises:
        BadInput: what ``refuse`` names, a layout or a connector that cannot read blocks of several kinds side by side.
    """
    refuse(vllm_config)
    groups = _of_states(vllm_config, specs) or _of_windows(specs)
    if groups is None:
        groups = own(vllm_config, specs)
        announce(f"leaves vLLM's memory as it is, in {len(groups)} groups: smaller ones save nothing here")
        return groups
    layers, spec = [len(group.layer_names) for group in groups], groups[0].kv_cache_spec
    announce(
        f"divides vLLM's memory into {len(groups)} groups of {min(layers)} to {max(layers)} layers, in blocks of "
        f"{spec.block_size} tokens"
    )
    return groups


def _of_states(vllm_config: Any, specs: Specs) -> list[Any] | None:
    """Return one group of attention and several of states, if ``align`` chose their blocks; else None."""
    attention, states = _split(specs)
    room = sum(spec.page_size_bytes for spec in attention.values())
    per_group = room // _state_nbytes(next(iter(states.values()))) if states else 0
    if not per_group or len({spec.page_size_bytes for spec in specs.values()}) == 1:
        return None
    connector = vllm_config.kv_transfer_config and vllm_config.kv_transfer_config.kv_connector
    if connector not in (None, _CONNECTOR):
        text = f"connector {connector} was not tried with blocks of several kinds side by side"
        raise BadInput.with_hint(text, _HINT, needed=_CONNECTOR, available=connector)
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    if not layout.is_block_compact:
        text = f"in the layout {layout.name} a block's bytes are not together, which smaller groups need"
        raise BadInput.with_hint(text, _HINT, needed="is_block_compact", available=layout.name)
    number = ceil_div(len(states), per_group)
    names = [[*attention], *([*states][start::number] for start in range(number))]
    if next(iter(specs)) in states:
        names = names[1:] + names[:1]  # in the order of the model, as vLLM's
    return [KVCacheGroupSpec(layers, specs[layers[0]]) for layers in names]


def _of_windows(specs: Specs) -> list[Any] | None:
    """Return groups of equally many layers with the fewest padding layers, for layers whose blocks have the same bytes.
    None if these are vLLM's, or if there is one kind of layers, or one that is not known."""
    kinds = dict[Any, list[str]]()
    for name, spec in specs.items():
        kinds.setdefault(spec, []).append(name)
    same = {(spec.block_size, spec.page_size_bytes) for spec in kinds}
    if len(kinds) < 2 or len(same) > 1 or not {type(spec).__name__ for spec in kinds} <= _ALIKE:
        return None
    counts = [len(layers) for layers in kinds.values()]
    size, theirs = layers_per_group(counts), layers_of_vllm(counts)
    if sum(align_up(count, size) for count in counts) >= sum(align_up(count, theirs) for count in counts):
        return None
    groups = []
    for spec, layers in kinds.items():
        number = ceil_div(len(layers), size)
        groups += [KVCacheGroupSpec(layers[start::number], spec) for start in range(number)]
    return groups


# -- places ----------------------------------------------------------------------------------------------------------------


def is_packed(groups: list[Any]) -> bool:
    """Return whether ``groups`` are those of ``states_beside``, which vLLM cannot place."""
    kinds = {(isinstance(group.kv_cache_spec, MambaSpec), group.kv_cache_spec.page_size_bytes) for group in groups}
    return len(kinds) == len({nbytes for _, nbytes in kinds}) == 2 and {is_state for is_state, _ in kinds} == {
        True,
        False,
    }


def id_nbytes(groups: list[Any]) -> int:
    """Return the bytes of the largest group's block, which every id takes."""
    most = max(len(group.layer_names) * _page_nbytes(group.kv_cache_spec) for group in groups)
    return align_up(most, math.lcm(*(group.kv_cache_spec.get_block_stride_alignment() for group in groups)))


def config_of(vllm_config: Any, groups: list[Any], num_blocks: int) -> Any:
    """Return vLLM's configuration of ``num_blocks`` ids: one allocation, in which each group begins at byte 0."""
    cache = vllm_config.cache_config
    if cache.num_gpu_blocks_override is not None:
        num_blocks = cache.num_gpu_blocks_override
    stride = id_nbytes(groups)
    tensors = [
        KVCacheTensor(
            size=num_blocks * stride, layers=[*group.layer_names], layer_stride=_page_nbytes(group.kv_cache_spec),
            block_stride=stride,
        )
        for group in groups
    ]  # fmt: skip
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups,
        prefix_cache_retention_interval=cache.prefix_cache_retention_interval,
    )  # fmt: skip


def _page_nbytes(spec: Any) -> int:
    """Return the bytes from one layer's block to the next one's."""
    return _state_nbytes(spec) if isinstance(spec, MambaSpec) else int(spec.page_size_bytes)
