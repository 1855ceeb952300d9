"""Spans for OpenTelemetry: where the time of one request goes in a cache.

    kvpagoda.open       a request is admitted
      kvpagoda.find       tiers are asked for what the device has not, and the checkpoint is read
      kvpagoda.evict      room is made: so it is inside of whatever needs it, a step too
      kvpagoda.load       records are read into blocks
    kvpagoda.suspend    a request goes to host memory
    kvpagoda.resume     it comes back, or begins again

They stand around the calls that ``kvpagoda.cache.observing`` lists; a cache that is not traced knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from itertools import cycle, repeat
from typing import Any, NamedTuple

from kvpagoda.cache.core import Core
from kvpagoda.cache.observing import observe
from kvpagoda.cache.request import Request
from kvpagoda.cache.tier_hit import TierHit
from kvpagoda.errors import Exhausted, MissingExtra
from kvpagoda.kv_cache import KVCache
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
    """What is said of a call that is done, from its arguments and its result."""
    begins: bool = False
    """Whether a trace may begin here; the others are traced inside of one."""
    applies: Callable[[Given, dict[str, Any]], bool] = lambda given, named: True


class Tracing:
    """The spans around one cache, until ``close``; a context. See ``trace``."""

    def __init__(self, cache: KVCache, tracer: Tracer, every: int = 1) -> None:
        every = whole_number(every, "every how many requests one is traced", at_least=1)
        self._core, self._tracer, self._every, self._depth = cache.core, tracer, every, 0
        self.close = observe(cache.core.parts, self._around)
        """No more spans. Does no harm twice."""

    def __enter__(self) -> Tracing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _around(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` with a span around it; where not every request is traced, for those with which a trace begins or that are
        inside of one. A call without a span costs one more call of a C function."""
        spanned, core, tracer = SPANS[method], self._core, self._tracer
        if method == "open":
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
                    with suppress(Exception):  # what is done is done, whatever comes of telling it
                        span.set_attributes(spanned.tell(core, given, result))
                return result

        return around


def trace(cache: KVCache, tracer: Tracer | None = None, *, every: int = 1) -> Tracing:
    """Put spans around the calls of ``cache`` from now on, made by ``tracer`` (default: of the provider that the process has
    set). ``every``: one ``open`` in so many is traced, with what happens inside of it, and every suspension: for an engine
    that serves many, since a span costs tens of microseconds, also one that a provider samples away. Nothing is left once it
    is closed. Raises BadInput, also where the cache is traced already, and MissingExtra."""
    return Tracing(cache, get_tracer("kvpagoda") if tracer is None else tracer, every)


def _failed(span: Span, error: BaseException) -> None:
    """A call raised ``error``: no fault where it says that there is no room."""
    with suppress(Exception):
        span.set_attribute("error.type", type(error).__name__)
        if not isinstance(error, Exhausted):
            span.set_status(Status(StatusCode.ERROR, str(error)))


def _opened(_: Core, given: Given, __: None) -> Told:
    request: Request = given[0]
    match = request.match
    return {
        "kvpagoda.prompt_tokens": request.prompt_length,
        "kvpagoda.cached_tokens": match.resumable,
        "kvpagoda.loaded_tokens": match.loaded,
        "kvpagoda.limited_by": match.limited_by,
    }


def _resumed(_: Core, given: Given, __: None) -> Told:
    return {"kvpagoda.tokens": given[0].own_length}


def _suspended(_: Core, given: Given, __: None) -> Told:
    request, is_whole = given
    return {"kvpagoda.tokens": request.own_length, "kvpagoda.is_whole": is_whole}


def _evicted(core: Core, _: Given, __: bool) -> Told:
    """So far: between two spans lies what one of them evicted."""
    return {"kvpagoda.blocks_evicted": sum(core.prefix.num_evicted)}


def _found(_: Core, given: Given, hit: TierHit | None) -> Told:
    return {"kvpagoda.blocks": 0 if hit is None else max(0, hit.end - given[1])}


def _loaded(_: Core, given: Given, blocks: int) -> Told:
    return {"kvpagoda.blocks_wanted": len(given[1]), "kvpagoda.blocks": blocks}


SPANS = {
    "open": Spanned("open", _opened, begins=True),
    "resume": Spanned("resume", _resumed, begins=True),
    "suspend": Spanned("suspend", _suspended, begins=True),
    "find": Spanned("find", _found),
    "load": Spanned("load", _loaded, applies=lambda given, named: len(given[1]) > 0),
    "forget": Spanned("evict", _evicted, applies=lambda given, named: bool(named.get("is_evicted"))),
}
"""Observable call -> its span."""
