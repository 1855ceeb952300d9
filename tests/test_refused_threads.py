"""Calls in threads of a pool: what is refused, as no thread can be started, never runs."""

from __future__ import annotations

import gc
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Event, Thread
from typing import Any
from weakref import ref

import pytest

from kvpagoda.threads import submit


def no_thread(_: Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_refused_call_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()
    with ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(Thread, "start", no_thread)
            for number in range(2):
                with pytest.raises(RuntimeError, match="new thread"):
                    submit(pool, lambda number=number: calls.append(number))
        assert submit(pool, lambda: calls.append(2)).result(5) is None
    assert calls == [2]


def test_results_and_faults_are_those_of_the_call() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert submit(pool, lambda: 3).result(5) == 3
        with pytest.raises(ZeroDivisionError):
            submit(pool, lambda: 1 // 0).result(5)
    with pytest.raises(RuntimeError, match="shutdown"):
        submit(pool, lambda: 3)


def test_a_call_that_another_submit_started_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is queued and gets no thread. Before that is heard another one gets a thread, which takes both."""

    class Pool(ThreadPoolExecutor):
        def submit(self, *given: Any) -> Future[Any]:  # type: ignore[override]
            try:
                return super().submit(*given)
            except RuntimeError:
                monkeypatch.undo()
                assert super().submit(int).result(5) == 0
                raise

    with Pool(1) as pool:
        monkeypatch.setattr(Thread, "start", no_thread)
        assert submit(pool, lambda: 3).result(5) == 3


def test_a_call_that_its_pool_cancels_is_cancelled() -> None:
    pool, goes_on = ThreadPoolExecutor(1), Event()
    first, second = submit(pool, goes_on.wait), submit(pool, int)
    pool.shutdown(wait=False, cancel_futures=True)
    assert second.cancelled()
    goes_on.set()
    assert first.result(5)


def test_a_failed_call_leaves_nothing_to_the_garbage_collector() -> None:
    class Held:
        pass

    def fail(held: Held) -> None:
        raise ValueError(id(held))

    held = Held()
    gone = ref(held)
    gc.disable()
    try:
        with ThreadPoolExecutor(1) as pool:
            future = submit(pool, partial(fail, held))
            assert isinstance(future.exception(5), ValueError)
        del held, future
        assert gone() is None
    finally:
        gc.enable()
