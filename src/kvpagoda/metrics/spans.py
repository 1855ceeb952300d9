"""Spans for OpenTelemetry: where the time of one request goes in a cache.

    kvpagoda.open       a request is admitted
      kvpagoda.find       tiers are asked for what the device has not, and the checkpoint is read
      kvpagoda.evict      room is made: so it is inside of whatever needs it, a step too
      kvpagoda.load       records are read into blocks
    kvpagoda.suspend    a request goes to host memory
    kvpagoda.resume     it comes back, or begins again

The spans are wrapped around methods of the parts of one cache, of that object alone; a cache that is not traced knows nothing
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from itertools import cycle, repeat
from types import TracebackType
from typing import Any

from kvpagoda.cache.request import Request
from kvpagoda.errors import BadInput, Exhausted, MissingExtra
from kvpagoda.kv_cache import KVCache

try:
    from opentelemetry.trace import Span, Status, StatusCode, Tracer, get_tracer
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("opentelemetry"):
        raise
    raise MissingExtra("spans need opentelemetry-api; pip install 'kvpagoda[metrics]'", name="opentelemetry") from None

Told = dict[str, Any]
"""Attributes of a span."""
Tell = Callable[[tuple[Any, ...], Any], Told]
"""Attributes of a call that is done, from its arguments and its result."""


class Tracing:
    """The spans around one cache, until ``close``; a context. See ``trace``."""

    def __init__(self, cache: KVCache, tracer: Tracer, every: int = 1) -> None:
        if type(every) is not int or every < 1:
            raise BadInput(f"every so many requests are traced, at least 1, got {every!r}")
        self._tracer, self._depth = tracer, 0
        self._wrapped: list[tuple[Any, str]] = []
        calls, core = cache._calls, cache.core
        one_in_so_many, always = cycle([False] * (every - 1) + [True]), repeat(True)
        self._inner = repeat(every == 1)
        self._wrap(calls.admission, "open", "open", _opened, begins=one_in_so_many)
        self._wrap(calls.admission, "resume", "resume", _resumed, begins=always)
        self._wrap(calls.lifecycle, "suspend", "suspend", _suspended, begins=always)
        evicted = core.prefix.num_evicted

        def number(_: tuple[Any, ...], __: Any) -> Told:
            return {"kvpagoda.blocks_evicted": sum(evicted)}  # so far: between two spans lies what one of them evicted

        self._wrap(core.capacity, "forget", "evict", number, only=lambda given, named: bool(named.get("is_evicted")))
        if core.offloader is not None:
            reader = core.offloader.reader
            self._wrap(reader, "find", "find", _found)
            self._wrap(reader, "load", "load", _loaded, only=lambda given, named: len(given[1]) > 0)

    def close(self) -> None:
        """No more spans. Does no harm twice."""
        while self._wrapped:
            owner, method = self._wrapped.pop()
            delattr(owner, method)

    def __enter__(self) -> Tracing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wrap(
        self, owner: Any, method: str, name: str, tell: Tell, *,
        begins: Iterator[bool] | None = None,
        only: Callable[[tuple[Any, ...], dict[str, Any]], bool] = lambda given, named: True,
    ) -> None:  # fmt: skip
        """Put a span around ``method`` of this one ``owner``, with what ``tell`` says, for calls that ``only`` takes; where
        not every request is traced, for those with which a trace ``begins`` or that are inside of one. A call without a span
        costs one more call of a C function."""
        if method in vars(owner):
            self.close()
            raise BadInput("this cache is traced already; close that Tracing first")
        call, tracer = getattr(owner, method), self._tracer
        next_begins = (begins or self._inner).__next__

        @wraps(call)
        def spanned(*given: Any, **named: Any) -> Any:
            if not (next_begins() or self._depth) or not only(given, named):
                return call(*given, **named)
            with tracer.start_as_current_span(
                f"kvpagoda.{name}", record_exception=False, set_status_on_exception=False
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
                        span.set_attributes(tell(given, result))
                return result

        setattr(owner, method, spanned)
        self._wrapped.append((owner, method))


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


def _start(request: Request) -> Told:
    match = request.match
    return {
        "kvpagoda.prompt_tokens": request.prompt_length,
        "kvpagoda.cached_tokens": match.resumable,
        "kvpagoda.loaded_tokens": match.loaded,
        "kvpagoda.limited_by": match.limited_by,
    }


def _opened(given: tuple[Any, ...], _: Any) -> Told:
    return _start(given[0])


def _resumed(given: tuple[Any, ...], _: Any) -> Told:
    return {"kvpagoda.tokens": given[0].own_length}


def _suspended(given: tuple[Any, ...], _: Any) -> Told:
    request, is_whole = given
    return {"kvpagoda.tokens": request.own_length, "kvpagoda.is_whole": is_whole}


def _found(given: tuple[Any, ...], hit: Any) -> Told:
    return {"kvpagoda.blocks": 0 if hit is None else max(0, hit.end - given[1])}


def _loaded(given: tuple[Any, ...], blocks: int) -> Told:
    return {"kvpagoda.blocks_wanted": len(given[1]), "kvpagoda.blocks": blocks}
