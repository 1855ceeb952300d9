"""Independent jobs over one object, in this process or in several: replays of a trace, or of many traces."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from kvpagoda.units import whole_number

T = TypeVar("T")
_shared: Any = None  # in a process of the pool


def run_jobs(
    jobs: Sequence[Callable[..., T]],
    shared: Any,
    processes: int,
    done: Callable[[int, T], object],
    moved: Callable[[int, int], None] | None = None,
) -> None:
    """Call every job with ``shared``, in up to ``processes`` processes at once, and ``done(number, result)`` here for each,
    as it ends. Jobs and ``shared`` are pickled if there are several processes, and each process has ``shared`` once.

    ``moved(number, requests)``: called now and then with how far a job is, which is then called with ``on_request=``; with
    several processes only when a job has ended, with 0. An interrupt (Ctrl-C) ends the processes and is raised; ``done``
    was called for what had ended. Raises what a job raises, and BadInput.
    """
    whole_number(processes, "jobs", at_least=1)
    if processes == 1 or len(jobs) < 2:
        for number, job in enumerate(jobs):
            told = {} if moved is None else {"on_request": partial(moved, number)}
            done(number, job(shared, **told))
        return
    from concurrent.futures import ProcessPoolExecutor, as_completed  # slow to load, both
    from multiprocessing import active_children, get_context

    others = set(active_children())
    count = min(processes, len(jobs))
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_begin, initargs=(shared,))
    try:
        with _interrupts_wait():
            futures = {pool.submit(_call, job): number for number, job in enumerate(jobs)}
        for future in as_completed(futures):
            done(futures[future], future.result())
            if moved is not None:
                moved(futures[future], 0)
    except BaseException:
        mine = set(active_children()) - others
        pool.shutdown(wait=False, cancel_futures=True)
        for process in mine:
            process.terminate()
        raise
    pool.shutdown()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Interrupts reach this process when the block ends, and the processes that it starts meanwhile never: Ctrl-C goes to all
    processes of a terminal, also to one that still imports, and this one ends the others."""
    from multiprocessing.resource_tracker import ensure_running

    ensure_running()  # started inside the block, it would let interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(shared: Any) -> None:
    global _shared
    _shared = shared


def _call(job: Callable[..., T]) -> T:
    return job(_shared)
