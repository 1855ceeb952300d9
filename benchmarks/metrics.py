"""What do metrics and spans cost? Several caches in one process replay the same trace in turns, slice by slice:

    uncounted  nothing attached, and the counters at the start of a request are off
    off        nothing attached
    metrics    with a collector that is scraped once a second
    lives      the same, and the life of one cached block in 128 is followed
    all        with the collector, and spans of one request in a hundred, recorded by the OpenTelemetry SDK
    sampled    spans of every request, of which the SDK drops 99 in a hundred
    spans      spans of every request, recorded

Spans are not exported. No engine runs around the cache; as a share of an engine's time, the cost is less. ``calls``:
the Python and C calls of a pass without scrapes, divided by those of ``off``. For the cost of counting itself, compare
with a tree that does not count, with ``benchmarks.heads``.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import perf_counter, process_time
from typing import Any

from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.head_cases import FULL, GEMMA, Clock, _serve, _steps_of
from benchmarks.timing import Options, Row, tell
from benchmarks.workload import GENERATED, TRACES, workload
from kvpagoda import KVCache, Limits, Schema
from kvpagoda.core.cache.counters import Tally
from kvpagoda.metrics import CacheCollector, trace

QUESTION = "What do metrics and spans cost the host?"
_EVERY, _TOGETHER = 1.0, 16
"""Seconds between two scrapes; admissions and ends of requests in a slice."""
Attach = Callable[[KVCache], Callable[[], object] | None]
"""Attaches metrics or spans to a new cache. Returns the function to call every ``_EVERY`` seconds, or None."""


def _counted(cache: KVCache, sample: int = 0) -> Callable[[], object]:
    """Attach a collector to ``cache`` and return the function that scrapes it. ``sample``: see ``CacheCollector``."""
    registry = CollectorRegistry()
    registry.register(CacheCollector(cache, sample=sample))
    return lambda: generate_latest(registry)


def _spans(share: float, every: int = 1, *, is_counted: bool = False) -> Attach:
    """Return the mode with spans of every ``every``-th request, of which the SDK records the share ``share``.
    ``is_counted``: attach a collector too."""
    provider = TracerProvider(sampler=TraceIdRatioBased(share))
    provider.add_span_processor(SpanProcessor())
    tracer = provider.get_tracer("benchmark")

    def attach(cache: KVCache) -> Callable[[], object] | None:
        trace(cache, tracer, every=every)
        return _counted(cache) if is_counted else None

    return attach


def _nothing(cache: KVCache) -> None:
    """Attach nothing."""


def _uncounted(cache: KVCache) -> None:
    """Replace the counters that a request updates when it begins."""
    counters, tally = cache.core.counters, Tally()
    vars(counters)["began"] = lambda namespace, match, prompt: tally


MODES: dict[str, Attach] = {
    "uncounted": _uncounted, "off": _nothing, "metrics": _counted, "lives": partial(_counted, sample=128),
    "all": _spans(1.0, 100, is_counted=True),
    "sampled": _spans(0.01), "spans": _spans(1.0),
}  # fmt: skip


def _passes(work: Any, schema: Schema, attach: Attach, clock: Clock) -> Iterator[tuple[int, float]]:
    """Run endless passes over the trace, each with a new cache. After each slice, yield its number in the pass, and the
    seconds of the scrape after it, or 0.0."""
    steps, texts, capacity = _steps_of(work)
    longest = max(len(prompt) + len(output) for prompt, output in texts.values())
    since = 0.0
    while True:
        cache = KVCache(
            schema, num_blocks=capacity // 16, block_size=16, max_requests=80, device="none",
            limits=Limits(longest, step_tokens=8192),
        )  # fmt: skip
        scrape, running = attach(cache), dict[int, Any]()
        gc.collect()
        for number, first in enumerate(range(0, len(steps), _TOGETHER)):
            with clock:
                for i in steps[first : first + _TOGETHER]:
                    if i < 0:
                        running.pop(~i).close()
                    else:
                        running[i] = _serve(cache, *texts[i], 1 << 30)
            since, scraping = since + (0.0 if clock.is_counting else clock.found), 0.0
            if scrape is not None and since > _EVERY:
                begun = process_time()
                scrape()
                since, scraping = 0.0, process_time() - begun
            yield number, scraping


def _measured(work: Any, schema: Schema, modes: dict[str, Attach], enough: float) -> dict[str, tuple[float, float]]:
    """Run whole passes of all modes in turns, and return (seconds, calls) of a pass for each mode. The seconds are the
    sum over the slices of the median of each slice, plus the mean seconds of scrapes in a pass."""
    clock = Clock()
    passes = {name: _passes(work, schema, attach, clock) for name, attach in modes.items()}
    times: dict[str, dict[int, list[float]]] = {name: {} for name in modes}
    scrapes, order = dict.fromkeys(modes, 0.0), deque(modes)
    number, begun = -1, process_time()
    while number or process_time() - begun < enough * len(modes):
        order.rotate(1)  # rotate: the mode that runs after "spans" finds less in the processor's caches
        for name in order:
            number, scraping = next(passes[name])
            times[name].setdefault(number, []).append(clock.found)
            scrapes[name] += scraping
    clock.is_counting = True
    calls = {}
    for name, slices in passes.items():
        calls[name], number = 0.0, -1
        while number:
            number, _ = next(slices)
            calls[name] += clock.found
    return {
        name: (sum(map(median, slices.values())) + scrapes[name] / len(slices[0]), calls[name])
        for name, slices in times.items()
    }


def _scrape_seconds(schema: Schema) -> float:
    """Return the median wall time, in seconds, of one scrape of a cache in which 64 requests run."""
    cache = KVCache(schema, num_blocks=4096, block_size=16, max_requests=64, device="none")
    for first in range(64):
        cache.open([first, *range(200)])
    scrape = _counted(cache)
    taken = []
    for _ in range(20):
        begun = perf_counter()
        scrape()
        taken.append(perf_counter() - begun)
    return median(taken)


def measure(options: Options) -> list[Row]:
    is_there = (TRACES / "mooncake_conversation.jsonl.gz").exists() and not options.quick
    work = workload("conversation", 250) if is_there else workload(GENERATED, 20)
    schemas = {"full attention": FULL, "Gemma-like": Schema.from_hf_config(GEMMA)}
    rows = list[Row]()
    for label, schema in schemas.items():
        if options.only not in label:
            continue
        scrape, rounds = _scrape_seconds(schema), list[dict[str, tuple[float, float]]]()
        for _ in range(options.runs):
            rounds.append(_measured(work, schema, MODES, 0.05 if options.quick else 2.0))
        for name in MODES:
            ratios = [times[name][0] / times["off"][0] for times in rounds]
            rows.append(
                {
                    "case": f"{label}, {len(work)} requests",
                    "mode": name,
                    "us": 1e6 * median(times[name][0] for times in rounds) / len(work),
                    "over_off": median(ratios),
                    "from": min(ratios),
                    "to": max(ratios),
                    "calls": rounds[0][name][1] / rounds[0]["off"][1],
                    "scrape_us": 1e6 * scrape if name == "metrics" else None,
                }
            )
    return rows


if __name__ == "__main__":
    tell("metrics", QUESTION, measure)
