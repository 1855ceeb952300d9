"""The measurements of ``benchmarks.heads``: the same work in any source tree, in slices of some milliseconds.

They use names that ``kvpagoda`` itself exports where possible, so that they run with older trees too. A setting of a
cache has one name here; it is passed as the tree expects it: as a keyword of the constructor, or as a field of a value
class.
"""

from __future__ import annotations

import gc
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

import kvpagoda
from benchmarks.workload import GENERATED, Tokens, Workload, workload
from kvpagoda import KVCache, Schema
from kvpagoda.schema import Attention, Layer

FULL = Schema((Layer(0, "full_attention", (Attention(1, 1, 1, "float16"),)),), "full attention")
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 2, "head_dim": 128,
    "num_key_value_heads": 2, "torch_dtype": "bfloat16", "max_position_embeddings": 131_072,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 1, "sliding_window": 1024, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
GROUPED = {"retention": "Retention", "limits": "Limits"}
"""Parameter of a newer ``KVCache`` -> the class of ``kvpagoda`` that groups several settings for it."""
ROOM = "capacity" if "capacity" in inspect.signature(KVCache.open).parameters else "room"
"""The parameter of ``open`` for the number of tokens for which blocks are allocated at once."""
DIALECTS = ("block_table", "cache_seqlens", "slot_mapping", "kv_indptr", "kv_indices", "kv_last_page_len")
"""The index arrays of FlashAttention and of FlashInfer."""


class Clock:
    """``with clock:`` measures its body: CPU seconds or, if ``is_counting``, the number of calls of Python and C
    functions, which is the same in every run. ``found``: the last measurement."""

    def __init__(self) -> None:
        self.is_counting, self.found = False, 0.0

    def __enter__(self) -> None:
        self.found, self._begin = 0, time.process_time()
        if self.is_counting:
            sys.setprofile(self._count)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        if not self.is_counting:
            self.found = time.process_time() - self._begin

    def _count(self, frame: object, event: str, argument: object) -> None:
        self.found += event in ("call", "c_call")


clock = Clock()
Slices = Iterator[int]
"""A measurement: an endless sequence of passes over the same work. A pass is cut into slices of some milliseconds. Each
slice is measured by ``clock`` and ends with a ``yield`` of its number in the pass. Preparing a pass is not measured."""


def cache_with_memory(schema: Schema, **settings: Any) -> Any:
    """Return a ``KVCache`` on the CPU. ``settings``: by the names of the old constructor."""
    return _made(schema, {**settings, "device": "cpu"})


def cache_without_memory(schema: Schema, **settings: Any) -> Any:
    """Return a cache without memory: ``KVCache(device="none")``, or ``Books`` in an older tree."""
    try:
        from kvpagoda.books import Books
    except ImportError:
        return _made(schema, {**settings, "device": "none"})
    later = {name: settings.pop(name) for name in ("max_context", "checkpoint_every", "swap") if name in settings}
    step_tokens = settings.get("step_tokens", 512)
    return Books(schema.plan(**{**settings, "step_tokens": step_tokens}), **later)


def _made(schema: Schema, settings: dict[str, Any]) -> Any:
    """Return a ``KVCache`` with ``settings`` passed as this tree's constructor expects them."""
    taken = inspect.signature(KVCache.__init__).parameters
    given = {name: value for name, value in settings.items() if name in taken}
    for parameter, name in GROUPED.items():
        if parameter in taken:
            group = getattr(kvpagoda, name)
            given[parameter] = group(**{f.name: settings[f.name] for f in fields(group) if f.name in settings})
    return KVCache(schema, **given)


# -- whole traces ------------------------------------------------------------------------------------------------------


def replayed(trace: str, limit: int, schema: Schema, block_size: int, together: int, chunk: int = 1 << 30) -> Slices:
    """Serve every request of a trace, from its admission to its end, through a cache without memory. The trace holds
    several times as many tokens as the cache.

    A slice is ``together`` admissions and ends of requests. Prompts are committed at once, or in chunks of at most
    ``chunk`` tokens that end where a checkpoint is due.
    """
    steps, texts, capacity = _steps_of(workload(trace, limit))
    longest = max(len(prompt) + len(output) for prompt, output in texts.values())
    while True:
        cache = cache_without_memory(
            schema, num_blocks=capacity // block_size, max_requests=80, block_size=block_size,
            step_tokens=min(chunk, 8192), max_context=longest,
        )  # fmt: skip
        running: dict[int, Any] = {}
        gc.collect()
        for number, first in enumerate(range(0, len(steps), together)):
            with clock:
                for i in steps[first : first + together]:
                    if i < 0:
                        running.pop(~i).close()
                    else:
                        running[i] = _serve(cache, *texts[i], chunk)
            yield number


