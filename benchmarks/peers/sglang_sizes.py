"""What SGLang's configs say that a model keeps, for types that vLLM does not build: no model is built, and no GPU is needed.

    python -m benchmarks.peers.sglang_sizes < configs.json > sizes.json

``configs.json``: name -> config. For each name ``sizes.json`` has the bytes of K/V of a token over all layers, by the same
sizes of ``ModelConfig`` from which SGLang's pools are cut, and those of a request's states.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers import stubs


def asked(config: dict[str, Any]) -> dict[str, int]:
    """What SGLang says of ``config``."""
    from sglang.srt.configs.model_config import ModelConfig

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        model = ModelConfig(folder)
    states = model.hf_text_config.mamba2_cache_params
    elements = model.get_num_kv_heads(1) * (model.head_dim + model.v_head_dim)
    return {
        "token": len(model.hf_text_config.full_attention_layer_ids) * elements * model.dtype.itemsize,
        "state": int(states.mamba_cache_per_req),
    }


def main() -> None:
    """See the top of this file."""
    configs = json.loads(sys.stdin.read())
    with redirect_stdout(sys.stderr):
        import torch._inductor.runtime.triton_heuristics
        import torch._inductor.select_algorithm
        import torch.utils._triton

        torch.utils._triton.has_triton_package()  # call it now: it caches the answer for the real triton
        torch.utils._triton.has_triton()
        sys.modules["vllm"] = None  # type: ignore[assignment]  # otherwise SGLang would use parts of an installed vLLM
        stubs.install("gguf", "orjson", "torchvision", "triton", "IPython", "torchao", "sgl_kernel", "flashinfer")
        found = {name: asked(config) for name, config in configs.items()}
    print(json.dumps({"sglang": version("sglang"), "sizes": found}))


if __name__ == "__main__":
    main()
