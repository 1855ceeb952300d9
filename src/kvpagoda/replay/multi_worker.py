"""Serves a trace with several workers, each with its own cache, above one shared store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvpagoda.replay.readers import Source
from kvpagoda.replay.serving import ServeResult, serve
from kvpagoda.replay.trace import Trace
from kvpagoda.schema import Schema
from kvpagoda.tiers.spec import TierSpec, tier_from_text
from kvpagoda.units import whole_number

_counts: Any = None  # in a worker: the number of requests that each worker has served


def serve_multi_worker(
    trace: Source | Trace,
    schema: Schema,
    budget: int | str,
    *,
    workers: int,
    store: str | None = None,
    on_request: Callable[[int], None] | None = None,
    **settings: Any,
) -> list[ServeResult]:
    """``serve`` a trace with ``workers`` processes at once, with ``budget`` each; worker i modulo ``workers`` serves
    request i. Return one result for each worker.

    ``store``: a tier that all workers share, as ``tier_from_text`` reads it. A block is a record in it, without the
    bytes of rows. How many hits come from the store depends on the timing of the workers, as in production.
    ``on_request`` is called with the number of finished requests. ``settings``: other arguments of ``serve``. Raises
    BadInput, NeverFits.
    """
    workers = whole_number(workers, "workers", at_least=1, below=1025)
    from concurrent.futures import ProcessPoolExecutor, wait  # slow to load
    from multiprocessing import get_context

    _tiers(store)
    columns = Trace.read(trace)
    context = get_context("spawn")
    counts = context.Array("q", workers)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(counts,)) as pool:
        work = partial(_serve, columns, schema, budget, store, workers, settings)
        futures = [pool.submit(work, worker) for worker in range(workers)]
        waiting = set(futures)
        while waiting:
            waiting = wait(waiting, timeout=0.2).not_done
            if on_request is not None:
                on_request(sum(counts[:]))
        return [future.result() for future in futures]


def _tiers(store: str | None) -> tuple[TierSpec, ...]:
    return () if store is None else (tier_from_text(store, record_nbytes=1, write="commit", timeout=1.0),)


def _begin(counts: Any) -> None:
    global _counts
    _counts = counts


def _serve(
    trace: Trace, schema: Schema, budget: int | str, store: str | None, workers: int, settings: dict[str, Any], worker: int
) -> ServeResult:  # fmt: skip
    part, count = range(worker, len(trace), workers), partial(_counts.__setitem__, worker)
    return serve(trace, schema, budget, tiers=_tiers(store), part=part, on_request=count, **settings)
