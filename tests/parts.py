"""Which tests ``make test`` leaves to ``make long``. They get the mark ``long``, by which pytest selects.

Nothing is tested by a long test alone: ``make test`` runs a smaller case of the same kind.
"""

from __future__ import annotations

import subprocess
from collections import defaultdict
from pathlib import Path
from time import monotonic

import pytest

BEGAN = monotonic()
ROOT = Path(__file__).resolve().parents[1]

FORMATS = ("dsv4_584__flashmla", "nvfp4_352__emulated", "gqa_int4_group__kvpagoda")
"""Packed rows: numba and Triton compile loops for each format, which takes longer than to run them."""
KINDS = ("gemma3_text", "qwen3_next", "deepseek_v4")
"""Models with windows, with states and with compressed entries, each beside full attention."""

QUICK: dict[str, int | tuple[str, ...]] = {
    "audit/test_fake_engine.py::test_what_is_cached_gives_the_numbers_of_what_is_computed": ("all",),
    "compat/test_layer_handle.py::test_random_traffic_against_the_oracle": 4,
    "events/test_by_the_page.py::test_every_group_that_is_named_has_blocks": (
        "wide-int8", "qwen3_next-bfloat16", "sliding-None", "mixed-int8-drafted",
    ),
    "handover/test_by_layer.py::test_every_layer_kind_arrives_layer_by_layer": ("33-8",),
    "handover/test_by_layer.py::test_widths_pages_and_layouts_differ": ("layouts1-ranks0", "layouts2-ranks2"),
    "handover/test_receive.py::test_every_layer_kind_goes_on_elsewhere": ("33",),
    "handover/test_receive.py::test_every_layer_kind_with_pages_of_another_size": ("gemma", "deepseek_v4", "mixed"),
    "handover/test_receive.py::test_widths_pages_and_layouts_differ": ("ranks2", "ranks5"),
    "handover/test_optional.py::test_optional_groups_arrive_layer_by_layer": ("blocks1",),
    "handover/test_optional.py::test_optional_groups_go_along": ("blocks1",),
    "handover/test_processes.py::test_over_mooncakes_engine": ("llama",),
    "replay/engines/test_edge_states.py::test_the_engine_itself": ("64-full+3*state-16 share a budget",),
    "replay/engines/test_edge_states.py::test_its_settings": ("setting0",),
    "replay/engines/test_engines.py::test_who_is_admitted_is_a_setting": ("full-setting0", "100-setting1", "state-setting2"),
    "replay/engines/test_engines.py::test_the_engine_itself_with_a_unit_of_matching": ("16-4",),
    "replay/engines/test_edge_unified.py::test_a_difference_would_be_seen": ("leaf",),
    "replay/engines/test_edge_unified.py::test_beside_its_other_settings": ("setting1",),
    "replay/engines/test_edge_unified.py::test_the_engine_itself": ("16-full+state-16 share a budget",),
    "replay/engines/test_edge_unified.py::test_the_engine_itself_with_windows": ("4-full+window:128-16 share a budget",),
    "replay/engines/test_edge_unified.py::test_a_difference_of_windows_would_be_seen": ("order",),
    "replay/engines/test_edge_unified.py::test_windows_beside_its_other_settings": ("setting0",),
    "replay/engines/test_edge_windows.py::test_the_engine_itself": ("4-full+window:128-16 share a budget",),
    "replay/fleet/test_engine_worker.py::test_one_at_a_time_hits_are_those_of_a_replay": (
        "vllm-0.33-states-None", "sglang-0.5.23-window-None", "sglang-0.5.23-big states-None",
        "dynamo-1.6.1-full-64KiB",
    ),
    "replay/fleet/test_simulated_tiers.py::test_hits_are_those_of_a_cache_with_memory": (
        "full-150", "both-150", "states-4000",
    ),
    "hf/test_draft_handover.py::test_a_sender_without_the_draft_gives_equal_tokens": ("mistral",),
    "hf/test_draft_model.py::test_tokens_stay_those_of_plain_decoding_cold_and_warm": (
        "llama-mistral",
    ),
    "hf/test_encoder_decoders.py::test_tokens_and_logits_are_those_of_transformers_own_cache": ("mvp", "t5", "whisper"),
    "hf/test_encoder_decoders.py::test_tokens_stay_the_same_while_requests_are_preempted": ("whisper-PreemptionMode.PART",),
    "hf/test_encoder_decoders.py::test_inputs_that_were_evicted_are_found_in_a_tier": ("t5",),
    "hf/test_encoder_decoders.py::test_answers_share_what_was_encoded": ("t5",),
    "hf/test_generator.py::test_tokens_equal_full_recomputation": KINDS[1:],
    "hf/test_generator_pressure.py::test_tokens_equal_full_recomputation_while_requests_are_preempted": KINDS[1:2],
    "hf/test_generator_sleep.py::test_tokens_stay_the_same_while_the_cache_sleeps_between_steps": KINDS[1:2],
    "hf/test_generator_swap.py::test_tokens_equal_full_recomputation": KINDS[1:2],
    "hf/test_generator_tiers.py::test_tokens_stay_the_same_while_what_is_evicted_goes_to_host_memory_and_disk": KINDS[1:2],
    "hf/test_indexers.py::test_tokens_equal_those_of_transformers_cache": 2,
    "hf/test_lookup.py::test_states_go_back_and_a_text_that_repeats_itself_takes_fewer_passes": ("lfm2",),
    "hf/test_step_states_of_models.py::test_chunks_and_several_prompts_and_pressure": 1,
    "hf/test_reuse.py::test_a_conversation_goes_on_where_it_ended": 2,
    "hf/test_generator.py::test_requests_arrive_while_others_run": 1,
    "hf/test_compressed.py::test_every_boundary_is_resumed_with_the_rows_that_were_there": ("fp8",),
    "hf/test_draft_model.py::test_what_an_optional_group_lacks_is_computed_again": 1,
    "hf/test_at_rest_of_models.py::test_warm_equals_cold_to_the_bit_where_the_cold_run_rounds": 3,
    "hf/test_rope_switch.py::test_tokens_stay_the_same_under_pressure": 1,
    "hf/test_kv_formats.py::test_cold_equals_warm_to_the_bit": ("gemma3_text-full alone",),
    "hf/test_kv_formats.py::test_tokens_stay_the_same_under_pressure_and_through_tiers": ("gpt_oss",),
    "hf/test_lookup.py::test_tokens_stay_those_of_plain_decoding": ("llama", KINDS[1]),
    "hf/test_one_budget.py::test_tokens_stay_the_same_while_memory_changes_kind": KINDS[1:2],
    "hf/test_one_budget.py::test_tokens_taken_back_leave_no_trace": KINDS[:2],
    "hf/test_preempted_types.py::test_tokens_stay_the_same_while_requests_are_preempted_in_every_way": (
        "mamba", "deepseek_v4",
    ),
    "hf/test_reuse.py::test_shared_beginnings_give_the_same_tokens_and_a_second_run_computes_little": KINDS[:1],
    "hf/test_reuse.py::test_tokens_stay_the_same_while_everything_is_evicted_all_the_time": KINDS[1:2],
    "hf/test_rope_switch.py::test_tokens_equal_full_recomputation_cold_and_warm": ("phi3-5-3",),
    "hf/test_sampling.py::test_n_answers_are_those_of_n_requests_with_their_seeds": KINDS[1:2],
    "kernels/compiled_packed_rows.py::test_it_compiles_without_approximation_or_spills_and_moves_vectors": (
        "dsv4_584__flashmla-90-many", "nvfp4_352__emulated-90-few", "gqa_int4_group__kvpagoda-100-many",
    ),
    "kernels/compiled_packed_rows.py::test_heads_move_as_wide_as_their_cells_allow": ("fp8_head-64-8",),
    "kernels/compiled_scaled_rows.py::test_rows_move_16_bytes_at_a_time_and_the_hardware_casts": ("e4m3-128-True",),
    "kernels/compiled_scaled_rows.py::test_it_compiles_for_other_architectures_few_rows_and_a_division": (
        "e4m3-80-append", "e5m2-100-gather half",
    ),
    "kernels/compiled_append_swa.py::test_the_arithmetic_is_ieee_and_nothing_spills": ("100-True-512",),
    "kernels/interpreted_scaled_rows.py::test_every_bfloat16_gets_the_code_of_the_reference": ("0.0217", "e-43"),
    "kernels/interpreted_packed_rows.py::test_append_writes_the_bytes_of_the_reference": FORMATS,
    "kernels/interpreted_packed_rows.py::test_gather_gives_the_numbers_of_the_reference": tuple(
        f"bfloat16-{size}-{format}" for size, format in zip(("few", "many", "few"), FORMATS)
    ),
    "kernels/interpreted_packed_rows.py::test_rows_in_arrays_of_their_own_are_those_of_the_reference": ("nvfp4",),
    "kernels/compiled_packed_rows.py::test_rows_in_arrays_of_their_own_compile_too": ("nvfp4",),
    "kernels/test_packed_rows.py::test_append_writes_the_bytes_of_pack_and_no_others": ("reference", *FORMATS),
    "kernels/test_packed_rows.py::test_a_row_that_pack_refuses_is_marked": FORMATS,
    "kernels/test_packed_rows_cpu.py::test_append_writes_the_bytes_of_the_reference": FORMATS,
    "kernels/test_packed_rows_cpu.py::test_gather_gives_the_numbers_of_the_reference": FORMATS,
    "kernels/test_packed_rows_cpu.py::test_padded_rows_alone_write_nothing_and_read_zeros": FORMATS,
    "kernels/test_packed_rows_cpu.py::test_rows_in_arrays_of_their_own_are_those_of_the_codec": ("nvfp4",),
    "kernels/test_packed_rows_cpu.py::test_heads_of_every_model_are_written_and_read": (
        "int8_head-80", "int4_group-80",
    ),
    "kernels/test_scaled_rows.py::test_append_writes_the_bytes_of_the_reference": (
        "NHD-0.0217-fp8_e4m3", "HND-1.0-fp8_e5m2",
    ),
    "kernels/test_scaled_rows.py::test_gather_gives_the_numbers_of_the_reference": ("bfloat16-0.0217-fp8_e4m3",),
    "kernels/test_scaled_rows.py::test_large_rows_that_bypass_the_caches_have_the_same_bytes": ("fp8_e4m3",),
    "prefix/test_tree_oracle.py::test_two_hundred_thousand_operations": ("16-50000-3",),
    "prefix/test_tree_oracle.py::test_check_after_every_operation": 3,
    "blocks/test_free_list.py::test_random_operations_against_a_model": 1,
    "schema/test_schema.py::test_sectors_lose_little_to_carving": 6,
    "test_below.py::test_rows_read_back_are_the_rows_written": 6,
    "test_below.py::test_rows_stay_right_while_a_tier_fails": ("full-1.0", "mixed-0.1", "state-0.1"),
    "test_benchmarks.py::test_every_benchmark_runs_in_a_tiny_size": (
        "evict]", "hits", "hybrid_peers", "victims", "policies",
    ),
    "replay/offline/test_prices.py::test_no_choice_beats_the_bound": ("states]", "window]", "all"),
    "events/test_tiers.py::test_what_a_tier_keeps_is_told": 2,
    "replay/test_serving.py::test_hardly_a_byte_lies_with_the_wrong_kind": 2,
    "adapters/test_vllm_names.py::test_what_moved_is_named": 1,
    "adapters/test_vllm_options.py::test_another_version_is_named_before_what_it_lacks_is_imported": 1,
    "schema/test_from_hf.py::test_the_oldest_convolution_column_is_never_read": 8,
    "test_host_traffic.py::test_rows_stay_right_whenever_the_device_is_done": ("full",),
    "test_below.py::test_every_byte_comes_back_for_every_family_and_format": 14,
    "test_draft_rows.py::test_without_pressure_hits_are_those_without_a_draft": ("mixed",),
    "test_draft_rows.py::test_a_draft_with_a_group_of_its_own_leaves_the_blocks_of_the_model": ("windows",),
    "test_cli_json.py::test_json_is_as_described": (
        "version", "plan", "layout", "replay]", "replay_schema", "doctor", "top", "tier",
    ),
    "test_preemption.py::test_every_request_of_ten_thousand_random_mixes_ends": 1,
    "test_quota.py::test_a_tenant_keeps_its_hits_while_another_floods": ("lru-full", "lru-qwen3_next", "s3fifo-wide"),
    "test_quota.py::test_after_every_call_each_namespace_is_within_its_quota_or_all_of_it_is_in_use": (
        "0-full", "0-mixed", "1-mamba", "1-drafted", "2-wide",
    ),
    "test_random_traffic.py::test_random_traffic_reads_its_own_bytes": ("-0]",),
    "test_sleeping.py::test_a_tree_in_tiers_is_found_again": 4,
    "test_sleeping.py::test_rows_of_running_and_cached_texts_are_those_written": 8,
    "test_swap.py::test_rows_read_after_a_resume_are_the_rows_written": ("mixed",),
    "test_swap.py::test_rows_stay_right_when_blocks_move_and_requests_are_set_aside": ("mixed",),
    "tiers/test_redis.py::test_a_server_with_outages": 1,
    "test_all_or_nothing.py::test_a_signal_at_any_call": 25,
    "test_all_or_nothing.py::test_memory_that_runs_out": 38,
    "test_cli.py::test_bad_input_is_one_line_and_exit_code_2": 16,
    "test_hostile_arguments.py::test_a_call_works_or_refuses_its_argument_and_changes_nothing": 23,
    "test_hostile_arguments.py::test_a_config_is_read_or_a_field_is_refused": 3,
    "replay/engines/test_edge_lru.py::test_a_difference_would_be_seen": 1,
    "schema/test_from_hf.py::test_what_a_forward_pass_keeps": 32,
    "hf/test_hit_grid.py::test_cold_equals_warm_to_the_bit": 12,
    "events/test_random_traffic_followed.py::test_random_traffic_is_followed": 6,
    "test_looking_up.py::test_every_token_carries_the_epoch_that_computed_it": 2,
    "hf/test_paged_cache.py::test_a_padded_batch_gives_the_tokens_of_each_prompt_alone": 2,
    "audit/test_judges.py::test_a_planted_fault_is_found": ("too long", "later boundary"),
    "audit/test_judges.py::test_a_clean_server_has_no_findings": 1,
    "audit/test_judges.py::test_a_step_of_rounding_is_no_finding": 1,
    "audit/test_odd_servers.py::test_a_server_that_is_busy_is_asked_again": ("429",),
    "replay/engines/test_engines.py::test_the_engine_itself": ("16-16 share", "64-one at a"),
    "replay/engines/test_engines.py::test_dynamos_mocker": ("16-dynamo-1.6.1-trtllm", "64-dynamo-1.6.1]"),
    "replay/engines/test_edge_lru.py::test_the_engine_itself": ("16-one", "64-16 at once", "1-16 share"),
    "replay/engines/test_moved_states.py::test_the_mocker_itself": 3,
    "replay/engines/test_moved_states.py::test_a_difference_would_be_seen": ("use",),
    "tiers/test_mooncake.py::test_the_driver_conforms": ("what_was_stored", "bytes_stay", "many_threads_see"),
    "tiers/test_mooncake.py::test_a_store_through_a_tier": ("spoilt",),
    "tiers/test_redis.py::test_the_driver_conforms": ("tcp", "stored_is_loaded"),
    "tiers/test_redis.py::test_a_full_server": ("noeviction",),
    "tiers/test_redis_connections.py::test_a_server_that_takes_its_time": ("drip_a_record", "flood", "say_nothing"),
    "tiers/test_disk.py::test_a_killed_writer_leaves_no_wrong_byte": ("points",),
    "test_below.py::test_closing_takes_its_timeout_in_all": ("0.0",),
    "test_below.py::test_an_open_waits_one_timeout_in_all": ("load-state",),
    "test_below.py::test_a_copy_to_the_host_that_fails_is_not_stored": ("mixed",),
    "test_shared_store.py::test_requests_run_on_while_the_store_hangs_dies_and_restarts_empty": ("redis",),
    "test_shared_store.py::test_what_one_cache_computed_another_loads": ("mixed-redis",),
    "test_random_traffic.py::test_a_worker_reads_its_own_bytes": ("gemma-2", "qwen3_next-0", "drafted-2"),
    "test_random_traffic.py::test_a_device_with_memory_of_its_own_reads_its_own_bytes": ("deepseek_v4", "drafted]"),
    "test_step_waits.py::test_the_life_that_a_gpu_is_tried_with": ("full", "sectors", "int8"),
    "test_observers.py::test_a_mirror_knows_what_is_cached_over_random_traffic": 7,
    "compat/test_layer_handle.py::test_padded_rows_touch_no_request": ("overlap", "one_entry", "fp8]"),
    "compat/test_layer_handle.py::test_chunking_does_not_change_what_is_pooled": 2,
    "replay/test_jobs.py::test_each_job_ends_once_with_its_number": ("2",),
    "replay/test_replay.py::test_the_published_figures": ("lru-9139", "opt-1827]"),
    "replay/test_replay_command.py::test_the_synthetic_workload_is_the_default_and_fits_the_terminal": ("40",),
    "replay/test_replay_command.py::test_help_names_what_there_is": ("40",),
    "replay/test_replay_command.py::test_a_picture": ("svg",),
    "policies/test_policies.py::test_hits_and_evictions_on_a_public_trace": ("lru",),
    "test_recording.py::test_a_cache_that_is_not_closed": ("del",),
    "test_public_surface.py::test_an_entry_level_imports_no_more_than_it_needs": (
        "from kvpagoda import KVCache, Schema; KVCache-torch", "Schema.from_hf_config-torch",
    ),
    "test_without_torch.py::test_the_generator_says_which_extra_it_needs": ("transformers",),
    "prefix/test_tree.py::test_a_chain_of_a_hundred_thousand_blocks": 1,
    "hf/test_random_configs.py::test_tokens_of_a_random_config": 1,
    "hf/test_generator.py::test_any_chunk_size_gives_the_same_tokens": ("gemma3_text-5",),
    "hf/test_generator_pressure.py::test_after_an_error_in_the_model_the_next_step_goes_on": ("llama",),
    "hf/test_generator_pressure.py::test_a_request_can_be_aborted_in_every_state": ("preempted", "forked"),
    "hf/test_weights.py::test_answers_after_a_change_are_those_of_the_new_weights": 2,
    "hf/test_lookup.py::test_every_model_whose_states_are_known_verifies_several_tokens": ("minimax",),
    "hf/test_every_family.py::test_tokens_equal_full_recomputation": 6,
    "hf/test_every_family.py::test_texts_of_multimodal_models": 2,
    "hf/test_time_steps.py::test_tokens_with_a_cache_are_those_of_full_recomputation": 1,
    "hf/test_step_states_of_models.py::test_a_prompt_takes_one_pass_and_can_be_resumed_at_every_block": 2,
    "events/test_engines_read.py::test_vllm_reads_every_message": ("gemma", "qwen3_next-", "drafted-", "wide-"),
    "events/test_engines_read.py::test_older_vllm_reads_arrays": ("gemma", "qwen3_next-"),
    "events/test_engines_read.py::test_sglang_reads_every_message": 4,
    "test_manager.py::test_rows_read_back_are_the_rows_written": ("8-8-1000-mixed",),
    "test_manager.py::test_rows_stay_right_when_groups_share_one_budget_and_blocks_move": ("-500",),
    "test_manager.py::test_random_traffic_over_compressed_layers_keeps_one_owner_for_every_block": ("1500",),
    "compat/test_kv_cache_manager.py::test_random_life_of_a_small_manager": ("3000",),
    "compat/test_token_allocator.py::test_random_operations_against_a_model": ("3-False",),
    "kernels/interpreted_append_swa.py::test_same_bytes_as_the_reference": (
        "wrap-layer", "longer_than_the_ring-block", "padded-layer",
    ),
    "kernels/interpreted_append_swa.py::test_rows_of_one_ring_in_one_program_and_in_several": ("wrap",),
    "kernels/interpreted_append_swa.py::test_ordered_rows_need_no_search": ("longer",),
    "kernels/interpreted_copy_rows.py::test_rows_arrive_and_nothing_else_changes": (
        "-584", "3-5-2050", "runs-8-0-40000", "0-0-7",
    ),
    "kernels/interpreted_copy_rows.py::test_many_tables_in_one_launch": ("1",),
    "kernels/interpreted_host_copy.py::test_bytes_are_those_of_the_reference": ("False-0.3", "True-2.3"),
    "kernels/interpreted_host_copy.py::test_layers_one_by_one": ("layer",),
    "kernels/interpreted_state_steps.py::test_same_as_the_reference": (
        "4-False-dense", "1-True-strided", "4-True-dense",
    ),
    "kernels/interpreted_scaled_rows.py::test_rows_in_every_layout_of_pages": ("int32-few-HND", "int64-many-NHD"),
    "kernels/compiled_state_steps.py::test_it_compiles_and_spills_nothing": ("False-90", "True-100"),
    "kernels/compiled_copy_rows.py::test_it_moves_sixteen_bytes_an_access_where_it_may": ("-90",),
    "kernels/compiled_append_swa.py::test_rows_move_in_vectors": ("90",),
    "audit/test_fake_engine.py::test_a_planted_fault_changes_answers_or_counters": ("window", "page"),
    "audit/test_fake_engine.py::test_no_fault_breaks_the_engine": ("freed", "half of a block"),
    "hf/test_sampling.py::test_top_k_and_top_p_keep_the_likeliest_in_proportion": 3,
    "test_step_uploads.py::test_the_device_has_the_hosts_arrays_in_a_random_life": (
        "full and", "mixed", "chunk", "go back",
    ),
    "test_sanitizer.py::test_clean_traffic_raises_nothing": ("none-window", "host-states", "disk-window"),
    "replay/offline/test_hit_bound.py::test_our_cache_finds_no_more": ("Gemma-3-1]", "Qwen3-Next-16", "Llama-4-1]"),
    "replay/test_auto_replay.py::test_never_half_a_point_worse_than_lru": ("synthetic-4392", "lcp-502]"),
    "hints/test_hints.py::test_no_number_of_a_hint_harms": 12,
    "events/test_follower.py::test_a_follower_says_what_lookup_says": 8,
    "events/test_follower.py::test_it_finds_again_what_was_lost": 8,
    "test_many_rows.py::test_requests_that_are_settled_together_leave_what_they_leave_one_after_another": (
        "1000-full and window", "1000-window",
    ),
    "test_persistent_batch.py::test_random_traffic": ("mixed-a late", "window-shared", "state-shared", "full-a late"),
    "test_forgetting.py::test_images_that_nobody_has_are_forgotten_and_the_others_are_told_apart": ("400",),
    "replay/fleet/test_worker.py::test_times_and_hits_are_those_of_single_steps": 6,
    "replay/fleet/test_engine_worker.py::test_a_router_changes_nothing_by_asking": 3,
    "replay/fleet/test_engine_worker.py::test_times_are_those_of_single_steps": 3,
    "kernels/test_packed_rows.py::test_gather_reads_what_unpack_reads_and_zeros_elsewhere": (
        "bfloat16-dsv4_584__flashmla", "float32-nvfp4_352", "bfloat16-gqa_int4",
    ),
    "replay/engines/test_engines.py::test_the_engine_itself_with_groups_of_layers": ("full+3*state-None",),
    "test_at_rest.py::test_more_checkpoints_fit": ("int8",),
    "compat/test_block_allocator.py::test_random_operations_against_a_model": 1,
}  # fmt: skip
"""Test -> how many of its cases ``make test`` runs, evenly spread, or words of which the ids of these hold one."""

