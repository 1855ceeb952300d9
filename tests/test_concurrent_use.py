"""One thread at a time may use a cache: a second thread gets a typed error, and the calls of neither are damaged."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
from tests.sweep.interruption import any_call, at_most
from tests.sweep.scene import Scene

from kvpagoda import Sequence, errors
from kvpagoda.errors import Exhausted

TRIALS, CALLS = 12, 120


class NeverRaised(Exception):
    """Stands for ``ConcurrentUse`` in versions of the library that lack it; never raised."""


ConcurrentUse: type[BaseException] = getattr(errors, "ConcurrentUse", NeverRaised)


def test_it_is_a_typed_error() -> None:
    assert issubclass(errors.ConcurrentUse, (errors.KVPagodaError, RuntimeError))  # type: ignore[attr-defined]


class Paused:
    """A context in which a thread runs ``call`` and pauses at its ``n``-th call inside the library, until the end."""

    def __init__(self, call: Callable[[], Any], n: int) -> None:
        self._call, self._n, self._count = call, n, 0
        self._is_inside, self._goes_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.result: Any = None

    def _run(self) -> None:
        sys.setprofile(self._profile)
        try:
            self.result = self._call()
        except Exception as error:
            self.result = error
        finally:
            sys.setprofile(None)
            self._is_inside.set()

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and any_call(frame, event, argument):
            self._count += 1
            if self._count == self._n:
                self._is_inside.set()
                self._goes_on.wait(20)

    def __enter__(self) -> Paused:
        self._thread.start()
        assert self._is_inside.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._goes_on.set()
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("kind", ["full", "gemma"])
def test_a_call_while_another_thread_is_inside(kind: str) -> None:
    with at_most(60):
        scene = Scene(kind, has_tier=False)
        scene.leave(scene.words(1, 2))
        first, second = (scene.compute(scene.open(scene.words(number, 1.5))) for number in (2, 3))
        sequence, tokens = second.sequence, scene.words(1, 3)
        calls: dict[str, Callable[[], Any]] = {
            "open": scene.opening(tokens),
            "extend": partial(sequence.extend, 4),
            "commit": partial(sequence.commit, []),
            "fork": sequence.fork,
            "rewind": partial(sequence.rewind, 0),
            "suspend": sequence.suspend,
            "batch": partial(scene.cache.batch, [sequence], [1]),
            "persistent_batch": partial(scene.cache.persistent_batch, [sequence]),
            "pin": partial(scene.cache.pin, tokens, "one"),
            "invalidate": partial(scene.cache.invalidate, "other"),
            "check": scene.cache.check,
            "reset": scene.cache.reset,
            "close": sequence.close,
        }
        told = {}
        for n in (20, 40):
            with Paused(partial(first.sequence.fork, reserve=8), n) as thread:
                for name, call in calls.items():
                    try:
                        call()
                        told[name, n] = "no error"
                    except Exception as error:
                        told[name, n] = type(error).__name__
            assert isinstance(thread.result, Sequence), f"the thread that was there first: {thread.result!r}"
            assert {name: error for name, error in told.items() if error != "ConcurrentUse"} == {}
            thread.result.close()
        scene.prove()


def test_two_threads_at_once() -> None:
    """Two threads make many calls: each call succeeds, or raises ConcurrentUse because of the other thread."""
    interval, wrong, met = sys.getswitchinterval(), list[str](), [0]
    sys.setswitchinterval(1e-6)
    try:
        for trial in range(TRIALS):
            with at_most(60):
                wrong += [f"trial {trial}: {what}" for what in _trial(trial, met)]
    finally:
        sys.setswitchinterval(interval)
    broken = sorted({what.partition(":")[0] for what in wrong})
    assert not wrong, f"{len(broken)} of {TRIALS} trials went wrong: " + "\n".join(wrong[:12])
    assert met[0], "no call met another"


def _trial(seed: int, met: list[int]) -> list[str]:
    """Let two threads open, step and close requests at once. Returns a line for everything that went wrong."""
    scene, wrong = Scene(("full", "gemma", "qwen3_next")[seed % 3], has_tier=False), list[str]()
    begin = threading.Barrier(2)

    def call(function: Callable[[], Any]) -> Any:
        """Call ``function`` until no other thread is inside the cache, and return its result."""
        while True:
            try:
                return function()
            except ConcurrentUse:
                met[0] += 1

    def work(number: int) -> None:
        random = np.random.default_rng([seed, number])
        running = list[tuple[Sequence, list[int]]]()
        begin.wait()
        try:
            for _ in range(CALLS):
                chance = random.random()
                try:
                    if chance < 0.3 and len(running) < 2:
                        tokens = scene.words(int(random.integers(4)), 2)
                        running.append((call(partial(scene.cache.open, tokens, "one", capacity=0)), tokens))
                    elif chance < 0.8 and running:
                        sequence, tokens = running[int(random.integers(len(running)))]
                        call(partial(sequence.extend, 1))
                        call(partial(sequence.commit, tokens[sequence.length : sequence.length + 1] or [5]))
                    elif running:
                        call(running.pop()[0].close)
                except Exhausted:
                    pass
        except BaseException as error:
            wrong.append(f"{type(error).__name__}: {error}"[:160])
        for sequence, _ in running:
            try:
                call(sequence.close)
            except BaseException as error:
                wrong.append(f"close: {type(error).__name__}: {error}"[:160])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        scene.cache.check()
        scene.all_is_idle()
        scene.prove()
    except Exception as error:
        wrong.append(f"{type(error).__name__}: {error}"[:160])
    return wrong
