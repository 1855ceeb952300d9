"""Smaller groups of layers in vLLM's memory, with vLLM's own pool, tables and schedulers.

One id names a block of any group, so vLLM makes all blocks equally large: a block of attention as large as a state, which
in Qwen3-Next is 1,056 tokens, and groups of equally many layers. Here a group of states has as many as a smaller block
holds, side by side, and windows share groups without padding layers::

    vLLM    id 7   attention  | layer 0: 1056 tokens | layer 1 .. | .. layer 11 |     12 pages
            id 8   states     | layer 0  | layer 1   | ..         | .. layer 11 |     12 states, 3 such groups
    here    id 7   attention  | layer 0: 176 tokens  | layer 1 .. | .. layer 11 |     12 smaller pages
            id 8   states     | layer 0             | layer 1             | - |        2 states, 18 such groups

That is ``"groups"``. In ``"exact"`` all states are one group, and take the ids that their bytes need, which is ours to hand
out (``spans``). A block of attention has the tokens that a kernel takes::

    exact   id 7   attention  | layer 0: 64 tokens | .. layer 11 |                    12 pages: a unit
            id 49 .. 97       | the states of all 36 layers      |                    a run of 49 units, named by the first
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MambaSpec

from kvpagoda.adapters.vllm.group_sizes import LEAST_GAIN, StateGroups, groups_of_states, held_nbytes, layers_per_group
from kvpagoda.adapters.vllm.log import announce
from kvpagoda.adapters.vllm.options import Options
from kvpagoda.errors import BadInput
from kvpagoda.units import align_up, ceil_div

_FULL = {"FullAttentionSpec", "MLAAttentionSpec"}
_ALIKE = {"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"}
"""Kinds whose blocks may lie in one another's place without being looked at. All others stay as vLLM has them."""
_STATE_ALIGNMENT = 128
"""Bytes at multiples of which a state begins: a kernel loads 16 at once, a cache line has 128."""
_CONNECTOR = "KvpagodaConnector"
_SCHEDULER = "kvpagoda.adapters.vllm.Scheduler"
_EXACT_TOKENS = 64
"""Tokens of a block in "exact", unless ``--block-size`` says another number: kernels of attention on GPUs take it."""
_HINT = 'leave it out, or start vLLM without "memory"'
_EXACT_HINT = 'leave it out, or take "memory": "groups"'

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


def is_exact(vllm_config: Any) -> bool:
    """Return whether ``vllm_config`` asks for states in runs of units. Raises BadInput for a wrong option."""
    return Options.of(getattr(vllm_config, "additional_config", None)).memory == "exact"


def refuse_beside_exact(vllm_config: Any, block_size: int) -> None:
    """Raise BadInput for what hands out or reads ids as if each were a whole block. ``block_size``: of attention."""
    transfer, unit = vllm_config.kv_transfer_config, vllm_config.cache_config.prefix_match_unit
    if not _is_ours(vllm_config.scheduler_config.scheduler_cls):
        raise BadInput.with_hint(
            '"memory": "exact" needs our scheduler: vLLM\'s would hand out one id for a state that takes many',
            f'add --scheduler-cls {_SCHEDULER}, or take "memory": "groups"',
            needed=_SCHEDULER, available=vllm_config.scheduler_config.scheduler_cls,
        )  # fmt: skip
    if transfer is not None:
        text = (
            f'"memory": "exact" does not go with a KV connector, which reads one id of a state: {transfer.kv_connector}'
        )
        raise BadInput.with_hint(text, _EXACT_HINT, needed=None, available=transfer.kv_connector)
    if unit not in (None, block_size):
        raise BadInput.with_hint(
            f'"memory": "exact" finds texts after each block of {block_size} tokens; --prefix-match-unit {unit} would let '
            "vLLM copy a block that ends inside, which would overwrite the blocks beside it",
            _EXACT_HINT, needed=block_size, available=unit,
        )  # fmt: skip


