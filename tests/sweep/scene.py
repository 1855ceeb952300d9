"""A scene: a cache, its requests, the texts that they left in the cache, and proofs of what must hold afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest
from tests.sweep.kinds import KINDS, SLOTS, make_cache
from tests.sweep.row_oracle import RowOracle, Text

from kvpagoda import Sequence, errors
from kvpagoda.errors import StaleHandle
from kvpagoda.tiers import Driver, RecordBuffer, TierSpec, host_driver


class FailingDriver:
    """A driver whose ``n``-th call after ``arm(n)`` raises MemoryError; with ``n`` 0 none does."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._left, self.count, self.where = driver, 0, 0, ""
        self._lock = threading.Lock()

    def arm(self, n: int) -> None:
        self._left, self.count, self.where = n, 0, ""

    def disarm(self) -> None:
        self._left = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driver, name)
        if name not in ("store", "lookup", "load", "discard"):
            return found

        def call(*arguments: Any) -> Any:
            with self._lock:
                self.count, self._left = self.count + 1, self._left - 1
                hit = self._left == 0
                self.where = f"driver {name}" if hit else self.where
            if hit:
                raise MemoryError(f"driver call: {name}")
            return found(*arguments)

        return call


FOUND: dict[tuple[Any, str], int] = {}
"""(schema, operation) -> tokens that another request finds after the operation if nothing fails."""


class Request:
    """A sequence and the text that it should have."""

    def __init__(self, sequence: Sequence, text: Text) -> None:
        self.sequence, self.text = sequence, text


