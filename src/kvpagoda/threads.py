"""Calls in threads of a pool, where the system may have no thread to start."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


def submit(pool: Executor, call: Callable[[], T]) -> Future[T]:
    """Let a thread of ``pool`` call ``call``, as ``pool.submit`` does. A call that is refused never runs: a
    ``ThreadPoolExecutor`` keeps it in its queue, and would run it beside a later one.

    Raises RuntimeError: no thread can be started, or the pool is shut down."""
    future: Future[T] = Future()
    try:
        queued = pool.submit(_run, [future, call])
    except RuntimeError:
        if future.cancel():  # else a thread that another call started has taken it
            raise
    else:
        queued.add_done_callback(lambda ended: ended.cancelled() and future.cancel())
    return future


def _run(given: list[Any]) -> None:
    """Call the second of ``given`` for the future that is the first. Takes both out: what an error's traceback keeps of the
    pool's frames does not have the error, so that all of it goes without the garbage collector."""
    (future, call), given[:] = given, ()
    try:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
    finally:
        del future, call
