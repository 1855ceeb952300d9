"""Spans around the calls of one cache, and of no other."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvpagoda import BadInput, HandoverMiss, KVCache, Limits, RetryLater, Schema
from kvpagoda.handover import SharedMemory
from kvpagoda.metrics import Tracing, trace
from kvpagoda.schema import Attention, Layer
from kvpagoda.tiers import host_tier
from raises import raises

FULL = Schema((Layer(0, "full", (Attention(1, 1, 1, "float16"),)),), "tiny")


class Recorded:
    """A tracer whose spans are kept; the cache must never be in the middle of a change where one begins or ends."""

    def __init__(self, cache: KVCache) -> None:
        self.exporter, guard = InMemorySpanExporter(), cache.core.guard

        class Watch(SpanProcessor):
            def on_start(self, span: object, parent_context: object = None) -> None:
                assert not guard.is_torn

            def on_end(self, span: ReadableSpan) -> None:
                assert not guard.is_torn

        provider = TracerProvider()
        provider.add_span_processor(Watch())
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing: Tracing = trace(cache, provider.get_tracer("test"))

    def spans(self) -> list[ReadableSpan]:
        return [*self.exporter.get_finished_spans()]

    def names(self) -> Counter[str]:
        return Counter(span.name.removeprefix("kvpagoda.") for span in self.spans())


def cache_of(num_blocks: int = 16, **settings: object) -> KVCache:
    return KVCache(FULL, num_blocks=num_blocks, block_size=4, max_requests=2, device="none", **settings)  # type: ignore[arg-type]


def serve(cache: KVCache, tokens: list[int]) -> None:
    with cache.open(tokens) as sequence:
        sequence.commit(tokens[sequence.length :])


def test_open_tells_what_was_found() -> None:
    cache = cache_of()
    recorded = Recorded(cache)
    for _ in range(2):
        serve(cache, [*range(20)])
    first, second = recorded.spans()
    assert [span.name for span in (first, second)] == ["kvpagoda.open"] * 2
    assert second.attributes is not None and dict(second.attributes) == {
        "kvpagoda.prompt_tokens": 20, "kvpagoda.cached_tokens": 19, "kvpagoda.loaded_tokens": 0,
        "kvpagoda.limited_by": "nothing",
    }  # fmt: skip
    assert second.status.status_code is StatusCode.UNSET


def test_room_and_tiers_are_inside_of_the_open_that_needs_them() -> None:
    cache = cache_of(tiers=[host_tier("1MiB")])
    for first in range(8):
        serve(cache, [first] * 40)
    cache.flush()
    recorded = Recorded(cache)
    serve(cache, [0] * 40)
    names = recorded.names()
    assert names["open"] == 1 and names["find"] == 1 and names["load"] == 1 and names["evict"] >= 1
    of = {span.name: span for span in recorded.spans()}
    outer = of["kvpagoda.open"].context
    for name in ("find", "load"):
        parent = of[f"kvpagoda.{name}"].parent
        assert parent is not None and outer is not None and parent.span_id == outer.span_id
    assert of["kvpagoda.load"].attributes == {"kvpagoda.blocks_wanted": 9, "kvpagoda.blocks": 9}
    told = of["kvpagoda.evict"].attributes
    assert told is not None and told["kvpagoda.blocks_evicted"] == cache.stats().evicted_blocks
    cache.close()


def test_suspend_and_resume() -> None:
    cache = cache_of(limits=Limits(swap="1MiB"))
    recorded = Recorded(cache)
    sequence = cache.open([*range(10)])
    sequence.commit([*range(10)])
    sequence.suspend(whole=False)
    sequence.resume()
    assert recorded.names() == {"open": 1, "suspend": 1, "resume": 1}
    told = next(span.attributes for span in recorded.spans() if span.name == "kvpagoda.suspend")
    assert told == {"kvpagoda.tokens": 10, "kvpagoda.is_whole": False}


def test_receive_tells_what_was_read() -> None:
    pytest.importorskip("torch")
    given = dict(num_blocks=32, block_size=4, max_requests=2, device="cpu")
    one, cache = KVCache(FULL, **given), KVCache(FULL, **given)  # type: ignore[arg-type]
    sender, transfer, recorded = one.sender(SharedMemory("1MiB")), SharedMemory(), Recorded(cache)
    serve(cache, [*range(9)])
    sequence = one.open(range(20))
    sequence.commit(range(18))
    tickets = [sequence.hand_over(9.0, goes_on=True) for _ in range(2)]
    cache.receive(tickets[0], transfer).close()
    sender.give_up(tickets[1])
    with pytest.raises(HandoverMiss):
        cache.receive(tickets[1], transfer)
    _, told, missed = recorded.spans()
    names = ("prompt_tokens", "tokens", "received_tokens")
    assert told.name == "kvpagoda.receive" and told.attributes == dict(
        zip([f"kvpagoda.{n}" for n in names], (20, 18, 10))
    )
    assert missed.attributes == {"error.type": "HandoverMiss"} and missed.status.status_code is StatusCode.UNSET


def test_no_room_is_told_and_is_no_fault() -> None:
    cache = cache_of()
    held = [cache.open([i] * 10) for i in range(2)]
    recorded = Recorded(cache)
    with pytest.raises(RetryLater):
        cache.open([*range(10)])
    (span,) = recorded.spans()
    assert span.attributes == {"error.type": "RetryLater"} and span.status.status_code is StatusCode.UNSET
    for one in held:
        one.close()
    cache.check()


def test_a_fault_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of()

    def broken(*_: object, **__: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(cache.core.prefix, "find", broken)
    recorded = Recorded(cache)
    with pytest.raises(MemoryError):
        cache.open([1, 2])
    (span,) = recorded.spans()
    assert span.status.status_code is StatusCode.ERROR and span.status.description == "no memory"


def test_the_same_happens_with_spans_and_without() -> None:
    """Two caches, one traced, get the same calls: they say the same of each, and of themselves."""
    traced, plain = cache_of(12), cache_of(12)
    recorded = Recorded(traced)
    random = np.random.default_rng(0)
    for _ in range(60):
        tokens = [*range(int(random.integers(1, 20))), *([int(random.integers(0, 9))] * 8)]
        for cache in (traced, plain):
            serve(cache, tokens)
    assert traced.stats().to_dict() == plain.stats().to_dict()
    assert recorded.names()["open"] == 60 and recorded.names()["evict"] > 0
    traced.check()


def test_one_request_in_so_many() -> None:
    cache = cache_of(12, limits=Limits(swap="1MiB"))
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    with trace(cache, tracer, every=5), tracer.start_as_current_span("engine.step") as step:
        for first in range(20):
            serve(cache, [first] * 30)
        sequence = cache.open([7])
        sequence.suspend()
    names = Counter(span.name for span in exporter.get_finished_spans())
    assert names["kvpagoda.open"] == 4 and 0 < names["kvpagoda.evict"] <= 8 and names["kvpagoda.suspend"] == 1
    opened = next(span for span in exporter.get_finished_spans() if span.name == "kvpagoda.open")
    assert opened.parent is not None and opened.parent.span_id == step.get_span_context().span_id
    with raises(BadInput, field="every how many requests one is traced", needed=0, available=1):
        trace(cache, tracer, every=0)


def test_it_ends_without_a_trace() -> None:
    cache = cache_of()
    before = {name: dict(vars(part)) for name, part in (("core", cache.core), ("admission", cache._admission))}
    recorded = Recorded(cache)
    with raises(BadInput, needed="spans"):
        trace(cache)
    with recorded.tracing:
        serve(cache, [*range(9)])
    recorded.tracing.close()
    serve(cache, [*range(9)])
    assert recorded.names() == {"open": 1}
    assert {name: dict(vars(part)) for name, part in (("core", cache.core), ("admission", cache._admission))} == before
    assert not {"forget"} & vars(cache.core.capacity).keys() and "suspend" not in vars(cache._lifecycle)
    assert "open" not in vars(cache._admission)
