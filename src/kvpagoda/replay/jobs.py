"""Independent jobs over one object, in this process or in several: replays of a trace, or of many traces.

The processes of a pool end when the one that started them ends, whatever ended it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Thread, current_thread, main_thread
from typing import TYPE_CHECKING, Any, TypeVar

from kvpagoda.units import whole_number

if TYPE_CHECKING:
    from concurrent.futures import Future

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
    from concurrent.futures import as_completed  # slow to load

    with process_pool(min(processes, len(jobs)), _begin, shared) as submit:
        futures = {submit(_call, job): number for number, job in enumerate(jobs)}
        for future in as_completed(futures):
            done(futures[future], future.result())
            if moved is not None:
                moved(futures[future], 0)


@contextmanager
def process_pool(
    count: int, begin: Callable[..., object] | None = None, *shared: Any
) -> Iterator[Callable[..., Future[Any]]]:
    """Yield ``submit(function, *arguments)`` of a pool of up to ``count`` new processes, each of which calls
    ``begin(*shared)`` first. They ignore interrupts. An exception in the block, also an interrupt, ends them; so does the end
    of this process, also if it is killed: one that still imports ends when it has."""
    from concurrent.futures import ProcessPoolExecutor  # slow to load, both
    from multiprocessing import active_children, get_context

    pool = ProcessPoolExecutor(
        count, mp_context=get_context("spawn"), initializer=_begin_watched, initargs=(begin, shared)
    )
    mine = set[Any]()

    def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        before = {*active_children()}
        try:
            with _interrupts_wait():
                return pool.submit(function, *arguments)
        finally:
            mine.update({*active_children()} - before)

    try:
        yield submit
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in mine:
            process.terminate()
        raise


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Interrupts reach this process when the block ends, and the processes that it starts meanwhile never: Ctrl-C goes to all
    processes of a terminal, also to one that still imports, and this one ends the others."""
    from multiprocessing.resource_tracker import ensure_running

    ensure_running()  # started inside the block, it would let interrupts through again
    came = list[int]()
    before = signal.getsignal(signal.SIGINT)
    # A mask alone holds nothing back: an interrupt may go to another thread, such as one of OpenBLAS.
    is_ours = current_thread() is main_thread() and callable(before)
    if is_ours:
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_ours:
            signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _begin_watched(begin: Callable[..., object] | None, shared: tuple[Any, ...]) -> None:
    Thread(target=_end_with_parent, name="kvpagoda-parent", daemon=True).start()
    if begin is not None:
        begin(*shared)


def _end_with_parent() -> None:
    from multiprocessing import parent_process

    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _begin(shared: Any) -> None:
    global _shared
    _shared = shared


def _call(job: Callable[..., T]) -> T:
    return job(_shared)
