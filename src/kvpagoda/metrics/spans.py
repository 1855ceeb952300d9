"""Spans for OpenTelemetry: where the time of one request goes in a cache.

    kvpagoda.open       a request is admitted
      kvpagoda.find       tiers are asked for blocks that the device does not have, and the checkpoint is read
      kvpagoda.evict      blocks are evicted; the span is inside the call that needs them, which may be a step
      kvpagoda.load       records are read into blocks
    kvpagoda.receive    a request that another cache handed over is read and admitted
    kvpagoda.suspend    a request is moved to host memory
    kvpagoda.resume     it is restored, or starts again

The spans wrap the calls that ``kvpagoda.abc.wrap_calls`` lists. A cache that is not traced runs none of this code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from itertools import cycle, repeat
from typing import Any, NamedTuple

from kvpagoda.abc import wrap_calls
from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.request import RequestState
from kvpagoda.core.kv_cache import KVCache
from kvpagoda.core.offload.reader import TierHit
from kvpagoda.errors import Exhausted, HandoverMiss, MissingExtra
from kvpagoda.units import whole_number

with MissingExtra.unless("opentelemetry", "spans need opentelemetry-api; pip install 'kvpagoda[metrics]'"):
    from opentelemetry.trace import Span, Status, StatusCode, Tracer, get_tracer

Told = dict[str, Any]
"""Attributes of a span."""
Given = tuple[Any, ...]
"""Arguments of a call."""


class Spanned(NamedTuple):
    """How one observable call becomes a span."""

    name: str
    tell: Callable[[Core, Given, Any], Told]
    """Returns the attributes of a finished call, from its arguments and its result."""
    begins: bool = False
    """Whether a trace may begin with this call; other calls are traced only inside of a trace."""
    applies: Callable[[Given, dict[str, Any]], bool] = lambda given, named: True
    """Whether a call with these positional and named arguments gets a span."""


class Tracing:
    """The spans around one cache, until ``close``; a context manager. Made by ``trace``."""

    def __init__(self, cache: KVCache, tracer: Tracer, every: int = 1) -> None:
        every = whole_number(every, "every how many requests one is traced", at_least=1)
        self._core, self._tracer, self._every, self._depth = cache.core, tracer, every, 0
        self.close = wrap_calls(cache.core.parts, self._around, "spans")
        """Remove the spans. A second call does nothing."""

    def __enter__(self) -> Tracing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _around(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` with a span around it. If not every request is traced, only calls that begin a trace, or are
        inside of one, get a span. A call without a span costs one more call of a C function."""
        if method not in SPANS:
            return call
        spanned, core, tracer = SPANS[method], self._core, self._tracer
        if method in ("open", "receive"):
            next_begins = cycle([False] * (self._every - 1) + [True]).__next__
        else:
            next_begins = repeat(spanned.begins or self._every == 1).__next__

        @wraps(call)
        def around(*given: Any, **named: Any) -> Any:
            if not (next_begins() or self._depth) or not spanned.applies(given, named):
                return call(*given, **named)
            with tracer.start_as_current_span(
                f"kvpagoda.{spanned.name}", record_exception=False, set_status_on_exception=False
            ) as span:
                self._depth += 1
                try:
                    result = call(*given, **named)
                except BaseException as error:
                    _failed(span, error)
                    raise
                finally:
                    self._depth -= 1
                if span.is_recording():
                    with suppress(Exception):  # the call has succeeded: an error of the attributes must not hide it
                        span.set_attributes(spanned.tell(core, given, result))
                return result

        return around


def trace(cache: KVCache, tracer: Tracer | None = None, *, every: int = 1) -> Tracing:
    """Put spans around the calls of a cache until the returned ``Tracing`` is closed; closing removes them completely.

    Args:
        cache: whose calls are traced.
        tracer: makes the spans; None: a tracer of the provider that the process has set.
        every: trace one ``open`` and one ``receive`` in this many, with the calls inside, and every suspension. Use it
            for an engine with many requests: a span costs tens of microseconds, even if a provider samples it away.

    Raises:
        BadInput: ``every`` is below 1, or the cache is traced already.
        MissingExtra: ``opentelemetry`` is not installed.
    """
    return Tracing(cache, get_tracer("kvpagoda") if tracer is None else tracer, every)


def _failed(span: Span, error: BaseException) -> None:
    """Record on ``span`` that its call raised ``error``. Exhausted memory and a miss are not marked as faults."""
    with suppress(Exception):
        span.set_attribute("error.type", type(error).__name__)
        if not isinstance(error, Exhausted | HandoverMiss):
            span.set_status(Status(StatusCode.ERROR, str(error)))


def _opened(_: Core, given: Given, __: None) -> Told:
    request: RequestState = given[0]
    match = request.match
    return {
        "kvpagoda.prompt_tokens": request.prompt_length,
        "kvpagoda.cached_tokens": match.resumable,
        "kvpagoda.loaded_tokens": match.loaded,
        "kvpagoda.limited_by": match.limited_by,
    }


def _received(_: Core, given: Given, __: None) -> Told:
    request: RequestState = given[0]
    return {
        "kvpagoda.prompt_tokens": request.prompt_length,
        "kvpagoda.tokens": request.own_length,
        "kvpagoda.received_tokens": request.match.loaded,
    }


def _resumed(_: Core, given: Given, __: None) -> Told:
    return {"kvpagoda.tokens": given[0].own_length}


def _suspended(_: Core, given: Given, __: None) -> Told:
    request, is_whole = given
    return {"kvpagoda.tokens": request.own_length, "kvpagoda.is_whole": is_whole}


def _evicted(core: Core, _: Given, __: bool) -> Told:
    """The total of the cache so far: the difference between two spans is what the later one evicted."""
    return {"kvpagoda.blocks_evicted": sum(core.prefix.num_evicted)}


def _found(_: Core, given: Given, hit: TierHit | None) -> Told:
    return {"kvpagoda.blocks": 0 if hit is None else max(0, hit.end - given[1])}


def _loaded(_: Core, given: Given, blocks: int) -> Told:
    return {"kvpagoda.blocks_wanted": len(given[1]), "kvpagoda.blocks": blocks}


SPANS = {
    "open": Spanned("open", _opened, begins=True),
    "receive": Spanned("receive", _received, begins=True),
    "resume": Spanned("resume", _resumed, begins=True),
    "suspend": Spanned("suspend", _suspended, begins=True),
    "find": Spanned("find", _found),
    "load": Spanned("load", _loaded, applies=lambda given, named: len(given[1]) > 0),
    "forget": Spanned("evict", _evicted, applies=lambda given, named: bool(named.get("is_evicted"))),
}
"""Observable call -> its span."""
