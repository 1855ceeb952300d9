"""The speed of copying blocks to host memory and back, compared with copying memory, and the time that it saves.

- ``CacheEngine``: whole blocks of every layer in random order. Compared with ``np.copyto`` of as many pieces of memory
  of that size in random order, and with a loop over layers and blocks. Each runs on one thread.
- ``copy_to_host``, ``copy_from_host``: records between an arena and a table in host memory, in random order, compared
  with the same ``np.copyto``.
- A sequence is suspended, evicted and resumed. Compared with ``np.copyto`` of its blocks out and back. For a small
  model that is run here (4 layers, hidden size 256, random weights, float32), also compared with computing the sequence
  again.

``us``: time for a block's part in one layer, for a record or for a sequence. ``one_copy_percent``: speed as a share of
that of one copy of all bytes in order, which the C library makes with stores that bypass the processor's caches.
``instead``: the time of the loop, or of computing again, divided by ours.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.timing import Options, Row, medians, seconds, tell
from kvpagoda import Limits
from kvpagoda.compat.cache_engine import CacheEngine
from kvpagoda.core.cache.sequence import Sequence
from kvpagoda.core.kv_cache import KVCache
from kvpagoda.core.memory.arena import Arena
from kvpagoda.core.memory.host_copy import copy_from_host, copy_to_host
from kvpagoda.schema import Field, RowLayout, Schema
from kvpagoda.units import format_bytes

QUESTION = "How much of the speed of memory does swapping leave, and what does it save?"
LLAMA_1B = {
    "model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 64,
    "num_key_value_heads": 8, "torch_dtype": "bfloat16", "max_position_embeddings": 131_072,
}  # fmt: skip
Call = Callable[[], object]


def measure(options: Options) -> list[Row]:
    total, tokens = (8 << 20, 1024) if options.quick else (256 << 20, 32_768)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the loop uses torch; everything else runs on one thread
    rows = [
        row
        for size in (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
        for row in (*_engine(options, size, total), *_spill(options, size, total))
    ]
    torch.set_num_threads(threads)
    rows.append(_sequence(options, "Llama-3.2-1B's shapes", Schema.from_hf_config(LLAMA_1B), tokens))
    return [*rows, _computed(options, tokens)]


def _plain(total: int, size: int, is_random: bool) -> dict[str, Call]:
    """Return two calls: copies of ``total`` bytes in pieces of ``size``, and one copy of all. The memory is written."""
    source, target = np.ones((total // size, size), np.uint8), np.ones((total // size, size), np.uint8)
    random, orders = np.random.default_rng(1), [range(total // size)] * 2
    if is_random:
        orders = [random.permutation(total // size).tolist() for _ in orders]

    def copies() -> None:
        for s, d in zip(*orders):
            np.copyto(target[d], source[s])

    return {"plain": copies, "one copy": lambda: np.copyto(target, source)}


def _told(
    options: Options, case: str, size: int, total: int, calls: dict[str, Call], loop: dict[str, Call]
) -> list[Row]:
    """Return a row for each of ``calls``, compared with a plain copy and, if given, with the same in a ``loop``."""
    loops = {f"{name} in a loop": call for name, call in loop.items()}
    for call in (*calls.values(), *loops.values()):
        call()  # writes the memory for the first time
    taken = medians({**_plain(total, size, is_random=True), **calls, **loops}, options.runs, repeat=3)
    count = total // size
    return [
        {
            "case": f"{case}, {name}, {format_bytes(size)}",
            "us": taken[name] / count * 1e6,
            "plain_us": taken["plain"] / count * 1e6,
            "share_percent": 100 * taken["plain"] / taken[name],
            "one_copy_percent": 100 * taken["one copy"] / taken[name],
            "instead": taken[f"{name} in a loop"] / taken[name] if loop else None,
        }
        for name in calls
    ]


def _engine(options: Options, size: int, total: int) -> list[Row]:
    """Measure ``CacheEngine``. ``size``: bytes of the K (or V) of a block in one layer; ``total``: bytes of a copy."""
    layers, heads, head_size = 4, 1, 128
    blocks = total // (2 * layers * size)
    engine = CacheEngine(
        SimpleNamespace(
            block_size=size // (2 * heads * head_size), num_gpu_blocks=blocks, num_cpu_blocks=blocks, cache_dtype="auto"
        ),
        SimpleNamespace(
            get_head_size=lambda: head_size, get_num_kv_heads=lambda _: heads, use_mla=False, dtype="float16",
            get_num_layers_by_block_type=lambda *_: layers,
        ),
        SimpleNamespace(pipeline_parallel_size=1),
        SimpleNamespace(device_type="cpu"),
    )  # fmt: skip
    random = np.random.default_rng(0)
    pairs = torch.from_numpy(np.stack([random.permutation(blocks), random.permutation(blocks)], axis=1))

    def loop(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        for source, target in zip(sources, targets):
            for s, d in pairs.tolist():
                target[:, d].copy_(source[:, s])

    calls: dict[str, Call] = {"swap_out": lambda: engine.swap_out(pairs), "swap_in": lambda: engine.swap_in(pairs)}
    loops: dict[str, Call] = {
        "swap_out": lambda: loop(engine.gpu_cache, engine.cpu_cache),
        "swap_in": lambda: loop(engine.cpu_cache, engine.gpu_cache),
    }
    return _told(options, "CacheEngine", size, total, calls, loops)


def _spill(options: Options, size: int, total: int) -> list[Row]:
    """Measure ``copy_to_host`` and ``copy_from_host`` ("fill") with records of ``size`` bytes, ``total`` bytes in all."""
    count, random = total // size, np.random.default_rng(0)
    arena = Arena(RowLayout.build([(0, Field("k", 1, (size,), "uint8"))]), count, device="cpu")
    table, ids = torch.zeros((count, size), dtype=torch.uint8), random.permutation(count)
    rows = random.permutation(count).tolist()
    calls: dict[str, Call] = {
        "copy_to_host": lambda: copy_to_host(arena, ids, table, rows),
        "fill": lambda: copy_from_host(arena, ids, table, rows),
    }
    return _told(options, "records", size, total, calls, {})


def _set_aside(options: Options, cache: KVCache, sequence: Sequence) -> float:
    """Return the median seconds of a suspend and the resume after it; in between, all its cached blocks are evicted."""
    taken = []
    for _ in range(options.runs + 1):
        suspended = seconds(sequence.suspend)
        cache.core.capacity.forget(cache.core.prefix.clear)
        taken.append(suspended + seconds(sequence.resume))
    return float(np.median(taken[1:]))  # the first round writes memory for the first time


def _sequence(options: Options, case: str, schema: Schema, tokens: int) -> Row:
    """Measure suspend and resume of a sequence of ``tokens`` tokens."""
    cache = KVCache(
        schema,
        num_blocks=tokens // 16 + 1,
        block_size=16,
        max_requests=1,
        device="cpu",
        limits=Limits(step_tokens=tokens),
    )
    for arena in cache.core.memory.arenas:
        arena.buffer.fill_(1)
    text = np.arange(tokens) % 1000
    sequence = cache.open(text)
    sequence.commit(text)
    return _row(options, case, cache, sequence)


def _row(options: Options, case: str, cache: KVCache, sequence: Sequence) -> Row:
    """Return the row of suspend and resume of ``sequence``, compared with plain copies of its bytes out and back."""
    nbytes = cache.core.swap.nbytes_of(sequence.slot, sequence.length, True)
    ours = _set_aside(options, cache, sequence)
    plain, one_copy = (
        2 * taken for taken in medians(_plain(nbytes, cache.core.swap.width, is_random=False), options.runs).values()
    )
    return {
        "case": f"{case}, {sequence.length:,} tokens, {format_bytes(nbytes)}, suspend + resume",
        "us": ours * 1e6,
        "plain_us": plain * 1e6,
        "share_percent": 100 * plain / ours,
        "one_copy_percent": 100 * one_copy / ours,
        "instead": None,
    }


@torch.no_grad()
def _computed(options: Options, tokens: int) -> Row:
    """Measure suspend and resume of a prompt, compared with computing it once in chunks of 2,048 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvpagoda.hf.runner import ModelRunner

    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=tokens, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).eval()
    cache = KVCache(
        Schema.from_hf_config(config), num_blocks=tokens // 16 + 1, block_size=16, max_requests=1, device="cpu"
    )
    text = (np.arange(tokens) % 1000).astype(np.int32)
    runner, sequence = ModelRunner(model, cache), cache.open(text)

    def compute() -> None:
        while sequence.length < tokens:
            piece = text[sequence.length : sequence.length + 2048]
            runner.step([(sequence, piece)])
            sequence.commit(piece)

    computed = seconds(compute)
    row = _row(options, "a model of 4 layers", cache, sequence)
    return {**row, "instead": computed * 1e6 / row["us"]}


if __name__ == "__main__":
    tell("swap", QUESTION, measure)