def _is_ours(scheduler: Any) -> bool:
    """Return whether ``scheduler``, a class or its name, has our manager."""
    if isinstance(scheduler, str):
        return scheduler.startswith("kvpagoda.adapters.vllm.")
    return any(base.__module__ == "kvpagoda.adapters.vllm.scheduler" for base in getattr(scheduler, "__mro__", ()))


# -- states beside attention ---------------------------------------------------------------------------------------------


def align(vllm_config: Any, own: Callable[[], None]) -> None:
    """Choose the tokens of a block. ``own``: vLLM's choice, which stays where smaller groups save nothing.

    Raises:
        BadInput: what ``refuse`` names, or kernels that take no block in which a state has room.
    """
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec  # in a worker; the scheduler reads this file too

    refuse(vllm_config)
    cache = vllm_config.cache_config
    if cache.mamba_cache_mode == "all":
        text = "--mamba-cache-mode all keeps a state after every block, of which smaller ones are more"
        raise BadInput.with_hint(text, f"use align, {_HINT}", needed="align", available="all")
    least = cache.block_size if cache.user_specified_block_size else 1
    own()
    specs = get_kv_cache_spec(vllm_config)
    if is_exact(vllm_config):
        cache.block_size = least_block(vllm_config, specs, least if least > 1 else _EXACT_TOKENS, is_whole=True)
        cache.mamba_page_size_padded = None
        if cache.mamba_cache_mode == "align":
            cache.mamba_block_size = cache.block_size
        refuse_beside_exact(vllm_config, cache.block_size)
        _states_of_all(get_kv_cache_spec(vllm_config))
        return
    chosen = states_beside(specs, least_block(vllm_config, specs, least))
    if chosen is None:
        return
    cache.block_size = chosen.block_size
    cache.mamba_page_size_padded = None
    if cache.mamba_cache_mode == "align":
        cache.mamba_block_size = chosen.block_size


def least_block(vllm_config: Any, specs: Specs, least: int = 1, *, is_whole: bool = False) -> int:
    """Return the tokens of which a block has a multiple: of ``least``, of ``--prefix-match-unit``, of what every kernel
    takes, and of where it may leave a state inside of a prompt. ``is_whole``: return the tokens of a block of attention
    that kernels take as it is, whatever ``--prefix-match-unit`` says.

    Raises:
        BadInput: kernels that take blocks of some sizes alone: blocks that do not lie side by side cannot be divided.
    """
    from vllm.model_executor.layers.mamba import abstract

    units = [least, 1 if is_whole else vllm_config.cache_config.prefix_match_unit or 1]
    layers = vllm_config.compilation_config.static_forward_context
    taken = dict[Any, tuple[Any, ...]]()
    for backend in {layers[name].get_attn_backend() for name, spec in specs.items() if isinstance(spec, AttentionSpec)}:
        sizes = tuple(backend.get_supported_kernel_block_sizes())
        bases = [size.base for size in sizes if isinstance(size, MultipleOf)]
        if sizes and not bases:
            taken[backend] = sizes
        units += [min(bases)] if bases else []
    aligned = getattr(abstract, "get_mamba_prefill_checkpoint_alignment", None)  # 0.33
    if aligned is not None and vllm_config.cache_config.mamba_cache_mode == "align":
        units.append(aligned(vllm_config) or 1)
    block = math.lcm(*units)
    for backend, sizes in taken.items():
        if not is_whole or block not in sizes:
            raise BadInput.with_hint(
                f"kernels of {backend.get_name()} take blocks of {sizes} tokens; smaller groups need one that takes "
                f"{block if is_whole else 'multiples'}",
                "--attention-backend FLASH_ATTN or TRITON_ATTN, where they do, or start vLLM without \"memory\"",
                needed=block if is_whole else "MultipleOf", available=sizes,
            )  # fmt: skip
    return block


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
    if is_exact(vllm_config):
        return _exact(vllm_config, specs)
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
    _check_layout(vllm_config)
    number = ceil_div(len(states), per_group)
    names = [[*attention], *([*states][start::number] for start in range(number))]
    if next(iter(specs)) in states:
        names = names[1:] + names[:1]  # in the order of the model, as vLLM's
    return [KVCacheGroupSpec(layers, specs[layers[0]]) for layers in names]


