"""One run: attempts calls, compares what a failed call must not change, and reports the last operations of a fault."""

from __future__ import annotations

import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvpagoda.handover import SharedMemory
from quotas import prove_within

from . import handing, keeping, life, steps, wrong
from .caches import Failing, Settings, failing_memory, is_mirrored, is_suspended, make_cache, num_moves, state_places
from .faults import Fault, Refused
from .oracle import DIALECTS, Oracle, StepTexts
from .schemas import SCHEMA_NAMES, draft_width, rewind_width
from .texts import Documents, Epochs, Request, epoch_of

T = TypeVar("T")
CHECK_EVERY, AUDIT_EVERY = 4, 23
OPERATIONS: dict[str, tuple[float, Callable[[Driver], None]]] = {
    **life.OPERATIONS, **handing.OPERATIONS, **steps.OPERATIONS, **keeping.OPERATIONS, **wrong.OPERATIONS
}  # fmt: skip


class Driver:
    """Random operations on one cache after another, with the same settings. ``without``: operations that are left out.
    ``memory_fails``: the share of calls in which a memory operation is made to fail."""

    def __init__(
        self, settings: Settings, failing: Failing, folder: Path, without: frozenset[str] = frozenset(),
        memory_fails: float = 0.01,
    ) -> None:  # fmt: skip
        self.settings, self.failing, self.folder, self.memory_fails = settings, failing, folder, memory_fails
        self.random = np.random.default_rng([settings.seed, SCHEMA_NAMES.index(settings.schema), 1])
        self.documents = Documents(self.random)
        self.log: deque[str] = deque(maxlen=40)
        self.counts: Counter[str] = Counter()
        without |= {*handing.OPERATIONS} if settings.split else set()
        self._names = [name for name in OPERATIONS if name not in without]
        weights = np.array([OPERATIONS[name][0] for name in self._names])
        self._ends = np.cumsum(weights / weights.sum())
        self._number = self.step = 0
        self.weights = "w"
        self.start()

    def start(self) -> None:
        """Make a new cache, in which nothing runs."""
        self.cache, self.tier_drivers = make_cache(self.settings, self.folder, self.weights)
        schema, self.longest = self.cache.schema, self.cache.max_context
        self.oracle = Oracle(schema, self.cache.plan.kernel_page, self.settings.checkpoint_format is not None)
        self.draft_width, self.rewind_width = draft_width(schema), rewind_width(schema)
        self.transfer = SharedMemory("1MiB")
        self.sender = None if self.settings.split else self.cache.sender(self.transfer)
        self.epochs = Epochs(self.weights)
        self.requests: dict[Any, Request] = {}  # the open ones, by handle
        self.lingering: set[Request] = set()  # closed inside a fence that has not ended
        self.pins: list[Any] = []
        self.prefetches: list[tuple[Any, Any]] = []
        self.together: list[Any] = []  # persistent batches
        self.promises: list[handing.Promise] = []
        self.num_fences = 0
        self.most_open = life.count_openings(self)

    # -- choices -----------------------------------------------------------------------------------------------------

    def chance(self, share: float) -> bool:
        """Return True with probability ``share``."""
        return bool(self.random.random() < share)

    def one(self, *choices: Any) -> Any:
        """Return one of ``choices`` at random."""
        return choices[int(self.random.integers(len(choices)))]

    def between(self, low: int, high: int) -> int:
        """Return a random whole number from ``low`` to ``high``, both included."""
        return int(self.random.integers(low, high + 1))

    def pick(self, suits: Callable[[Request], bool] = lambda request: request.is_running) -> Request:
        """Return a random open request for which ``suits`` holds. Raises Refused if there is none."""
        found = [request for request in self.requests.values() if suits(request)]
        if not found:
            raise Refused("no request suits")
        return found[int(self.random.integers(len(found)))]

    def next_number(self) -> int:
        self._number += 1
        return self._number

    # -- a run -------------------------------------------------------------------------------------------------------

    def run(self, num_operations: int) -> None:
        """Run ``num_operations`` operations, prove that nothing is lost, and close the cache."""
        for self.step in range(num_operations):
            self.operate()
            if self.step % CHECK_EVERY == 0:
                self.check()
            if self.step % AUDIT_EVERY == 0 and not self.num_fences:
                self.audit()
        life.drain(self)
        self.count_cache()
        self.cache.close()

    def count_cache(self) -> None:
        """Add what the cache did to ``counts``, which show whether the traffic was as intended."""
        stats = self.cache.stats()
        for name in ("cached_tokens", "loaded_tokens", "evicted_blocks", "evicted_checkpoints"):
            self.counts[name] += getattr(stats, name)
        self.counts["moves"] += num_moves(self.cache)

    def operate(self) -> None:
        """Run one random operation."""
        name = self._names[min(int(np.searchsorted(self._ends, self.random.random())), len(self._names) - 1)]
        before = len(self.log), self.log[-1] if self.log else ""
        try:
            OPERATIONS[name][1](self)
            self.counts[name] += 1
        except Refused:
            self.counts[f"{name} refused"] += before != (len(self.log), self.log[-1] if self.log else "")
        if self.settings.settled and self.settings.tiers != "none":
            self.require(self.cache.flush(), "flush() gave up after its timeout")

    def require(self, holds: bool, message: str) -> None:
        """Raise Fault with ``message`` unless ``holds`` is true."""
        if not holds:
            raise Fault(message)

    # -- calls -------------------------------------------------------------------------------------------------------

    def attempt(self, what: str, call: Callable[[], T], *expected: type[Exception], may_fail: bool = True) -> T:
        """Return the result of ``call``, which the log calls ``what``.

        If the call raises one of ``expected``, or because a memory operation failed, nothing may have changed; then
        this raises Refused. ``may_fail``: whether a memory operation may fail here."""
        before = self.facts()
        if may_fail and self.chance(self.memory_fails):
            self.failing.arm(self.between(1, 3))
        self.log.append(what)
        try:
            result = call()
        except Exception as error:
            fired = self.failing.disarm()
            self.log[-1] += f" -> {type(error).__name__}: {error}"
            if fired and isinstance(error, MemoryError):
                self.counts["memory failed"] += 1
            elif not isinstance(error, expected):
                raise
            self.unchanged(before, what)
            if fired:
                self.log.append(f"(check and audit: {fired} failed in that)")
                self.check()
                self.audit()
            raise Refused from error
        finally:
            if self.failing.disarm():
                self.log[-1] += " (memory failed in it)"
        return result

    def facts(self) -> list[Any]:
        """Return what a call that raises must not change: a tuple for each open request."""
        facts: list[Any] = []
        for handle, request in self.requests.items():
            running = (handle.slot, handle.capacity) if request.is_running else ()
            facts.append((request.number, handle.is_open, is_suspended(handle), handle.length, *running))
        return facts

    def unchanged(self, before: list[Any], what: str) -> None:
        """Raise Fault if ``facts()`` differs from ``before``."""
        after = self.facts()
        changed = [(old, new) for old, new in zip(before, after) if old != new]
        self.require(not changed, f"{what} raised, but changed something: {changed[:4]}")

    def check(self) -> None:
        """Run ``check()`` of the cache, and compare its statistics with what the driver knows."""
        prove_within(self.cache)
        self.cache.check()
        self.require(is_mirrored(self.cache), "an observer knows something else to be cached, or to run")
        stats = self.cache.stats()
        suspended = sum(request.is_suspended for request in self.requests.values())
        running = len(self.requests) - suspended + len(self.lingering)
        self.require(
            (stats.running, stats.suspended) == (running, suspended),
            f"stats() says {stats.running} run and {stats.suspended} are suspended, not {running} and {suspended}",
        )
        for group in stats.groups:
            self.require(
                group.free + group.held == group.total and group.outstanding >= 0, f"stats() of a group: {group}"
            )
        for handle, request in self.requests.items():
            self.right_length(handle, request)

    def right_length(self, handle: Any, request: Request) -> None:
        """Compare the length and the epochs of ``handle`` with what the driver knows."""
        self.require(handle.length == request.length, f"{request} has length {handle.length}")
        stays = epoch_of(request.namespace)
        first, last = handle.epochs[0][1], handle.epochs[-1][1]
        is_right = last == self.cache.epoch if stays is None else first == last == stays
        self.require(is_right, f"{request} of {request.namespace!r} says {handle.epochs} in epoch {self.cache.epoch}")

    def audit(self) -> None:
        """Compare everything that running requests would read, in both dialects."""
        requests = [
            request
            for request in self.requests.values()
            if request.is_running
            and request.handle.capacity > request.length
            and request.num_written - request.length <= self.draft_width  # states are not ahead of the text
        ]
        if not requests:
            return
        batch = self.cache.batch([request.handle for request in requests], [1] * len(requests))
        texts = StepTexts(requests, [1] * len(requests), [()] * len(requests))
        for request in requests:
            request.reached(request.length + 1)
            known = request.handle.tokens.tolist() == request.text.tolist()
            self.require(known, f"{request} has other tokens: {request.handle.tokens.tolist()}")
        for dialect in DIALECTS:
            for shown in self.oracle.shown(batch, texts, dialect):
                shown.verify(requests)
        width = self.rewind_width or 0
        firsts = [min(one.length, max(one.started_at, one.highest - width)) for one in requests]
        for shown in self.oracle.older(self.cache, requests, firsts, [state_places(one.handle) for one in requests]):
            shown.verify(requests)
            self.counts["older states compared"] += len(shown.rows) - len(requests)


@contextmanager
def driving(settings: Settings, **arguments: Any) -> Iterator[Driver]:
    """A context with a driver that has a temporary folder and can make memory operations fail."""
    with tempfile.TemporaryDirectory() as folder, failing_memory() as failing:
        yield Driver(settings, failing, Path(folder), **arguments)


def drive(settings: Settings, num_operations: int, **arguments: Any) -> Driver:
    """Make one run and return its driver. Raises Fault, from whatever error ended the run, with the settings, the step
    and the last operations."""
    with driving(settings, **arguments) as driver:
        try:
            driver.run(num_operations)
        except Exception as error:
            last = "\n".join(f"    {line}" for line in driver.log)
            raise Fault(
                f"{type(error).__name__}: {error}\nstep {driver.step} of {settings}\n"
                f"again: cd tests && python -m random_driver {settings.schema} {settings.seed}\nlast operations:\n{last}"
            ) from error
        return driver