class Scene:
    """The cache and the requests that one operation works with."""

    def __init__(self, kind: str, has_tier: bool) -> None:
        self.kind, self.drivers = KINDS[kind], list[FailingDriver]()

        def make(buffer: RecordBuffer) -> Driver:
            self.drivers.append(FailingDriver(host_driver(buffer, "4MiB")))
            return self.drivers[-1]

        tier = TierSpec("host", make, write="commit", staging="1MiB", workers=1)
        self.cache = make_cache(kind, (tier,) if has_tier else ())
        self.size = self.kind.block_size
        self.oracle = RowOracle(self.cache)
        self.requests = list[Request]()
        self.texts = list[Text]()
        """Texts that were computed and may still be cached."""
        self.stack = ExitStack()
        self.is_undisturbed = False
        """Whether nothing fails in this run: then the operation must do what its name says."""

    def open(self, tokens: list[int], **settings: Any) -> Request:
        """Open a request that may grow by three blocks."""
        return self.take(self.opening(tokens, **settings)(), tokens)

    def opening(self, tokens: list[int], **settings: Any) -> Callable[[], Sequence]:
        """Return the call that opens a request, without making it."""
        settings = {"capacity": 0, "reserve": len(tokens) + 3 * self.size, **settings}
        return partial(self.cache.open, tokens, "one", **settings)

    def take(self, sequence: Sequence, tokens: list[int]) -> Request:
        """Add ``sequence``, which was opened for ``tokens``, to the requests of the scene."""
        text = Text("one", list(tokens))
        assert 0 <= sequence.length == sequence.cached_tokens < len(tokens), "what is cached is a true beginning"
        self._starts_at(text, sequence.length)
        self.requests.append(Request(sequence, text))
        self._compute_lacking(self.requests[-1])
        return self.requests[-1]

    def _compute_lacking(self, request: Request) -> None:
        """Compute the rows that optional groups lack of what ``request`` starts from."""
        length, first = request.sequence.length, request.sequence.match.lacking_from
        if first is not None and first < length:
            batch = self.cache.batch([request.sequence], [length - first], firsts=[first])
            self.oracle.write_optional(batch, request.text, first, length)

    @staticmethod
    def _starts_at(text: Text, length: int) -> None:
        text.state = text.fingerprints(length)[-1] if length else None

    def took_up(self, request: Request) -> None:
        """Compute again what ``request``, which was resumed, has lost."""
        length = request.sequence.length
        if length < len(request.text.tokens):
            self._starts_at(request.text, length)
            self._compute_lacking(request)
            self.compute(request)

    def forked(self, child: Sequence, parent: Request) -> None:
        """Add ``child``, a fork of ``parent``, to the requests of the scene."""
        text, length = parent.text, parent.sequence.length
        self.requests.append(Request(child, Text(text.space, text.tokens[:length], text.state)))
        assert child.length == length

    def write(self, requests: list[Request], counts: list[int]) -> None:
        """Make room for the next ``counts[i]`` tokens of each request, compare the rows that they read, and write their
        rows. They are not committed."""
        before = [request.sequence.length for request in requests]
        for request, start, count in zip(requests, before, counts):
            tokens = request.text.tokens
            tokens += [(7 * len(tokens) + i) % 900 for i in range(start + count - len(tokens))]
            request.sequence.extend(count)
        batch = self.cache.batch([request.sequence for request in requests], counts)
        self.oracle.step(batch, [request.text for request in requests], before, counts)

    def commit_of(self, request: Request, count: int, left: Any = None) -> Callable[[], None]:
        """Return the call that commits the next ``count`` tokens, without making it. ``left``: positions after which the
        step left states."""
        start = request.sequence.length
        return partial(request.sequence.commit, request.text.tokens[start : start + count], left)

    def step(self, requests: list[Request], counts: list[int]) -> None:
        """Make one step of several requests, and commit it."""
        self.write(requests, counts)
        for request, count in zip(requests, counts):
            self.commit_of(request, count)()

    def compute(self, request: Request, length: int | None = None) -> Request:
        """Compute ``request`` up to ``length`` tokens (None: its whole text), in steps that end at every block, so that
        checkpoints can be kept."""
        end = len(request.text.tokens) if length is None else length
        while request.sequence.length < end:
            at = request.sequence.length
            self.step([request], [min(self.size - at % self.size, end - at)])
        return request

    def close(self, request: Request) -> None:
        """Close ``request`` and remove it from the scene. Its text may still be found."""
        self.remember(request)
        request.sequence.close()
        self.requests.remove(request)

    def remember(self, request: Request) -> None:
        """Record that the committed text of ``request`` may be found from now on."""
        if request.text.tokens not in [text.tokens for text in self.texts]:
            self.texts.append(Text(request.text.space, request.text.tokens[: request.sequence.length]))

    def leave(self, tokens: list[int]) -> None:
        """Compute ``tokens`` in a request and close it."""
        self.close(self.compute(self.open(tokens)))

    def words(self, number: int, blocks: float = 3) -> list[int]:
        """Return the text of that number, ``blocks`` blocks long. No other number's text has its first token."""
        return [number, *((3 * number + i) % 900 for i in range(1, int(blocks * self.size)))]

    def fill(self) -> None:
        """Compute other texts until blocks are evicted: then only the last request can have freed blocks."""
        before = self.num_evicted()
        for number in range(500, 580):
            self.pass_by(number)
            if self.num_evicted() > before:
                return
        raise AssertionError("nothing was evicted")

    def pass_by(self, number: int) -> None:
        """Open, compute and close a request of four blocks. Its rows are not compared."""
        tokens = self.words(number, 4)
        with self.cache.open(tokens, "other", capacity=0) as sequence:
            for at in range(sequence.length, len(tokens), self.size):
                sequence.extend(self.size)
                sequence.commit(tokens[at : at + self.size])

    def num_evicted(self) -> int:
        """Return how many blocks were evicted; for models that share only checkpoints, how many checkpoints."""
        stats = self.cache.stats()
        return stats.evicted_blocks if self.kind.shares else stats.evicted_checkpoints

    def forget(self) -> None:
        """Let the tiers store everything, and reset the cache, so that nothing is cached on the device."""
        assert self.cache.flush()
        self.cache.reset()

    @property
    def running(self) -> int:
        return self.cache.stats().running

    def is_found_as_ever(self, what: str, request: Request, length: int | None = None) -> None:
        """Assert that after one more commit another request finds as much of the text, or of its first ``length`` tokens, as
        if nothing had failed."""
        request.sequence.commit([])
        text = request.text.tokens[: request.sequence.length if length is None else length]
        with self.cache.open([*text, 996], "one", capacity=0) as probe:
            found = probe.cached_tokens
        key = (self.kind.schema, what)
        if self.is_undisturbed:
            FOUND[key] = found
        assert found == FOUND.get(key, found), f"{found} committed tokens are found, not {FOUND[key]}"

    # -- what must hold afterwards

    def prove(self) -> None:
        """Prove that every request continues with its own rows, that all texts can be found again, and that all slots
        and blocks can be used."""
        cache, size = self.cache, self.size
        cache.check()
        assert self.running == len(self.requests), f"{self.running} run of {len(self.requests)}: a slot was lost"
        for request in self.requests:
            length = request.sequence.length
            assert request.sequence.tokens.tolist() == request.text.tokens[:length]
            left = len(request.text.tokens) - length
            self.step([request], [2 if not left else min(left, 2 * size)])
        if self.requests:
            self.step(self.requests, [size] * len(self.requests))
            cache.check()
        for request in [*self.requests]:
            self.close(request)
        cache.check()
        self.all_is_idle()
        for text in [*self.texts]:
            self.close(self.compute(self.open([*text.tokens, 998])))
        fresh = [self.open([901 + i], reserve=1) for i in range(SLOTS)]
        self.step(fresh, [1] * SLOTS)
        for request in fresh:
            self.close(request)
        if self.drivers:
            assert cache.flush()
        self.all_is_idle()
        cache.reset()
        cache.check()
        assert not cache.stats().running and cache.open(self.words(999)).cached_tokens == 0

    def all_is_idle(self) -> None:
        """Assert that no request runs, and that no slot, block or byte of the swap is held."""
        stats = self.cache.stats()
        assert stats.running == 0 == stats.suspended, f"{stats.running} run, {stats.suspended} are suspended"
        assert stats.swap_nbytes == 0, f"{stats.swap_nbytes} bytes of the swap are held"
        for group in stats.groups:
            assert idle_blocks(group) == group.total, f"{idle_blocks(group)} of {group.total} in {group.name} are idle"
            assert outstanding(group) == 0, f"{outstanding(group)} blocks of {group.name} are still promised"

    def prove_reset(self, closes_first: bool) -> None:
        """Prove that a cache that must be reset says so in every call, and that ``reset`` repairs it. ``closes_first``:
        its requests are closed before the reset."""
        needs_reset = needs_reset_error()
        assert issubclass(needs_reset, RuntimeError)
        calls = [lambda: self.cache.open([1]), self.cache.check]
        for request in self.requests:
            if request.sequence.is_open:
                calls += [partial(request.sequence.extend, 1), partial(self.cache.batch, [request.sequence], [1])]
        for call in calls:
            with pytest.raises(needs_reset):
                call()
        for request in self.requests if closes_first else ():
            if request.sequence.is_open:
                request.sequence.close()
        self.cache.reset()
        self.cache.check()
        for request in self.requests:
            with pytest.raises(StaleHandle):
                request.sequence.extend(1)
            with suppress(StaleHandle):
                request.sequence.close()
        self.requests.clear()
        self.cache.check()
        self.all_is_idle()
        for text in [*self.texts]:  # whatever is still cached was written for this text
            self.close(self.compute(self.open([*text.tokens, 997])))
        self.prove()

    def end(self) -> None:
        """Close the prefetches and the cache, whatever their state."""
        with suppress(BaseException):
            self.stack.close()
        with suppress(BaseException):
            self.cache.close(timeout=0.5)


def idle_blocks(group: Any) -> int:
    """Return how many blocks are free or could be evicted, under either name that statistics have for the latter."""
    return int(group.free + (group.evictable if hasattr(group, "evictable") else group.spare))


def outstanding(group: Any) -> int:
    """Return how many blocks are reserved for running requests beyond those that they hold."""
    return int(group.outstanding if hasattr(group, "outstanding") else group.promised)


def needs_reset_error() -> type[BaseException]:
    found: type[BaseException] = errors.NeedsReset  # type: ignore[attr-defined]
    return found