def _check_layout(vllm_config: Any) -> None:
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    if not layout.is_block_compact:
        text = f"in the layout {layout.name} a block's bytes are not together, which smaller groups need"
        raise BadInput.with_hint(text, _HINT, needed="is_block_compact", available=layout.name)


def _exact(vllm_config: Any, specs: Specs) -> list[Any]:
    """Return one group of states and one of attention. States are first: they need a run of units, attention any."""
    states, attention = _states_of_all(specs)
    refuse_beside_exact(vllm_config, next(iter(attention.values())).block_size)
    _check_layout(vllm_config)
    groups = [KVCacheGroupSpec([*layers], next(iter(layers.values()))) for layers in (states, attention)]
    announce(
        f"divides vLLM's memory into units of {id_nbytes(groups)} bytes, blocks of {groups[1].kv_cache_spec.block_size} "
        f"tokens in {len(attention)} layers; the states of {len(states)} layers take {units_per_state(groups)} of them"
    )
    return groups


def _states_of_all(specs: Specs) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the layers with states and those with attention. Raises BadInput unless there are just these two kinds."""
    attention, states = _split(specs)
    if not states or len({spec.page_size_bytes for spec in specs.values()}) == 1:
        kinds = tuple(sorted({type(spec).__name__ for spec in specs.values()}))
        raise BadInput.with_hint(
            f'"memory": "exact" is for one kind of layers with attention to the whole text and one with states, not {kinds}',
            'start vLLM without "memory", or with "groups"',
            needed=("FullAttentionSpec", "MambaSpec"), available=kinds,
        )  # fmt: skip
    return states, attention


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
    """Return the bytes of a block of attention, which every id takes."""
    most = max(_group_nbytes(group) for group in groups if not isinstance(group.kv_cache_spec, MambaSpec))
    return align_up(most, math.lcm(*(group.kv_cache_spec.get_block_stride_alignment() for group in groups)))


def units_per_state(groups: list[Any]) -> int:
    """Return how many ids a block of states takes: more than 1 in "exact" alone."""
    if not is_packed(groups):
        return 1
    states = max(_group_nbytes(group) for group in groups if isinstance(group.kv_cache_spec, MambaSpec))
    return ceil_div(states, id_nbytes(groups))


def config_of(vllm_config: Any, groups: list[Any], num_blocks: int) -> Any:
    """Return vLLM's configuration of ``num_blocks`` ids: one allocation, in which each group begins at byte 0.

    Views have a row for each id, and a state of the last ones would end behind them: so there is a tail, of the ids of a
    state less one. It comes out of ``num_blocks`` where no other worker is planned with the same number."""
    cache, tail = vllm_config.cache_config, units_per_state(groups) - 1
    if cache.num_gpu_blocks_override is not None:
        num_blocks = cache.num_gpu_blocks_override
    elif tail and vllm_config.parallel_config.world_size == 1:
        num_blocks = max(1, num_blocks - tail)
    stride = id_nbytes(groups)
    tensors = [
        KVCacheTensor(
            size=(num_blocks + tail) * stride, layers=[*group.layer_names], layer_stride=_page_nbytes(group.kv_cache_spec),
            block_stride=stride,
        )
        for group in groups
    ]  # fmt: skip
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups,
        prefix_cache_retention_interval=cache.prefix_cache_retention_interval,
    )  # fmt: skip


def _group_nbytes(group: Any) -> int:
    return len(group.layer_names) * _page_nbytes(group.kv_cache_spec)


def _page_nbytes(spec: Any) -> int:
    """Return the bytes from one layer's block to the next one's."""
    return _state_nbytes(spec) if isinstance(spec, MambaSpec) else int(spec.page_size_bytes)
