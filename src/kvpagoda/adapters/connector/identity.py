"""Which weights an engine computes with, and how its blocks are laid out, as texts that are equal in equal engines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

_PAGE, _EVERY = 4096, 1 << 20
_WHOLE = 64 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_NAMES = {"_name_or_path", "transformers_version"}  # of a config, which say nothing of its layers


def weights_of(model_config: Any, load_format: str) -> str:
    """Return a text that names the weights of a model: the digest of its files, or the commit of a repository.

    In a folder, files of weights count with their sizes and with a page of 4 KiB in each MiB (a file up to 64 MiB as a
    whole). ``load_format`` "dummy": the weights are those that vLLM draws for this seed.
    """
    path = Path(str(model_config.model))
    if load_format == "dummy":
        return f"dummy, seed {model_config.seed}"
    if path.exists():
        return files_digest(str(path))
    commit = getattr(model_config.hf_config, "_commit_hash", None) or model_config.revision or ""
    return f"{model_config.model}@{commit}"


@lru_cache(maxsize=256)
def files_digest(path: str) -> str:
    """Return a digest of the weights below the folder, or in the file, ``path``; see ``weights_of``."""
    root, digest = Path(path), blake2b(digest_size=16)
    files = sorted(root.rglob("*")) if root.is_dir() else [root]
    for file in files:
        if file.suffix in _WEIGHTS and file.is_file():
            digest.update(f"{file.name} {file.stat().st_size};".encode())
            for part in _parts(file):
                digest.update(part)
    return digest.hexdigest()


def _parts(file: Path) -> Iterable[bytes]:
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size <= _WHOLE:
            yield opened.read()
            return
        for at in [*range(0, size - _PAGE, _EVERY), size - _PAGE]:
            yield os.pread(opened.fileno(), _PAGE, at)


def adapter_of(lora: Any) -> str:
    """Return a text that names the adapter of a LoRA request of vLLM by its content, if its files are here."""
    path = str(lora.lora_path or "")
    is_here = bool(path) and Path(path).exists()
    return files_digest(path) if is_here else f"{lora.lora_name} {lora.lora_int_id} {path}"


def schema_of(vllm_config: Any, groups: Any, caches: Any, version: str, facts: Callable[[str], str]) -> str:
    """Return a text that says what the bytes of a block mean: the model's config, the dtypes, the layouts of all
    layers in ``caches``, the version of vLLM, and ``facts(layer)``, such as the attention backend."""
    model = vllm_config.model_config
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in _NAMES}
    layers = {
        name: (list(caches[name].shape[1:]), list(caches[name].stride()), str(caches[name].dtype), facts(name))
        for group in groups
        for name in group.layers
    }
    shapes = [(g.block_size, g.window, g.chunk, g.is_state, g.layers) for g in groups]
    cache = vllm_config.cache_config
    known = [version, str(model.dtype), model.quantization, cache.cache_dtype, config, shapes, layers]
    text = json.dumps(known, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()
