"""One request's share of the cache, from ``open`` to ``close``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, SupportsIndex, TypeVar

import numpy as np

from kvpagoda.cache.core import Core
from kvpagoda.cache.guard import either_way, exclusive
from kvpagoda.cache.lifecycle import Lifecycle
from kvpagoda.cache.prefix_match import PrefixMatch
from kvpagoda.cache.request import Request, State, Tokens
from kvpagoda.errors import BadInput
from kvpagoda.units import whole_number

P = ParamSpec("P")
T = TypeVar("T")


def while_running(method: Callable[Concatenate[Sequence, P], T]) -> Callable[Concatenate[Sequence, P], T]:
    """``method``, exclusive as in ``guard.exclusive``, for a sequence that runs. Raises StaleHandle."""

    @wraps(method)
    def guarded(self: Sequence, /, *args: P.args, **kwargs: P.kwargs) -> T:
        guard = self._guard
        if not guard.lock.acquire(False):
            guard.raise_busy(method.__qualname__)
        try:
            if guard.is_torn:
                guard.raise_torn()
            if self._request.state is not State.RUNNING:
                self._request.check_running()
            return method(self, *args, **kwargs)
        finally:
            guard.lock.release()

    return guarded


class Sequence:
    """A request that is being computed. Made by ``KVCache.open``; closes itself at the end of a ``with`` block.

    ``length`` tokens have their rows written (committed). ``extend`` makes room for more, ``commit`` says that they
    were written. Every call either does all it says or raises and changes nothing; after ``close`` all raise StaleHandle.
    """

    __slots__ = ("__weakref__", "_guard", "_lifecycle", "_request")

    def __init__(self, lifecycle: Lifecycle, request: Request) -> None:
        self._lifecycle, self._request, self._guard = lifecycle, request, lifecycle.core.guard

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def slot(self) -> int:
        """The request slot: its row in block tables and state pools. Valid while the sequence is open and not suspended."""
        self._request.check_running()
        return self._request.slot

    @property
    def is_open(self) -> bool:
        """True until ``close``, while it is suspended too."""
        return self._request.state in (State.RUNNING, State.SUSPENDED)

    @property
    def length(self) -> int:
        """Tokens whose rows are written."""
        return self._request.length

    @property
    def prompt_length(self) -> int:
        """Tokens that were given when it was opened, or, after a partial ``resume``, that were committed before."""
        return self._request.prompt_length

    @property
    def capacity(self) -> int:
        """Tokens, the committed ones included, that every group has room for."""
        self._request.check_running()
        return self._lifecycle.capacity_of(self._request)

    @property
    def match(self) -> PrefixMatch:
        """What was cached of its prompt, and what cut that short."""
        return self._request.match

    @property
    def cached_tokens(self) -> int:
        """Leading tokens of the prompt that need not be computed: at most ``len(prompt) - 1``."""
        return self._request.match.resumable

    @property
    def epochs(self) -> list[tuple[int, int]]:
        """Which weights its tokens were computed with: (first position, epoch), ascending; see ``KVCache.epoch``. The last one
        is that of what it computes next."""
        return [*self._request.epochs]

    @property
    def tokens(self) -> Tokens:
        """The committed token ids, int32 ``[length]``; a read-only view."""
        request = self._request
        if request.rows is not None:
            request.rows.flush(request)
        view = request.tokens[: request.own_length]
        view.flags.writeable = False
        return view

    # -- its steps ---------------------------------------------------------------------------------------------------

    @while_running
    def extend(self, n: SupportsIndex) -> None:
        """Make room for the next ``n`` tokens after the committed ones, in every group or in none.

        Raises OutOfBlocks, BadInput for an ``n`` that is no whole number of at least 0, and NeverFits past the longest
        context; nothing changed then.
        """
        if type(n) is not int or n < 0:
            n = whole_number(n, "the number of tokens to extend by")
        request, lifecycle = self._request, self._lifecycle
        end = request.length + n
        if not request.is_settled and request.rows is None and end > request.prompt_length + n:
            lifecycle.settle(request)  # answers may be alike: what is cached already is free before more is taken
        if end > lifecycle.capacity_of(request):
            lifecycle.extend({request.slot: end})

    @while_running
    def commit(self, token_ids: Any) -> None:
        """Say that the rows of the next ``len(token_ids)`` tokens are written: whole blocks become shareable, window
        groups free what slid out.

        Inside the prompt the ids must be the prompt's own. Raises BadInput (no room, other ids), StaleHandle.
        """
        self._lifecycle.commit(self._request, token_ids)

    @while_running
    def fork(self, *, reserve: SupportsIndex | None = None) -> Sequence:
        """A second request with the same committed tokens, to go another way: whole blocks are shared, the partial block and
        state rows copied. ``reserve``: tokens that it may come to hold (default: those committed).

        Raises RetryLater if there is no slot or no room, or while it is fenced; nothing changed then.
        """
        wanted = 0 if reserve is None else whole_number(reserve, "reserve")
        request = self._request
        request.detach()
        self._lifecycle.check_unfenced(request, "forked")
        child = Sequence(self._lifecycle, request)  # before there is anything to lose
        child._request = self._lifecycle.admission.fork(request, max(request.own_length, wanted))
        return child

    @while_running
    def rewind(self, n: SupportsIndex) -> None:
        """Take back the last ``n`` committed tokens; others may follow them, after ``extend``.

        Raises BadInput for more tokens than there are, or where a layer keeps something that cannot go back so far: it
        names the layers. What a batch wrote counts too, committed or not, and what the request started from stays: a
        checkpoint, or the sequence it was forked from. Raises OutOfBlocks if a shared block must be copied and there is
        no room. Nothing changed then.
        """
        self._lifecycle.rewind(self._request, whole_number(n, "the number of tokens to rewind"))

    @while_running
    def suspend(self, whole: bool = True) -> None:
        """Set this request aside: what it holds goes to host memory, and its blocks, its slot and what it reserved are free.
        Until ``resume`` or ``close`` everything but ``length``, ``tokens``, ``match`` raises StaleHandle.

        ``whole``: all rows that it needs, so that it goes on just as it was. Otherwise only those that nobody else has: what
        it published stays in the cache, where it may be evicted. Waits until the bytes are there. Raises OutOfBlocks if
        that does not fit in the ``swap`` of the cache, RetryLater while it is fenced, StaleHandle; nothing changed then.
        """
        if not isinstance(whole, bool | np.bool_):
            raise BadInput(f"whole is True or False, got {whole!r}")
        self._lifecycle.suspend(self._request, bool(whole))

    @exclusive
    def resume(self, *, capacity: SupportsIndex | None = None, reserve: SupportsIndex | None = None) -> int:
        """Go on after ``suspend``, byte for byte: what is still cached is shared again, the rest copied back. Returns how many
        tokens must be computed again: 0, or, if it was suspended in part and what it had published was evicted, those
        behind the longest beginning from which ``open`` could start; they are its prompt then, and ``length`` is less.

        ``capacity``: make room for so many first tokens (default: as before; only for what need not be computed, if anything
        must). ``reserve``: see ``KVCache.open`` (default: what was reserved before). Raises RetryLater if there is no slot or
        no room, NeverFits for a larger ``capacity`` or ``reserve`` than the cache, BadInput, StaleHandle; nothing changed
        then.
        """
        request = self._request
        if request.state is not State.SUSPENDED:
            request.check_running()
            raise BadInput(f"the sequence in slot {request.slot} runs; suspend it first")
        length = request.own_length
        self._lifecycle.admission.resume(
            request,
            None if capacity is None else whole_number(capacity, "capacity"),
            None if reserve is None else whole_number(reserve, "reserve"),
        )
        return length - request.own_length

    @either_way
    def close(self) -> None:
        """Give everything back; whole blocks stay for others to find. Inside a fence that waits for its end. Raises
        StaleHandle the second time."""
        request = self._request
        if request.state is not State.SUSPENDED:
            request.check_running()
        if self._lifecycle.core.guard.is_torn:  # reset gives back what it held
            request.state, request.rows = State.CLOSED, None
            return
        self._lifecycle.close(request)

    def __enter__(self) -> Sequence:
        self._request.check_running()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_open:
            self.close()


def requests_of(sequences: Sequence | Iterable[Sequence], core: Core) -> list[Request]:
    """The requests of ``sequences``. Raises BadInput for what ``core`` did not open."""
    requests = []
    for sequence in sequences if isinstance(sequences, Iterable) else (sequences,):
        if not isinstance(sequence, Sequence) or sequence._lifecycle.core is not core:
            raise BadInput(f"expected sequences that this cache opened, got {sequence!r}")
        requests.append(sequence._request)
    return requests


def settled(sequence: Sequence) -> Request:
    """The request of ``sequence``, once all that running requests completed is published."""
    sequence._lifecycle.publisher.settle_waiting()
    return sequence._request


class Fence:
    """Steps and copies in flight around some sequences; see ``KVCache.fence``."""

    def __init__(self, lifecycle: Lifecycle, requests: list[Request]) -> None:
        self._lifecycle, self._requests, self._is_entered = lifecycle, requests, False
        self._guard = lifecycle.core.guard

    @exclusive
    def __enter__(self) -> None:
        self._lifecycle.enter_fence(self._requests)
        self._is_entered = True

    @either_way
    def __exit__(self, *_: object) -> None:
        if self._is_entered:
            self._lifecycle.leave_fence(self._requests)

    def __del__(self) -> None:  # an interrupt came before its end
        if self._is_entered and self._requests:
            with suppress(Exception):
                self.__exit__()
