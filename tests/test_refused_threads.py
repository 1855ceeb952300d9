"""Calls in threads of a pool: what is refused, as no thread can be started, never runs."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from typing import Any

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
        def submit(self, call: Any) -> Future[Any]:  # type: ignore[override]
            try:
                return super().submit(call)
            except RuntimeError:
                monkeypatch.undo()
                assert super().submit(int).result(5) == 0
                raise

    with Pool(1) as pool:
        monkeypatch.setattr(Thread, "start", no_thread)
        assert submit(pool, lambda: 3).result(5) == 3