LONG = {
    "events/test_hostile_batches.py::test_thousands_of_damaged_batches":
        "events/test_hostile_batches.py::test_a_follower_is_never_wrong_for_long",
    "events/test_vllm_router.py::test_its_structs_read_every_message":
        "events/test_vllm_router.py::test_without_our_fields_it_admits_every_event",
    "replay/engines/test_edge_unified.py::test_a_real_trace_with_windows_and_preemptions":
        "replay/engines/test_edge_unified.py::test_the_engine_itself_with_windows",
    "replay/test_auto_replay.py::test_a_point_better_where_arc_is":
        "replay/test_auto_replay.py::test_never_half_a_point_worse_than_lru",
    "hf/test_run.py::test_errors_of_the_other_process_arrive":
        "test_cli.py::test_generate_with_a_tier_finds_it_again_the_next_time",
    "hf/test_run.py::test_a_run_counts_tokens_and_waits_for_the_first_of_each":
        "test_cli.py::test_generate_with_a_tier_finds_it_again_the_next_time",
    "test_below.py::test_a_hung_server_stalls_the_first_requests_and_no_other":
        "test_below.py::test_a_hung_tier_delays_an_open_by_its_timeout_and_no_more",
    "test_benchmarks.py::test_every_case_of_a_head_runs": "test_benchmarks.py::test_a_folder_without_the_package_is_reported",
    "test_benchmarks.py::test_two_heads_are_compared_case_by_case":
        "test_benchmarks.py::test_a_folder_without_the_package_is_reported",
    "test_benchmarks.py::test_hybrid_layers_serve_the_same_requests":
        "test_benchmarks.py::test_every_benchmark_runs_in_a_tiny_size",
    "audit/test_judges.py::test_faults_that_no_list_names_are_found": "audit/test_judges.py::test_a_planted_fault_is_found",
    "test_cli.py::test_generate_runs_the_embedded_model":
        "test_cli.py::test_generate_with_a_tier_finds_it_again_the_next_time",
    "test_cli.py::test_generate_draws_several_answers_for_a_prompt":
        "test_cli.py::test_generate_with_a_tier_finds_it_again_the_next_time",
    "replay/test_report_page.py::test_a_page_on_a_phone_and_in_the_dark":
        "replay/test_report_page.py::test_a_name_cannot_end_the_script",
    "tiers/test_redis.py::test_a_server_of_a_cluster_that_dies":
        "tiers/test_redis.py::test_another_master_is_found_by_the_sentinel",
    "test_examples.py::test_a_request_is_computed_in_one_process_and_answered_in_another":
        "handover/test_transfers.py::test_the_memory_of_a_process_that_ended_is_not_read_any_more",
    "handover/test_processes.py::test_layer_by_layer":
        "handover/test_transfers.py::test_the_memory_of_a_process_that_ended_is_not_read_any_more",
    "replay/engines/test_engines.py::test_the_blocks_that_no_other_request_can_find_are_used_first":
        "replay/engines/test_engines.py::test_the_engine_itself_with_groups_of_layers",
    "replay/engines/test_edge_states.py::test_a_difference_would_be_seen":
        "replay/engines/test_edge_lru.py::test_a_difference_would_be_seen",
    "replay/engines/test_edge_windows.py::test_a_difference_would_be_seen":
        "replay/engines/test_edge_lru.py::test_a_difference_would_be_seen",
    "hf/test_vllm_specs.py::test_the_installed_vllm_says_so_again":
        "hf/test_layouts_of_models.py::test_tokens_are_the_same_in_every_layout",
    "test_cli.py::test_generate_says_what_a_format_saves_and_costs":
        "test_cli.py::test_generate_with_a_tier_finds_it_again_the_next_time",
    "test_cli.py::test_generate_fits_the_terminal":
        "test_cli.py::test_generate_with_a_tier_finds_it_again_the_next_time",
    "replay/test_multi_worker.py::test_the_command_shows_the_joint_hit_rate":
        "replay/test_multi_worker.py::test_without_a_store_each_worker_is_alone",
    "replay/test_jobs.py::test_several_traces_give_what_each_gives_alone":
        "replay/test_jobs.py::test_each_job_ends_once_with_its_number",
    "replay/test_jobs.py::test_a_grid_of_budgets_in_two_processes":
        "replay/test_jobs.py::test_each_job_ends_once_with_its_number",
    "test_recording.py::test_memory_does_not_grow_with_the_number_of_requests":
        "test_recording.py::test_an_event_larger_than_the_buffer",
    "hf/test_compressed.py::test_fp8_rows_change_the_logits_by_a_bounded_divergence":
        "hf/test_compressed.py::test_right_tokens_may_be_taken_back_too_and_computed_again",
    "hf/test_draft_model.py::test_a_draft_that_is_the_model_itself_is_always_right":
        "hf/test_draft_model.py::test_tokens_stay_those_of_plain_decoding_cold_and_warm",
    "adapters/test_vllm_bytes.py::test_bytes_of_a_page_are_those_of_vllms_specs":
        "hf/test_layouts_of_models.py::test_tokens_are_the_same_in_every_layout",
    "compat/test_kv_cache_manager.py::test_requests_come_and_go_within_the_budget":
        "compat/test_kv_cache_manager.py::test_random_life_of_a_small_manager",
    "events/test_dynamo.py::test_scores_are_what_lookup_finds":
        "events/test_own_router.py::test_a_router_of_ones_own_says_what_lookup_says",
    "events/test_publisher.py::test_a_subscriber_survives_the_publisher":
        "events/test_publisher.py::test_what_is_missed_is_asked_for",
    "handover/test_processes.py::test_right_bytes_or_a_typed_miss":
        "handover/test_transfers.py::test_the_memory_of_a_process_that_ended_is_not_read_any_more",
    "hf/test_compressed.py::test_rejected_tokens_leave_no_trace_at_any_position":
        "hf/test_compressed.py::test_right_tokens_may_be_taken_back_too_and_computed_again",
    "hf/test_compressed.py::test_fp8_tokens_do_not_depend_on_how_the_prompt_is_cut":
        "hf/test_compressed.py::test_every_boundary_is_resumed_with_the_rows_that_were_there",
    "hf/test_compressed.py::test_the_real_ratio_and_window_of_128_can_be_taken_back_across":
        "hf/test_compressed.py::test_right_tokens_may_be_taken_back_too_and_computed_again",
    "hf/test_draft_handover.py::test_decoding_goes_on_elsewhere_as_it_would_have_here":
        "hf/test_draft_handover.py::test_a_sender_without_the_draft_gives_equal_tokens",
    "hf/test_draft_model.py::test_drafts_that_cannot_go_back_are_refused":
        "hf/test_draft_model.py::test_a_draft_for_shorter_texts_or_of_another_vocabulary_is_refused",
    "hf/test_draft_model.py::test_under_pressure":
        "hf/test_draft_model.py::test_tokens_stay_those_of_plain_decoding_cold_and_warm",
    "hf/test_generator_swap.py::test_all_ways_in_turn_with_forks_proposals_and_too_little_swap":
        "hf/test_generator_swap.py::test_tokens_equal_full_recomputation",
    "hf/test_generator_tiers.py::test_tokens_stay_the_same_while_a_tier_fails":
        "test_below.py::test_rows_stay_right_while_a_tier_fails",
    "hf/test_layouts_of_models.py::test_packed_entries_and_windows_are_rows_packed_and_unpacked":
        "hf/test_layouts_of_models.py::test_layer_major_and_kernel_pages_change_no_token",
    "replay/test_jobs.py::test_an_interrupt_ends_the_processes":
        "replay/test_jobs.py::test_an_interrupt_prints_what_is_done",
    "replay/test_jobs.py::test_progress_is_for_a_terminal":
        "replay/test_jobs.py::test_an_interrupt_prints_what_is_done",
    "replay/test_live.py::test_strict_ends_with_an_answer_and_nobody_reading_is_no_error":
        "replay/test_live.py::test_a_file_is_answered_too",
    "replay/test_multi_worker.py::test_workers_hit_what_others_computed":
        "replay/test_multi_worker.py::test_without_a_store_each_worker_is_alone",
    "replay/test_report_page.py::test_a_page_in_a_browser":
        "replay/test_report_page.py::test_a_name_cannot_end_the_script",
    "test_below.py::test_a_forked_child_computes_what_its_parent_loads":
        "test_below.py::test_a_dropped_cache_releases_its_threads_and_files",
    "test_benchmarks.py::test_tokenspeed_finds_the_same_prompts_cached":
        "test_benchmarks.py::test_tokenspeed_serves_layers_of_several_kinds",
    "test_benchmarks.py::test_a_wrong_name_is_reported_in_one_line":
        "test_benchmarks.py::test_a_folder_without_the_package_is_reported",
    "test_cli.py::test_the_interpreter_does_not_complain_about_an_output_at_its_end":
        "test_cli.py::test_an_output_that_takes_nothing_is_an_error_in_one_line",
    "test_code_size.py::test_the_tool_runs_as_a_program":
        "test_code_size.py::test_the_tool_counts_rooms_and_names_what_is_long",
    "test_docs.py::test_the_documents_build_without_warnings":
        "test_docs.py::test_links_lead_to_files",
    "test_docs.py::test_the_notebook_prints_what_it_has_stored":
        "test_docs.py::test_the_notebook_is_a_page_with_its_outputs",
    "test_doctor.py::test_the_command":
        "test_doctor.py::test_the_command_exits_with_1_for_what_is_broken",
    "test_manager.py::test_an_error_while_copying_leaves_everything_owned_once":
        "test_all_or_nothing.py::test_memory_that_runs_out",
    "test_packaging.py::test_a_type_checker_reports_the_mistakes_of_a_user":
        "test_packaging.py::test_a_type_checker_knows_the_arrays_as_tensors",
    "audit/test_judges.py::test_a_further_fault_is_found": "audit/test_judges.py::test_a_planted_fault_is_found",
    "audit/test_judges.py::test_other_weights_after_a_wait_are_no_fault":
        "audit/test_twins.py::test_twins_of_before_a_wait_are_forgotten",
    "audit/test_judges.py::test_rows_of_another_text_are_found_whatever_a_server_shows":
        "audit/test_judges.py::test_a_planted_fault_is_found",
    "audit/test_judges.py::test_a_fault_of_one_hit_in_twenty_is_found":
        "audit/test_judges.py::test_a_planted_fault_is_found",
    "audit/test_judges.py::test_a_fault_is_found_above_noise":
        "audit/test_judges.py::test_a_planted_fault_is_found",
    "audit/test_audit_command.py::test_after_the_user_has_done_something":
        "audit/test_fake_engine.py::test_a_planted_fault_changes_answers_or_counters",
    "audit/test_audit_command.py::test_the_page_is_shown_without_network":
        "audit/test_audit_command.py::test_a_server_that_is_right_is_clean",
    "replay/engines/test_engines.py::test_a_difference_would_be_seen":
        "replay/engines/test_edge_lru.py::test_a_difference_would_be_seen",
    "replay/engines/test_engine_pool.py::test_sglang_plans_the_same":
        "replay/engines/test_engine_pool.py::test_sglang_has_a_pool_for_each_kind_of_layers",
    "replay/engines/test_engine_pool.py::test_vllm_plans_the_same":
        "replay/engines/test_engine_pool.py::test_groups_have_as_many_layers_each_and_share_the_blocks",
    "tiers/test_mooncake.py::test_a_store_with_outages":
        "tiers/test_redis.py::test_a_server_with_outages",
    "tiers/test_mooncake.py::test_a_full_store":
        "tiers/test_redis.py::test_a_full_server",
    "tiers/test_mooncake.py::test_a_master_that_comes_later":
        "tiers/test_mooncake.py::test_the_driver_conforms",
    "tiers/test_redis.py::test_a_server_of_a_cluster_that_fails_is_left_alone":
        "tiers/test_redis.py::test_another_master_is_found_by_the_sentinel",
    "tiers/test_two_hosts.py::test_two_hosts_share_a_store":
        "tiers/test_redis.py::test_a_server_through_a_tier",
    "tiers/test_tier.py::test_many_callers_of_a_driver_that_is_often_late":
        "tiers/test_tier.py::test_a_hung_driver_never_holds_anybody_up",
    "replay/test_jobs.py::test_the_processes_end_with_the_command":
        "replay/test_jobs.py::test_an_interrupt_prints_what_is_done",
    "replay/test_jobs.py::test_an_interrupt_leaves_the_bound_of_a_model_that_is_done":
        "replay/test_jobs.py::test_an_interrupt_prints_what_is_done",
    "replay/test_jobs.py::test_an_interrupt_prints_the_traces_that_are_done":
        "replay/test_jobs.py::test_an_interrupt_prints_what_is_done",
    "replay/test_replay.py::test_on_a_workload_no_policy_beats_the_bound_and_lru_agrees_with_the_distances":
        "replay/test_replay.py::test_no_policy_beats_the_bound",
    "replay/test_replay.py::test_a_curve_in_several_processes_is_the_same":
        "replay/test_replay.py::test_a_curve_is_what_single_replays_say",
    "test_recording_in_perfetto.py::test_a_replay_with_a_model":
        "test_recording.py::test_the_life_of_requests",
    "test_recording_in_perfetto.py::test_a_file_that_is_cut_in_the_middle_of_an_event":
        "test_recording.py::test_the_life_of_requests",
    "test_recording_in_perfetto.py::test_a_replay_through_the_tree":
        "test_recording.py::test_the_life_of_requests",
    "test_packaging.py::test_the_wheel_is_small_and_whole":
        "test_packaging.py::test_what_is_built_says_its_commit",
    "test_sleeping.py::test_a_tier_that_hangs_costs_the_timeout":
        "test_below.py::test_a_hung_tier_delays_an_open_by_its_timeout_and_no_more",
    "memory/test_virtual.py::test_the_package_is_imported_late":
        "test_sleeping.py::test_the_room_is_not_imported_before_it_is_used",
    "kernels/test_dispatch.py::test_everything_works_without_triton":
        "test_without_torch.py::test_this_works_without_torch",
    "test_benchmarks.py::test_the_error_of_quantised_rows_with_an_indexer_is_other_tokens":
        "test_benchmarks.py::test_every_benchmark_runs_in_a_tiny_size",
    "replay/test_live.py::test_a_program_in_another_language_asks_and_waits":
        "replay/test_live.py::test_a_file_is_answered_too",
    "hf/test_generator_pressure.py::test_forks_proposals_and_preemptions_together":
        "hf/test_generator_pressure.py::test_tokens_equal_full_recomputation_while_requests_are_preempted",
    "hf/test_compressed.py::test_a_fork_goes_on_at_any_position_with_pending_rows":
        "hf/test_compressed.py::test_right_tokens_may_be_taken_back_too_and_computed_again",
    "hf/test_compressed.py::test_checkpoints_stay_right_when_their_sequence_is_taken_back":
        "hf/test_compressed.py::test_right_tokens_may_be_taken_back_too_and_computed_again",
    "hf/test_kv_formats.py::test_another_format_or_scale_over_a_tier_is_a_miss":
        "test_below.py::test_every_byte_comes_back_for_every_family_and_format",
    "hf/test_held_out.py::test_it_writes_words":
        "hf/test_held_out.py::test_it_predicts_text_that_it_was_not_trained_on",
    "hf/test_held_out.py::test_what_a_form_of_the_cache_costs_is_bounded":
        "hf/test_held_out.py::test_it_predicts_text_that_it_was_not_trained_on",
    "hf/test_draft_model.py::test_sampled_tokens_and_several_answers_are_those_without_a_draft":
        "hf/test_draft_model.py::test_tokens_stay_those_of_plain_decoding_cold_and_warm",
    "hf/test_generator_swap.py::test_it_chooses_by_what_was_measured":
        "hf/test_generator_swap.py::test_tokens_equal_full_recomputation",
    "kernels/interpreted_append_swa.py::test_replay_writes_the_same_bytes":
        "kernels/interpreted_append_swa.py::test_same_bytes_as_the_reference",
    "kernels/interpreted_packed_rows.py::test_replay_writes_the_same_bytes_and_follows_its_buffers":
        "kernels/interpreted_packed_rows.py::test_append_writes_the_bytes_of_the_reference",
    "kernels/compiled_packed_rows.py::test_casts_are_the_hardwares_where_it_has_them":
        "kernels/compiled_packed_rows.py::test_it_compiles_without_approximation_or_spills_and_moves_vectors",
    "test_examples.py::test_simulate":
        "test_examples.py::test_policy",
    "test_examples.py::test_agents":
        "test_examples.py::test_policy",
    "replay/fleet/test_simulate_command.py::test_costs_and_tiers_change_times_and_hits":
        "replay/fleet/test_simulate_command.py::test_engines_have_rows_of_their_own",
    "tiers/test_tier.py::test_the_breaker_asks_a_sick_driver_seldom":
        "tiers/test_tier.py::test_a_hung_driver_never_holds_anybody_up",
    "test_below.py::test_the_time_of_loads_is_compared_with_the_time_of_computing":
        "test_below.py::test_a_load_takes_few_round_trips",
    "events/test_publisher.py::test_what_cannot_be_had_is_asked_for_less_and_less_often":
        "events/test_publisher.py::test_what_is_missed_is_asked_for",
    "tiers/test_redis_connections.py::test_many_replies_that_are_none":
        "tiers/test_redis_connections.py::test_a_server_that_takes_its_time",
}  # fmt: skip
"""Test that ``make test`` leaves out -> a smaller test of the same kind that it runs."""


