"""vLLM's own specs of what the layers of a model keep: it builds the model from a config, without weights, and is asked.

    python -m benchmarks.peers.vllm_specs < configs.json > specs.json

with a Python whose vLLM is to be asked. ``configs.json``: name -> config. For each name ``specs.json`` has the class of the
model and a row for each layer with a cache, or why vLLM does not build it. What needs a GPU and keeps no cache (experts,
the choice of a sparse attention kernel, CUDA streams) is replaced: the specs come from the layers themselves.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import sysconfig
import tempfile
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from benchmarks.peers import stubs

os.environ.update(
    VLLM_TARGET_DEVICE="cpu", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_KVCACHE_SPACE="1", TRANSFORMERS_VERBOSITY="error", OMP_NUM_THREADS="1",
)  # fmt: skip
LONGEST = 60
"""Seconds after which a model that is not built is given up."""
NOTE = "vllm.models.dots3_note.nvidia.model:Dots3NoteLanguageModelForCausalLM"
"""The language model of a model that vLLM builds beside its tokenizer and its images alone; it has no name of its own."""
BLOCK = 256
"""Tokens of a block: a multiple of every compression ratio."""


def replace_what_needs_a_gpu() -> None:
    """Load the operators of another vLLM if this one has none, and put stand-ins in the place of parts that hold no cache."""
    stubs.install("torchvision", "flashinfer", "cutlass", "cuda", "xgrammar", "llguidance")
    for name in ("vllm_flash_attn", "vllm_flash_attn.flash_attn_interface", "third_party.deep_gemm"):
        name = f"vllm.{name}"
        sys.modules[name] = MagicMock()
    import torch
    from torch import nn

    own = Path(import_module("vllm").__file__ or "").parent
    built = Path(sysconfig.get_path("purelib"), "vllm", "_C.abi3.so")
    if not any(own.glob("_C*.so")) and built.exists():
        torch.ops.load_library(built)

    class Experts(nn.Module):
        """Experts: they keep nothing."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

        def __getattr__(self, name: str) -> Any:
            with suppress(AttributeError):
                return super().__getattr__(name)
            if name.startswith("_"):
                raise AttributeError(name)
            return MagicMock()

    moe: Any = import_module("vllm.model_executor.layers.fused_moe")
    moe.FusedMoEFactory = import_module("vllm.model_executor.layers.fused_moe.layer").FusedMoEFactory = Experts
    allocation: Any = import_module("vllm.triton_utils.allocation")
    allocation.triton = MagicMock()
    registry: Any = import_module("vllm.model_executor.models.registry")
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(
        self.load_model_cls()
    )
    fa_utils: Any = import_module("vllm.v1.attention.backends.fa_utils")
    for name in (
        "compile_flash_attn_varlen_func_from_specs",
        "flash_attn_varlen_func",
        "get_scheduler_metadata",
        "reshape_and_cache_flash",
    ):
        setattr(fa_utils, name, getattr(fa_utils, name, MagicMock()))
    fa_utils.is_flash_attn_varlen_func_available = lambda: True
    import_module("vllm.v1.attention.backends.flashinfer")._get_multi_ctas_kv_counter_buffer = MagicMock()
    import_module("vllm.utils.torch_utils").get_accelerator_view_from_cpu_tensor = lambda tensor: tensor
    registry.ModelRegistry.register_model(NOTE.partition(":")[2], NOTE)
    from vllm.config import get_current_vllm_config

    platform: Any = import_module("vllm.platforms.cpu").CpuPlatform
    dense = platform.get_attn_backend_cls.__func__

    def backend(cls: Any, selected: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        """The kernel of an attention layer; of a sparse one FlashMLA's; FlashInfer's for a model that takes no other."""
        if attn_selector_config.use_sparse:
            return "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
        if "FlintForCausalLM" in get_current_vllm_config().model_config.architectures:
            return "vllm.v1.attention.backends.flashinfer.FlashInferBackend"
        return str(dense(cls, selected, attn_selector_config, num_heads))

    platform.get_attn_backend_cls = classmethod(backend)
    hopper = import_module("vllm.platforms.interface").DeviceCapability(9, 0)
    platform.get_device_capability = classmethod(lambda cls, device_id=0: hopper)
    platform.check_and_update_config = classmethod(lambda cls, settings: None)

    def late(*_: object) -> None:
        raise TimeoutError(f"not built after {LONGEST} seconds")

    signal.signal(signal.SIGALRM, late)
    torch.cuda.Event = torch.cuda.Stream = MagicMock
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.empty_cache = lambda: None
    for make in ("empty", "zeros"):
        setattr(torch, make, unpinned(getattr(torch, make)))
    nas: Any = import_module("vllm.model_executor.models.nemotron_nas")
    nas.DeciModel.__init__ = with_block_configs(nas.DeciModel.__init__)
    import_module("vllm.v1.worker.workspace").init_workspace_manager(torch.device("cpu"))


def with_block_configs(make: Any) -> Any:
    """``make``, which builds a model, for tables of a config that its own code makes objects of."""

    def attributes(table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        return SimpleNamespace(**{name: attributes(value) for name, value in table.items()})

    def made(model: Any, *arguments: Any, vllm_config: Any, **options: Any) -> None:
        config = vllm_config.model_config.hf_config
        config.block_configs = [attributes(block) for block in getattr(config, "block_configs", None) or ()]
        make(model, *arguments, vllm_config=vllm_config, **options)

    return made


def unpinned(make: Any) -> Any:
    """``make``, which makes tensors, without page-locked memory."""
    return lambda *arguments, pin_memory=False, **options: make(*arguments, **options)


@contextmanager
def built(config: dict[str, Any]) -> Any:
    """Yield (vLLM's settings, the model) of a config."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import destroy_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        arguments = EngineArgs(
            folder, skip_tokenizer_init=True, dtype="bfloat16", block_size=BLOCK, enforce_eager=True,
            load_format="dummy", max_num_seqs=4, mamba_ssm_cache_dtype="float32",
        )  # fmt: skip
        settings = arguments.create_engine_config()
        model = settings.model_config
        with set_current_vllm_config(settings):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo")
            destroy_model_parallel()
            initialize_model_parallel()
            device = "cpu" if config.get("hidden_size", 0) < 512 else "meta"
            with torch.device(device):
                yield settings, initialize_model(vllm_config=settings, model_config=model)


def row(name: str, spec: Any) -> dict[str, Any]:
    """A layer's spec in plain figures: bytes of a token, or of a request if it keeps the same bytes for any text."""
    found: dict[str, Any] = {"layer": name, "spec": type(spec).__name__}
    if hasattr(spec, "shapes"):
        kinds = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
        return found | {"request": spec.state_content_size_bytes, "states": [*zip(spec.shapes, kinds)]}
    if type(spec).__name__ == "CircularBufferSpec":
        return found | {"request": spec.page_size_bytes, "rows": spec.block_size}
    nbytes = getattr(spec, "real_page_size_bytes", spec.page_size_bytes)
    found |= {"token": nbytes / spec.block_size, "padded": spec.page_size_bytes / spec.block_size}
    for field in ("sliding_window", "attention_chunk_size", "rswa_window", "tokens_per_state"):
        if getattr(spec, field, None) is not None:
            found[field] = getattr(spec, field) if field != "tokens_per_state" else float(spec.tokens_per_state)
    return found


def asked(config: dict[str, Any]) -> dict[str, Any]:
    """What vLLM says of ``config``."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    signal.alarm(LONGEST)
    try:
        with built(config) as (settings, model):
            layers = settings.compilation_config.static_forward_context
            specs = {
                name: layer.get_kv_cache_spec(settings)
                for name, layer in layers.items()
                if isinstance(layer, AttentionLayerBase) and not getattr(layer, "kv_sharing_target_layer_name", None)
            }
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return {"absent": f"{type(error).__name__}: {error}".replace("\n", " ")[:400]}
    finally:
        signal.alarm(0)
    rows = [row(name, spec) for name, spec in specs.items() if spec is not None]
    return {"model": type(model).__name__, "layers": rows}


def version_of_vllm() -> str:
    """Return the version of the installed vLLM, or of its build for a CPU."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")


def main() -> None:
    """See the top of this file."""
    configs = json.loads(sys.stdin.read())
    with redirect_stdout(sys.stderr):
        replace_what_needs_a_gpu()
        found = {name: asked(config) for name, config in configs.items()}
    print(json.dumps({"vllm": version_of_vllm(), "transformers": version("transformers"), "specs": found}))


if __name__ == "__main__":
    main()
