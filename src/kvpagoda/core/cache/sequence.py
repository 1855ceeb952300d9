"""``Sequence``: one request's share of the cache, from ``open`` to ``close``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, SupportsIndex, TypeVar
from weakref import ref

from kvpagoda.arrays import TokenIds, Tokens
from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.guard import either_way, exclusive
from kvpagoda.core.cache.lifecycle import Lifecycle, step_positions
from kvpagoda.core.cache.outcome import Outcome
from kvpagoda.core.cache.prefix_cache import PrefixMatch
from kvpagoda.core.cache.request import Breakpoint, RequestState, State
from kvpagoda.errors import BadInput, shown
from kvpagoda.text import in_brackets
from kvpagoda.units import MOST, items_of, truth, whole_number

P = ParamSpec("P")
T = TypeVar("T")


def while_running(method: Callable[Concatenate[Sequence, P], T]) -> Callable[Concatenate[Sequence, P], T]:
    """Wrap ``method`` as ``guard.exclusive`` does; it also raises StaleHandle unless the sequence runs."""

    @wraps(method)
    def guarded(self: Sequence, /, *args: P.args, **kwargs: P.kwargs) -> T:
        guard = self._guard
        if not guard.lock.acquire(False):
            guard.raise_refused(method.__qualname__)
        try:
            if guard.is_torn:
                guard.raise_torn()
            if self._request.state is not State.RUNNING:
                self._request.check_running()
            return method(self, *args, **kwargs)
        finally:
            if guard.noted or guard.over:
                guard.end(guard.lock)
            else:
                guard.lock.release()

    return guarded


class Sequence:
    """A request that is being computed. Made by ``KVCache.open``; a ``with`` block closes it at its end.

    The K/V rows of the first ``length`` tokens are written (committed). ``extend`` allocates blocks for more tokens;
    ``commit`` says that their rows are written. Every call either does all that it says, or raises and changes nothing.
    After ``close`` every method raises StaleHandle. A sequence that is collected unclosed is closed by a later call of
    its cache: at the latest by one that needs its slot or blocks.
    """

    __slots__ = ("__weakref__", "_guard", "_lifecycle", "_request", "hints")
    hints: list[Outcome]
    """The outcomes of the hints with which it was opened."""

    def __init__(self, lifecycle: Lifecycle, request: RequestState) -> None:
        self._lifecycle, self._request, self._guard = lifecycle, request, lifecycle.core.guard
        request.handle = ref(self, lifecycle.core.dropped.append)

    @in_brackets
    def __repr__(self) -> str:
        request = self._request
        is_running = request.state is State.RUNNING
        where = f" in slot {request.slot}, blocks for {request.capacity:,} tokens" if is_running else ""
        return (
            f"{request.state.value}{where}: {request.length:,} committed, a prompt of {request.prompt_length:,}, of which "
            f"{request.match.resumable:,} were cached"
        )

    # -- properties --------------------------------------------------------------------------------------------------

    @property
    def slot(self) -> int:
        """The request slot: its row in block tables and state pools. Valid until ``suspend`` or ``close``. Raises
        StaleHandle."""
        self._request.check_running()
        return self._request.slot

    @property
    def is_open(self) -> bool:
        """True until ``close``, also while the sequence is suspended."""
        return self._request.state in (State.RUNNING, State.SUSPENDED)

    @property
    def length(self) -> int:
        """The number of committed tokens: those whose rows are written."""
        return self._request.length

    @property
    def prompt_length(self) -> int:
        """The number of tokens given to ``open``; fewer after a ``rewind`` into them. After a ``resume`` that must
        compute tokens again: the number of tokens committed before."""
        return self._request.prompt_length

    @property
    def capacity(self) -> int:
        """The number of tokens, committed ones included, for which every group has blocks.

        Raises:
            StaleHandle: the sequence is closed or suspended.
        """
        self._request.check_running()
        return self._request.capacity

    @property
    def match(self) -> PrefixMatch:
        """What was cached of the prompt, and what limited the hit."""
        return self._request.match

    @property
    def cached_tokens(self) -> int:
        """Leading tokens of the prompt that need not be computed: at most ``len(prompt) - 1``."""
        return self._request.match.resumable

    @property
    def checkpoints(self) -> tuple[Breakpoint, ...]:
        """What became of each position that ``open(checkpoints=..)`` asked for, in that order; () without any."""
        own = self._request.checkpoints
        if own.asked is None:
            return ()
        return own.asked.told(own.due, self._lifecycle.core.block_size)

    @property
    def step_checkpoints(self) -> tuple[int, ...]:
        """The positions, in tokens, at which the newest batch of this sequence asks its step to leave the states; see
        ``Batch.checkpoints``. () once they are committed."""
        return step_positions(self._lifecycle.core, self._request)

    @property
    def epochs(self) -> list[tuple[int, int]]:
        """Which weights the tokens were computed with: (first position, epoch), ascending; see ``KVCache.epoch``. The
        last entry is the epoch of the tokens that are computed next."""
        return [*self._request.epochs]

    @property
    def tokens(self) -> Tokens:
        """The committed token ids: int32 ``[length]``, a read-only view."""
        request = self._request
        if request.rows is not None:
            request.rows.flush(request)
        view = request.tokens[: request.own_length]
        view.flags.writeable = False
        return view

    # -- methods -----------------------------------------------------------------------------------------------------

    @while_running
    def extend(self, n: SupportsIndex) -> None:
        """Allocate blocks for the next ``n`` tokens after the committed ones, in every group or in none.

        Args:
            n: tokens, at least 0.

        Raises:
            OutOfBlocks: a group has too few blocks; nothing changed.
            BadInput: ``n`` is not a whole number of at least 0.
            NeverFits: the request would pass ``KVCache.max_context``.
            StaleHandle: the sequence is closed or suspended.
        """
        if type(n) is not int or not 0 <= n < MOST:
            n = whole_number(n, "the number of tokens to extend by")
        request, lifecycle = self._request, self._lifecycle
        end = (request.own_length if request.rows is None else request.length) + n
        if end > request.capacity:
            lifecycle.extend(request.slot, end)

    @while_running
    def commit(self, token_ids: TokenIds, checkpoints: TokenIds | None = None) -> None:
        """Say that the rows of the next ``len(token_ids)`` tokens are written.

        Whole blocks become shareable, and window groups free the blocks that slid out.

        Args:
            token_ids: int32; inside the prompt they must be the prompt's own.
            checkpoints: of ``step_checkpoints``, the positions at which the step left its states too, in the places
                that ``Batch.checkpoints`` names; others are not kept.

        Raises:
            BadInput: there is no room for them, they differ from the prompt, or ``checkpoints`` has other positions.
            StaleHandle: the sequence is closed or suspended.
        """
        self._lifecycle.commit(self._request, token_ids, checkpoints)

    @while_running
    def fork(self, *, reserve: SupportsIndex | None = None) -> Sequence:
        """Start a second request with the same committed tokens, which may then continue differently.

        Whole blocks are shared; the partial block and the newest states are copied.

        Args:
            reserve: the most tokens that the new request may have; None: the committed ones.

        Returns:
            The new request.

        Raises:
            RetryLater: no slot or no room is free, or this sequence is fenced; nothing changed.
            StaleHandle: the sequence is closed or suspended.
        """
        wanted = 0 if reserve is None else whole_number(reserve, "reserve")
        request = self._request
        request.detach()
        self._lifecycle.ending.check_unfenced(request, "forked")
        admission = self._lifecycle.admission
        child = Sequence(self._lifecycle, admission.child_of(request))  # first: if this fails, nothing is allocated yet
        admission.fork(request, child._request, max(request.own_length, wanted))
        return child

    @while_running
    def rewind(self, n: SupportsIndex) -> None:
        """Remove the last ``n`` committed tokens; others may be committed in their place, after ``extend``.

        How far a window or a state can go back is counted from the last token that any batch wrote, committed or not.
        Such layers cannot go back behind what the request started from either: a checkpoint, or the sequence it was
        forked from; and states that have several places (``Schema.rewindable``) not behind a suspend. If it raises,
        nothing changed.

        Args:
            n: tokens, at least 0.

        Raises:
            BadInput: there are fewer tokens, or a layer keeps something that cannot go back so far; the message names
                the layers.
            OutOfBlocks: a shared block must be copied and no block is free.
            RetryLater: the sequence is fenced.
            StaleHandle: the sequence is closed or suspended.
        """
        self._lifecycle.rewind(self._request, whole_number(n, "the number of tokens to rewind"))

    @while_running
    def suspend(self, whole: bool = True) -> None:
        """Copy what this request holds to host memory, and free its blocks, its slot and its reservation.

        Until ``resume`` or ``close``, ``slot``, ``capacity`` and other methods raise StaleHandle. Waits until the copy
        is done. If it raises, nothing changed.

        Args:
            whole: copy all rows that the request needs, so that it can continue unchanged; of states, the newest. If
                False, copy only rows that are not shared: what it published stays in the cache, where it may be
                evicted.

        Raises:
            OutOfBlocks: it does not fit in the swap memory (``Limits.swap``).
            RetryLater: the sequence is fenced.
            StaleHandle: the sequence is closed or suspended.
            BadInput: ``whole`` is neither True nor False.
        """
        self._lifecycle.suspend(self._request, truth(whole, "whole"))

    @exclusive
    def resume(self, *, capacity: SupportsIndex | None = None, reserve: SupportsIndex | None = None) -> int:
        """Run again after ``suspend``, with the same bytes. Return the number of tokens that must be computed again.

        Blocks that are still cached are shared again, the rest is copied back. If it raises, nothing changed.

        Args:
            capacity: allocate blocks for this many first tokens; None: as before; if tokens must be computed, only for
                those that need not be.
            reserve: see ``KVCache.open``; None: as before.

        Returns:
            0, unless only a part was copied and published blocks were evicted since: then it starts again from the
            longest prefix from which ``open`` could start. The tokens after that must be computed, ``length`` is
            smaller, and all tokens committed so far are its prompt.

        Raises:
            RetryLater: no slot or no room is free.
            NeverFits: ``capacity`` or ``reserve`` is larger than the cache.
            BadInput: the sequence is not suspended, or an argument is no whole number or out of range.
            StaleHandle: the sequence is closed.
        """
        request = self._request
        if request.state is not State.SUSPENDED:
            request.check_running()
            text = f"the sequence in slot {request.slot} runs; suspend it first"
            raise BadInput(text, needed="suspended", available="running")
        length = request.own_length
        self._lifecycle.admission.resume(
            request,
            None if capacity is None else whole_number(capacity, "capacity"),
            None if reserve is None else whole_number(reserve, "reserve"),
        )
        return length - request.own_length

    @while_running
    def hand_over(
        self, ttl: float, *, after: SupportsIndex = 0, goes_on: bool = False, upto: SupportsIndex | None = None
    ) -> Any:
        """Let another cache continue this request: return a ``kvpagoda.handover.Ticket``, for ``KVCache.receive`` there.

        The cache needs a sender (``KVCache.sender``). This handle is closed, but the request keeps its slot and blocks
        until all ranks of a receiver fetched it, or until it expires or is given up; ``Sender.take_back`` lets it run
        again here. If it raises, nothing changed.

        Args:
            ttl: seconds until the ticket expires.
            after: leave out the whole blocks of the first ``after`` tokens, which the receiver must have cached;
                windows and states are never left out. Of optional groups what is lacking stays so:
                ``Sequence.match.lacking_from`` of the receiver says where.
            goes_on: this request runs on, and the ticket is for what it has committed so far: the receiver has that
                while the rest is computed.
            upto: the ticket is for the first ``upto`` tokens, of which the last are still to be computed here. The
                sequence runs until ``Sender.complete`` says that they are committed; ``Sender.layer_done`` lets
                receivers read each layer as soon as it is computed.

        Raises:
            BadInput: the cache has no sender, nothing is committed, tokens are of several weights, or the namespace was
                invalidated meanwhile.
            OutOfBlocks: there is no memory that can be exported.
            RetryLater: the sequence is fenced.
            StaleHandle: the sequence is closed or suspended.
        """
        sender, tokens = self._lifecycle.core.hand_overs, whole_number(after, "after, in tokens,")
        end = None if upto is None else whole_number(upto, "upto, in tokens,")
        return sender.hand_over(self._request, ttl, tokens, truth(goes_on, "goes_on"), end)

    @either_way
    def close(self) -> None:
        """End this request: its committed whole blocks stay cached for reuse, all else that it alone holds is freed.

        Inside a fence this waits until the fence ends, and while the cache sleeps until it wakes.

        Raises:
            StaleHandle: it is closed already.
        """
        request = self._request
        if request.state is not State.RUNNING and request.state is not State.SUSPENDED:
            request.check_running()
        if self._lifecycle.core.guard.is_torn:  # reset frees what it held
            request.state, request.rows = State.CLOSED, None
            return
        self._lifecycle.ending.close(request)

    def __enter__(self) -> Sequence:
        self._request.check_running()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_open:
            self.close()


def requests_of(sequences: Sequence | Iterable[Sequence], core: Core) -> list[RequestState]:
    """Return the requests of ``sequences``. Raises BadInput for anything that ``core`` did not open."""
    requests = []
    for sequence in items_of(sequences):
        if not isinstance(sequence, Sequence) or sequence._lifecycle.core is not core:
            text = f"expected sequences that this cache opened, got {shown(sequence)}"
            raise BadInput(text, needed=type(sequence).__name__)
        requests.append(sequence._request)
    return requests


def published_request(sequence: Sequence) -> RequestState:
    """Return the request of ``sequence``, after publishing all blocks that running requests completed."""
    sequence._lifecycle.settler.settle_waiting()
    return sequence._request


class Fence:
    """A context manager around steps and copies in flight of some sequences. Made by ``KVCache.fence``.

    It can be entered again, also while it is entered: every ``with`` block protects the sequences until its end.
    """

    _fenced: list[RequestState] = []  # noqa: RUF012  never changed: for __del__ after an interrupt in __init__

    def __init__(self, lifecycle: Lifecycle, requests: list[RequestState]) -> None:
        self._lifecycle, self._requests, self._guard = lifecycle, tuple(requests), lifecycle.core.guard
        self._num_entered, self._fenced = 0, []  # blocks entered; requests, once for each fence around them

    @exclusive
    def __enter__(self) -> None:
        self._lifecycle.ending.enter_fence(self._requests, self._fenced)
        self._num_entered += 1

    @either_way
    def __exit__(self, *_: object) -> None:
        self._num_entered = max(0, self._num_entered - 1)
        self._lifecycle.ending.leave_fence(self._fenced, self._num_entered * len(self._requests))

    def __del__(self) -> None:  # an interrupt kept __exit__ from being called; a finalizer may run inside any call
        if self._fenced:
            self._lifecycle.core.dropped_fences.append(self._fenced)
            self._lifecycle.core.dropped.append(None)
