"""SGLang's own settings, published for a process that has no GPU and no server: what it would choose on a GPU of NVIDIA."""

from __future__ import annotations

import json
import tempfile
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

context = import_module("sglang.srt.runtime_context")  # of a process in which SGLang is importable
arguments = import_module("sglang.srt.server_args")
models = import_module("sglang.srt.configs.model_config")
ARCHITECTURES = {
    "gpt_oss": "GptOssForCausalLM", "qwen3_next": "Qwen3NextForCausalLM", "nemotron_h": "NemotronHForCausalLM",
    "llama": "LlamaForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
}  # fmt: skip


def publish(config: dict[str, Any] | None, block_size: int, attention: str | None = None, **options: Any) -> Any:
    """Publish the settings for the model of ``config`` (None: for none), and return what SGLang knows of the model.
    ``attention``: the backend; None: SGLang chooses. ``options``: others of SGLang's, by their names."""
    return _published(config and json.dumps(config), block_size, attention, json.dumps(options))


@lru_cache(1)
def _published(config: str | None, block_size: int, attention: str | None, options: str) -> Any:
    given = json.loads(config or "{}")
    with tempfile.TemporaryDirectory() as folder, context.override_platform(is_cuda=True):
        named = {"architectures": [ARCHITECTURES[given["model_type"]]]} if given else {}
        Path(folder, "config.json").write_text(json.dumps({**given, **named}))
        made = arguments.ServerArgs(
            model_path=folder if given else "dummy",
            device="cuda",
            page_size=block_size,
            attention_backend=attention,
            **json.loads(options),
        )
        context.publish(made, role="scheduler")
        if not given:
            return None
        context.mamba_cache_chunk_size()  # reads the config
        return models.ModelConfig.from_server_args(made)
