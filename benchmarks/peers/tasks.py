"""The tasks, the same for every peer. Times are CPU seconds of this process unless a docstring says otherwise."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.workload import AT_ONCE, SOURCES, TRACES, VOCABULARY, Tokens, cut_to_ids, workload
from kvpagoda.replay import Trace, synthetic
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.driver import Schedule, serve_with

Figures = dict[str, Any]
TOGETHER = 64
"""Steps of a replay between two reads of the clock. Their tokens are prepared before the first read."""
now = time.process_time


def replay(
    peer: Any, *, trace: str, limit: int | None, capacity: int, block_size: int, at_once: int = AT_ONCE
) -> Figures:
    """Serve every request of a trace from its admission to its end, at most ``at_once`` at a time. Return the seconds
    in all and the share of prompt tokens that were cached."""
    work = workload(trace, limit)
    steps = work.steps(capacity, at_once)
    cache = peer(capacity, block_size, max(map(work.length, range(len(work)))), 80)
    gc.collect()
    gc.freeze()
    taken = hits = prompts = requests = 0
    for first in range(0, len(steps), TOGETHER):
        batch = steps[first : first + TOGETHER]
        texts = {i: (cache.tokens(work.prompt(i)), cache.tokens(work.output(i))) for i in batch if i >= 0}
        start = now()
        for i in batch:
            if i < 0:
                cache.finish(~i)
            else:
                prompt, output = texts[i]
                hits += cache.admit(i, prompt, len(output))
                cache.append(i, output)
        taken += now() - start
        prompts += sum(len(prompt) for prompt, _ in texts.values())
        requests += len(texts)
    cache.check()
    excluded = cache.excluded
    gc.unfreeze()
    return {
        "seconds": taken, "excluded": excluded, "requests": requests, "prompt_tokens": prompts,
        "hit_percent": 100 * hits / max(1, prompts),
    }  # fmt: skip


def serve(
    peer: Any,
    *,
    config: dict[str, Any],
    budget: int,
    limit: int | None,
    trace: str = "conversation",
    is_cut: bool = False,
) -> Figures:
    """Serve a trace of ``SOURCES`` as ``kvpagoda.replay.serve`` does, with the layers of a model in ``budget`` bytes.

    ``is_cut``: prompts end with whole ids. Return the share of prompt tokens that the peer's own manager of several groups
    finds cached, and the seconds of all its calls. Without the trace file, a synthetic mix is served."""
    path = TRACES / SOURCES[trace].file
    requests = Trace.read(path, limit) if path.exists() else synthetic(limit or 40)
    per_id = SOURCES[trace].per_id if path.exists() else 64
    return dict(peer(config, budget, cut_to_ids(requests, per_id) if is_cut else requests, per_id).run())


def divide(peer: Any, *, config: dict[str, Any], budget: int, block_size: int, **settings: Any) -> Figures:
    """Return how the peer divides ``budget`` bytes for a model, in blocks of ``block_size`` tokens. ``settings``: of the peer,
    such as its ratio of what is set apart."""
    return dict(peer.divide(config, budget, block_size, **settings))


def oracle(
    peer: Any,
    *,
    trace: dict[str, Any],
    block_size: int,
    num_blocks: int,
    at_once: int,
    step_tokens: int | None,
    shared: bool = False,
    **settings: Any,
) -> Figures:
    """Serve a trace with the peer's own manager, driven as ours is, and return what each request found, in tokens. A peer
    with ``serve`` has a scheduler of its own.

    ``trace``: what ``benchmarks.oracle.trace_of`` reads. ``settings``: of the peer, such as its groups of layers."""
    from benchmarks.oracle import trace_of

    chains = Chains(trace_of(**trace), block_size)
    manager = peer(chains, num_blocks, **settings)
    start = now()
    schedule = Schedule(at_once, step_tokens, shared)
    served = manager.serve(schedule) if hasattr(manager, "serve") else serve_with(manager, chains, schedule)
    taken = now() - start
    manager.check()
    figures = {name: getattr(served, name) for name in ("never_fit", "preempted", "steps")}
    return {"hits": served.hits.tolist(), "seconds": taken, **figures}


def lookup(peer: Any, *, num_tokens: int, edges: int, block_size: int, repeats: int) -> Figures:
    """Match a prompt of ``num_tokens`` tokens that is cached as ``edges`` edges (0: not cached). Wall time."""
    text = _random(num_tokens)
    cache = peer(3 * num_tokens, block_size, num_tokens + block_size, 8)
    for part in range(1, edges + 1):  # each request leaves a branch, so that the next part is an edge of its own
        other = np.full(block_size, part % VOCABULARY, np.int32)
        prompt = text if part == edges else np.concatenate((text[: num_tokens * part // edges], other))
        cache.admit(0, cache.tokens(prompt), 1)
        cache.append(0, cache.tokens(other[:1]))
        cache.finish(0)
    asked = cache.tokens(text.copy())
    return {"seconds": _best(lambda: cache.lookup(asked), repeats), "hit": cache.lookup(asked)}


def step(peer: Any, *, context: int, requests: int, block_size: int, repeats: int, staggered: bool = False) -> Figures:
    """Run decode steps of ``requests`` requests with ``context`` tokens each.

    ``staggered``: request ``i`` has ``i % block_size`` more tokens, so that some requests begin a block in every step,
    and never all in the same step. Return the median of ``repeats`` steps, and their mean, which includes the steps in
    which blocks begin."""
    room = context + repeats + 8 + 2 * block_size
    cache = peer(requests * (room + block_size), block_size, room, requests)
    for i in range(requests):
        prompt = np.full(context + i % block_size * staggered, i, np.int32)
        cache.admit(i, cache.tokens(prompt), repeats + 8)
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(repeats + 2):
        start = now()
        cache.step()
        times.append(now() - start)
    gc.unfreeze()
    return {"seconds": median(times[2:]), "mean_us": 1e6 * mean(times[2:])}


def admission(peer: Any, *, cached: int, per_edge: int, num_tokens: int, block_size: int, repeats: int) -> Figures:
    """Serve a request of ``num_tokens`` tokens, half of them cached, in a cache of ``cached`` blocks."""
    cache = _filled(peer, cached, per_edge, block_size, num_tokens)
    known = _random(num_tokens // 2, 2**31)
    times = []
    for i in range(repeats + 1):
        prompt = cache.tokens(np.concatenate((known, _random(num_tokens - len(known), 2**31 + 1 + i))))
        start = now()
        cache.admit(0, prompt, 1)
        cache.append(0, cache.tokens(prompt[:1]))
        cache.finish(0)
        times.append(now() - start)
    return {"seconds": median(times[1:])}


def allocate(peer: Any, *, num_blocks: int, block_size: int, repeats: int) -> Figures:
    """Allocate ``num_blocks`` blocks and free them again. Wall time."""
    cache = peer(4 * max(num_blocks, 1024) * block_size, block_size, 1024, 8)
    return {"seconds": _best(lambda: cache.give(cache.take(num_blocks)), repeats, repeat=max(3, 3000 // num_blocks))}


def evict(peer: Any, *, cached: int, per_edge: int, num_blocks: int, block_size: int, repeats: int) -> Figures:
    """Evict ``num_blocks`` of ``cached`` blocks, which were published as texts of ``per_edge`` blocks each."""
    cache = _filled(peer, cached, per_edge, block_size)
    times = []
    for _ in range(repeats):
        start = now()
        cache.evict(num_blocks)
        times.append(now() - start)
    return {"seconds": median(times)}


def memory(peer: Any, *, cached: int, per_edge: int, block_size: int) -> Figures:
    """Return by how many bytes this process grows per block, from before the cache is made until it holds ``cached``
    blocks. It must be the first task of the process, so that no freed memory is reused."""
    _filled(peer, 8, 8, block_size)
    gc.collect()
    before = _resident()
    cache = _filled(peer, cached, per_edge, block_size)
    gc.collect()
    nbytes = _resident() - before
    del cache
    return {"bytes_a_block": nbytes / cached}


def _filled(peer: Any, cached: int, per_edge: int, block_size: int, longest: int = 0) -> Any:
    """Return a cache that holds ``cached`` blocks, as texts of ``per_edge`` blocks with no common prefix, and that has
    free memory for a request of ``longest`` tokens."""
    room = per_edge * block_size
    longest = max(longest, room) + block_size
    cache = peer(cached * block_size + 2 * longest, block_size, longest, 8)
    for i in range(cached // per_edge):
        text = _random(room, i)
        text[0], text[1 % room] = i % VOCABULARY, i // VOCABULARY
        cache.admit(0, cache.tokens(text), 1)
        cache.append(0, cache.tokens(text[:1]))
        cache.finish(0)
    return cache


def _random(n: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, VOCABULARY, n, np.int32)


def _best(call: Callable[[], object], repeats: int, repeat: int = 3) -> float:
    """Return the median wall time of ``repeats`` rounds, each the best of ``repeat`` calls, in seconds."""
    rounds = []
    for _ in range(repeats):
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        rounds.append(min(times))
    return median(rounds)


def _resident() -> int:
    """Return the resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