def _serve(cache: Any, prompt: Tokens, output: Tokens, chunk: int) -> Any:
    """Open a request, commit its prompt and its output, and return its sequence, still open."""
    total = len(prompt) + len(output)
    if chunk > total:
        sequence = cache.open(prompt, reserve=total)
        sequence.commit(prompt[sequence.length :])
    else:
        sequence = cache.open(prompt, reserve=total, **{ROOM: 0})
        _commit_in_pieces(cache, sequence, prompt, chunk)
    sequence.extend(len(output))
    sequence.commit(output)
    return sequence


def _commit_in_pieces(cache: Any, sequence: Any, prompt: Tokens, chunk: int) -> None:
    """Extend and commit ``prompt`` in chunks of at most ``chunk`` tokens that end where a checkpoint is due."""
    while sequence.length < len(prompt):
        end = min(sequence.length + min(chunk, cache.step_limit(sequence)), len(prompt))
        sequence.extend(end - sequence.length)
        sequence.commit(prompt[sequence.length : end])


def _steps_of(work: Workload) -> tuple[list[int], dict[int, tuple[Tokens, Tokens]], int]:
    """Return the order of work, (prompt, output) of each request, and a capacity in tokens. The capacity is a quarter
    of all tokens, so that many blocks are evicted."""
    total = sum(map(work.length, range(len(work))))
    capacity = max(total // 4, 2 * max(map(work.length, range(len(work)))))
    steps = work.steps(capacity)
    return steps, {i: (work.prompt(i), work.output(i)) for i in steps if i >= 0}, capacity


def simulated(trace: str, limit: int, policy: str) -> Slices:
    """Run ``kvpagoda.replay.replay``: the prefix tree and one policy, with room for 1/20 of the distinct blocks."""
    from kvpagoda.replay import replay

    columns = workload(trace, limit).trace
    capacity = max(1, columns.num_distinct // 20)
    while True:
        with clock:
            replay(columns, capacity_blocks=capacity, policy=policy)
        yield 0


# -- steps -------------------------------------------------------------------------------------------------------------


def stepped(requests: int, context: int, steps: int, is_persistent: bool) -> Slices:
    """Run decode steps of ``requests`` requests that begin their blocks in different steps, with all index arrays. A
    slice is ``steps`` steps."""
    longest = context + 16 + 16 * steps
    cache = cache_with_memory(
        FULL, num_blocks=requests * (longest // 16 + 1), max_requests=requests, block_size=16, max_context=longest
    )
    ones = np.ones(requests, np.int32)
    while True:
        sequences = []
        for i in range(requests):
            prompt = np.full(context + i % 16, i, np.int32)
            sequences.append(cache.open(prompt, reserve=longest))
            sequences[-1].commit(prompt[sequences[-1].length :])
        running = cache.persistent_batch(sequences) if is_persistent else None
        while sequences[-1].length + steps <= longest:
            with clock:
                for _ in range(steps):
                    _step(cache, sequences, running, ones)
            yield 0
        for sequence in sequences:
            sequence.close()


def _step(cache: Any, sequences: list[Any], running: Any, tokens: Tokens) -> None:
    """Run a step with one token of each sequence and make all index arrays. ``running``: a persistent batch of the
    sequences; None: make a new batch."""
    if running is not None:
        batch = running.extend()
    else:
        for sequence in sequences:
            sequence.extend(1)
        batch = cache.batch(sequences, [1] * len(sequences))
    arrays = batch.layer(0).arrays
    for name in DIALECTS:
        getattr(arrays, name)  # an array is made when it is read
    if running is not None:
        running.commit(tokens)
    else:
        for sequence in sequences:
            sequence.commit(tokens[:1])


# -- look-ups, evictions, swapping -------------------------------------------------------------------------------------


def looked_up(num_tokens: int, pieces: int, times: int) -> Slices:
    """Open and close a request whose prompt is cached as a chain of ``pieces`` edges with branches between them. A
    slice does so ``times`` times."""
    text = _random(num_tokens)
    cache = cache_without_memory(
        FULL, num_blocks=3 * num_tokens // 16, max_requests=8, block_size=16, max_context=2 * num_tokens
    )
    for part in range(1, pieces + 1):
        other = np.full(16, part, np.int32)
        _write(cache, text if part == pieces else np.concatenate((text[: num_tokens * part // pieces], other)))
    asked = text.copy()

    while True:
        with clock:
            for _ in range(times):
                cache.open(asked).close()
        yield 0


def evicted(cached: int, per_text: int, texts: int) -> Slices:
    """Serve requests without a common prefix in a full cache: each evicts ``per_text`` blocks of earlier requests. A
    slice is ``texts`` requests."""
    cache = cache_without_memory(FULL, num_blocks=cached, max_requests=8, block_size=16, max_context=16 * per_text + 16)
    fresh = (_random(16 * per_text, seed) for seed in range(1 << 30))
    for _ in range(cached // per_text):
        _write(cache, next(fresh))
    while True:
        coming = [next(fresh) for _ in range(texts)]
        with clock:
            for text in coming:
                _write(cache, text)
        yield 0


def swapped(sequences: int, tokens: int) -> Slices:
    """Suspend ``sequences`` requests of ``tokens`` tokens, then resume all of them. Bytes are copied."""
    cache = cache_with_memory(
        Schema.from_hf_config(LLAMA), num_blocks=sequences * (tokens // 16 + 1), max_requests=sequences, block_size=16,
        max_context=tokens, step_tokens=tokens,
    )  # fmt: skip
    running = []
    for i in range(sequences):
        text = _random(tokens, i)
        running.append(cache.open(text))
        running[-1].commit(text)

    while True:
        with clock:
            for sequence in running:
                sequence.suspend()
            for sequence in running:
                sequence.resume()
        yield 0


# -- tiers -------------------------------------------------------------------------------------------------------------


def _tiered(texts: int, tokens: int) -> Any:
    """Return a cache for ``texts`` texts of ``tokens`` tokens, with a host memory tier without checksums."""
    from kvpagoda.tiers import host_tier

    return cache_with_memory(
        Schema.from_hf_config(LLAMA), num_blocks=2 * texts * (tokens // 16 + 1), max_requests=8, block_size=16,
        max_context=tokens + 16, step_tokens=tokens + 16, tiers=[host_tier("512MiB", write="commit", checksum=False)],
    )  # fmt: skip


def stored(texts: int, tokens: int) -> Slices:
    """Commit ``texts`` new texts and store their blocks in a host memory tier."""
    cache = _tiered(texts, tokens)
    fresh = (_random(tokens, seed) for seed in range(1 << 30))
    while True:
        coming = [next(fresh) for _ in range(texts)]
        with clock:
            for text in coming:
                _write(cache, text)
            cache.flush()
        yield 0


def loaded(texts: int, tokens: int) -> Slices:
    """Open ``texts`` texts whose blocks only the tier holds, so that the blocks are loaded."""
    cache = _tiered(texts, tokens)
    known = [_random(tokens, seed) for seed in range(texts)]
    for text in known:
        _write(cache, text)
    cache.flush()

    while True:
        cache.reset()
        with clock:
            for text in known:
                cache.open(text).close()
        yield 0


# -- the list ----------------------------------------------------------------------------------------------------------


def _hybrid(config: dict[str, Any] | None) -> Schema:
    """Return the schema of ``config`` (None: DeepSeek-V4 Flash) without the model's limits."""
    from kvpagoda.compat.deepseek_v4 import PRESETS

    schema = PRESETS["deepseek-v4-flash"]("raw") if config is None else Schema.from_hf_config(config)
    return replace(schema, max_positions=None, vocab_size=None)


def trace_of(case: str, quick: bool) -> tuple[str, int]:
    """Return the arguments of ``workload`` for a case that replays a trace: its name and how many requests."""
    name = case.split()[1]
    return (GENERATED, 20) if quick else (name, {"conversation": 250, "agent": 40}[name])


def cases(quick: bool = False) -> dict[str, Callable[[], Slices]]:
    """Return every measurement by its name. ``quick``: tiny sizes and no trace files, to see that everything runs."""

    def sized(full: int, tiny: int) -> int:
        return tiny if quick else full

    text = sized(131_072, 4096)
    found: dict[str, Callable[[], Slices]] = {
        "tree lru": partial(simulated, GENERATED if quick else "conversation", sized(150, 40), "lru"),
        "tree s3fifo": partial(simulated, GENERATED if quick else "conversation", sized(150, 40), "s3fifo"),
        "step persistent": partial(stepped, sized(256, 8), sized(1024, 64), sized(4, 2), True),
        "step batch": partial(stepped, sized(256, 8), sized(1024, 64), 2, False),
        "lookup 128K, one piece": partial(looked_up, text, 1, sized(12, 2)),
        "lookup 128K, 128 pieces": partial(looked_up, text, 128, sized(6, 2)),
        "evict": partial(evicted, sized(30_000, 640), 32, sized(32, 4)),
        "evict, block by block": partial(evicted, sized(10_000, 64), 1, sized(32, 4)),
        "swap": partial(swapped, sized(6, 2), sized(512, 64)),
        "tier store": partial(stored, sized(4, 2), sized(1024, 64)),
        "tier load": partial(loaded, sized(4, 2), sized(1024, 64)),
    }
    for name in ("replay conversation", "replay agent"):
        for block_size in (1, 16):
            found[f"{name} {block_size}"] = partial(replayed, *trace_of(name, quick), FULL, block_size, 16)
    hybrids = {"Gemma-like": GEMMA, "Qwen3-Next-like": QWEN3_NEXT, "DeepSeek-V4": None}
    for name, config in hybrids.items():
        block_size = 128 if config is None else 16
        found[f"hybrid {name}"] = partial(
            replayed, GENERATED, sized(60, 12), _hybrid(config), block_size, 8, chunk=2048
        )
    return found


def _write(cache: Any, text: Tokens) -> None:
    """Serve a request with the prompt ``text`` from its admission to its end."""
    sequence = cache.open(text)
    sequence.commit(text[sequence.length :])
    sequence.close()


def _random(n: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 32_000, n, np.int32)
