"""Servers of other projects with tiny random models, in processes of their own: vLLM's on a CPU, and mlx-lm's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "adapters"))

VLLM = Path(os.environ.get("KVPAGODA_VLLM_VENV", ROOT / ".venv-vllm")) / "bin" / "python"
MLX = Path(os.environ.get("KVPAGODA_CONSUMERS", ROOT / ".venv-consumers")) / "mlx" / "bin" / "python"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save(root: Path, kind: str, seed: int = 0) -> str:
    """Write a model with random weights and a tokenizer of bytes, for vLLM, and return its folder."""
    import tiny_vllm

    return _with_tokenizer(tiny_vllm.save(root, kind, seed))


def save_mlx(root: Path, kind: str, seed: int = 0) -> str:
    """Write such a model for mlx-lm, and return its folder."""
    if not MLX.exists():
        pytest.skip("no mlx-lm: make consumers")
    folder = root / f"mlx-{kind}-{seed}"
    command = [str(MLX), str(Path(__file__).with_name("mlx_model.py")), str(folder), kind, str(seed)]
    subprocess.run(command, check=True, capture_output=True)
    return _with_tokenizer(str(folder))


def _with_tokenizer(folder: str) -> str:
    """Write a tokenizer into ``folder``, for which each byte is a token; the others have names."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<s>", "</s>", *letters]
    names += [f"<{i}>" for i in range(len(names), 512)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


@contextmanager
def _started(command: list[str], port: int, log: Path, seconds: float, **environment: str) -> Iterator[str]:
    """Run ``command`` until its ``/health`` answers; yield its address; end it."""
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment})
    try:
        end = monotonic() + seconds
        while True:
            try:
                with urlopen(f"{url}/health", timeout=5):
                    break
            except (URLError, OSError):
                pass
            assert process.poll() is None and monotonic() < end, log.read_text(errors="replace")[-3000:]
            sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def vllm_server(folder: str, tmp: Path, *options: str, fault: str = "") -> Iterator[str]:
    """vLLM's OpenAI server for the model in ``folder``. ``fault``: one of ``vllm_fault.py``, planted by a plug-in."""
    if not VLLM.exists():
        pytest.skip("no vLLM: make vllm")
    import tiny_vllm
    from vllm_fault import BLOCKS

    port = _free_port()
    command = [
        str(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(port), "--host",
        "127.0.0.1", "--served-model-name", "tiny", "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "8",
        "--num-gpu-blocks-override", str(BLOCKS), "--enable-prompt-tokens-details", "--enable-prefix-caching", *options,
    ]  # fmt: skip
    environment = {**tiny_vllm.ENVIRONMENT}
    if fault:
        plugin = tmp / "plugin" / "fault-1.dist-info"
        plugin.mkdir(parents=True, exist_ok=True)
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: fault\nVersion: 1\n")
        (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nfault = vllm_fault:plant\n")
        environment |= {"PYTHONPATH": f"{plugin.parent}:{Path(__file__).parent}", "KVPAGODA_FAULT": fault}
    with _started(command, port, tmp / f"vllm-{port}.log", 900, **environment) as url:
        yield url


@contextmanager
def mlx_server(folder: str, tmp: Path, *options: str, fault: str = "") -> Iterator[str]:
    """mlx-lm's server for the model in ``folder``. ``fault``: of ``mlx_fault.py``."""
    if not MLX.exists():
        pytest.skip("no mlx-lm: make consumers")
    port = _free_port()
    command = [
        str(MLX), str(Path(__file__).with_name("mlx_fault.py")), fault, "--model", folder, "--port", str(port), "--host",
        "127.0.0.1", "--log-level", "WARNING", *options,
    ]  # fmt: skip
    with _started(command, port, tmp / f"mlx-{port}.log", 180, HF_HUB_OFFLINE="1") as url:
        yield url


def asked(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Post ``body`` and return the answer."""
    from urllib.request import Request

    request = Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=300) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found
