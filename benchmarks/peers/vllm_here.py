"""Makes vLLM importable for the peers that call its managers: installed, unpacked, or of ``make consumers``."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from benchmarks.peers import look_in_consumers, stubs

_HEAVY = (
    "torchvision", "xgrammar", "llguidance", "openai_harmony", "openai", "uvloop", "aiohttp", "psutil", "cbor2", "pybase64",
    "cachetools", "cloudpickle", "cpuinfo", "fastapi", "partial_json_parser",
)  # fmt: skip
"""Packages that vLLM imports and its managers never call."""


def prepare() -> None:
    """Let ``import vllm`` find it: installed, in the folder that ``KVPAGODA_BENCH_VLLM`` names, or in the environment that
    ``make consumers`` fills; with stand-ins for the heavy packages that are missing."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if find_spec("vllm") is None:
        sys.path += filter(None, [os.environ.get("KVPAGODA_BENCH_VLLM")])
        look_in_consumers()
    stubs.install(*(name for name in _HEAVY if find_spec(name) is None))