def mark_long(items: list[pytest.Item]) -> None:
    """Mark as long the tests in ``LONG``, and the cases of those in ``QUICK`` that are not quick. Cases that are slow or
    need a GPU are neither."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        if name in LONG:
            item.add_marker(pytest.mark.long)
        if name in QUICK and not any(item.iter_markers("slow")) and not any(item.iter_markers("gpu")):
            cases[name].append(item)
    for name, found in cases.items():
        quick = QUICK[name]
        if isinstance(quick, int):
            kept = {i * len(found) // quick for i in range(quick)}
            long = [item for i, item in enumerate(found) if i not in kept]
        else:
            long = [item for item in found if not any(word in item.nodeid.partition("[")[2] for word in quick)]
        for item in long:
            item.add_marker(pytest.mark.long)


def newest_first(items: list[pytest.Item]) -> None:
    """Order ``items`` by when their files were last committed, the newest first, so that time runs out on what other runs
    saw. Without git they stay as they are."""
    command = ["git", "log", "--format=", "--name-only", "--", "tests"]
    try:
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return
    rank = {name: at for at, name in enumerate(dict.fromkeys(told.split()))}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], -1))  # not committed yet: the newest of all


def skip_after(seconds: float) -> None:
    """Skip the test that calls this if its process began more than ``seconds`` ago."""
    if monotonic() - BEGAN > seconds:
        pytest.skip(f"not run: the {seconds:.0f} seconds of --seconds are over")
