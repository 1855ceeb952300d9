"""How SGLang divides memory for a model: its own settings for it and its own planning, without the model and without a GPU.

What its planning asks of the object that loads a model is a few numbers, which are given here; the rules are its functions.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

from benchmarks.peers import sglang_oracle, sglang_settings

# the oracle, which is imported before, makes SGLang importable
planning = import_module("sglang.srt.mem_cache.kv_cache_configurator")
pools = import_module("sglang.srt.model_executor.pool_configurator")
context = sglang_settings.context
VERSION, LEAST_BLOCK = sglang_oracle.VERSION, 1
GIB = 1 << 30


class Peer:
    """See the top of this file."""

    @staticmethod
    def divide(
        config: dict[str, Any],
        budget: int,
        block_size: int,
        ratio: float | None = None,
        unified: bool = False,
        makes: bool = False,
    ) -> dict[str, Any]:
        """Return the blocks of full attention, of windows, and the slots for states in ``budget`` bytes. ``ratio``: of what
        is set apart; None: the default. ``unified``: one memory for all, of which ``rest`` are the bytes beside the slots.
        ``makes``: make its pools for windows too, with their bytes, of which ``room`` can hold something."""
        options: dict[str, Any] = (
            {} if ratio is None else {"mamba_full_memory_ratio": ratio, "swa_full_tokens_ratio": ratio}
        )
        options |= {"enable_unified_memory": True} if unified else {}
        model = sglang_settings.publish(config, block_size, **options)
        plain = SimpleNamespace(
            is_none=lambda: True, is_eagle=lambda: False, is_standalone=lambda: False, is_dflash_family=lambda: False
        )
        layers = SimpleNamespace(
            start_layer=0, end_layer=model.num_hidden_layers, num_effective_layers=model.num_hidden_layers,
            swa_attention_layer_ids=model.swa_attention_layer_ids, full_attention_layer_ids=model.full_attention_layer_ids,
        )  # fmt: skip
        runner = SimpleNamespace(
            model_config=model, layer_info=layers, kv_cache_dtype=model.dtype, kv_cache_dtype_str="auto",
            page_size=block_size, sliding_window_size=getattr(model.hf_text_config, "sliding_window", None),
            is_hybrid_swa=model.is_hybrid_swa, spec_algorithm=plain, is_draft_worker=False, pp_size=1, attn_dp_size=1,
            extra_mamba_cache_bytes_per_req=0, fused_entry_bytes=lambda kind: None, use_mla_backend=False,
            server_args=context.get_server_args(), mambaish_config=planning.mambaish_config(model), hybrid_gdn_config=None,
            hybrid_kda_config=None, kv_shard_size=1, spec_aux_config=None, kv_shard_spec=None,
        )  # fmt: skip
        rest = budget / GIB
        if runner.mambaish_config is not None:
            rest = planning.KVCacheConfigurator._handle_max_mamba_cache(runner, rest)
        runner._apply_token_constraints = lambda num_tokens: num_tokens  # the user has not given any
        made = planning.KVCacheConfigurator.config_from_budget(runner, int(rest * GIB))
        slots = context.get_schedule().max_mamba_cache_size or 0
        ratio = planning.KVCacheConfigurator._calculate_mamba_ratio(runner)
        room = 0
        if makes:
            runner.device, runner.post_capture_kv_active, runner.forward_stream = "cpu", False, None
            runner._build_req_to_token_pool = runner._fused_draft_for_swa_factory = lambda **given: None
            runner._unified_swa_head_geometry = lambda: planning.KVCacheConfigurator._unified_swa_head_geometry(runner)
            runner.is_hybrid_swa_compress = False
            pool = planning.KVCacheConfigurator._init_unified_swa_pools(
                runner, max_num_reqs=1, unified_total_bytes=made.unified_total_bytes
            )
            room = pool.token_to_kv_pool_allocator._empty_shared_gap_bytes
        return {
            "blocks": made.max_total_num_tokens // block_size, "windows": (made.swa_max_total_num_tokens or 0) // block_size,
            "slots": slots, "slots_per_request": ratio, "rest": made.unified_total_bytes or 0, "room": room,
        }  # fmt: skip
