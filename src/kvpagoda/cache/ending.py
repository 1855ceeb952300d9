"""How a request ends: by ``close``, with the last fence around it, or because nobody can name it any more.

A fence around a request means that a step or a copy of it is in flight: publishing and ``close`` wait for its end. A
fence object or a sequence may be collected before that, in any thread, in the middle of any call: after an interrupt,
or because a caller dropped it. Finalizers only append it to a list of ``Core``; the rest is done here, by later calls.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from contextlib import suppress

from kvpagoda.cache.core import Core
from kvpagoda.cache.observing import observable
from kvpagoda.cache.request import Request, State
from kvpagoda.cache.settling import Settler
from kvpagoda.errors import RetryLater

_log = logging.getLogger(__name__)


class Ending:
    """Closes the requests of ``core``, and counts the fences around them."""

    def __init__(self, core: Core, settler: Settler) -> None:
        self._core, self._settler = core, settler

    @observable
    def close(self, request: Request) -> None:
        """End ``request``: free its own blocks and its slot; what it published stays cached, unpinned. If a fence is
        around it, only mark it as closing: the end of the last fence closes it."""
        core, counters = self._core, self._core.counters
        if request.rows is not None:
            request.detach()
        if request.num_fences and core.dropped_fences:
            self.leave_dropped_fences()
        if request.num_fences:
            request.state = State.CLOSING
            return
        computed = request.own_length - request.match.resumable
        if request.state is State.SUSPENDED:
            core.guard.is_torn = True
            core.swap.drop(core.suspended[request])
            del core.suspended[request]
            request.state, request.handle = State.CLOSED, None
            core.guard.is_torn = False
        else:
            if request in core.waiting and (core.bounded or core.prefix.windows or core.tiers.levels):
                self._settler.settle(request)
            self._settler.ending(request)
            core.release(request, last=self._settler.last_blocks(request))
        counters.closed += 1
        request.tally.computed += computed
        if request.on_end is not None:
            request.on_end(request)
        self.tidy()

    def close_dropped(self) -> bool:
        """Close the requests whose sequences were collected, after leaving the fences that were. Return whether there
        were any such requests or fences. O(requests).

        Called where slots, blocks or swap memory are lacking. If it raises, the next such call does the rest."""
        core = self._core
        has_left = self.leave_dropped_fences()
        num_dropped, before = len(core.dropped), core.counters.dropped
        for request in [*core.running.values(), *core.suspended]:
            if request.is_dropped:
                self.close(request)
                core.counters.dropped += 1
                text = "a sequence of %d tokens was dropped without close(), and is closed now"
                _log.warning(text, request.own_length)
        for _ in range(num_dropped):
            core.dropped.popleft()
        return has_left or core.counters.dropped > before

    def close_all(self) -> None:
        """Close every request, running or suspended, except that those in a fence only end with it."""
        self.leave_dropped_fences()
        for request in [*self._core.running.values(), *self._core.suspended]:
            if request.state is not State.CLOSING or not request.num_fences:
                self.close(request)

    def tidy(self) -> None:
        """Poison freed blocks, and drop what is stale, now that blocks may have been freed."""
        if self._core.memory.is_poisoning:
            self._core.capacity.tidy()
        if self._core.stale:
            self.clear_stale()

    def clear_stale(self) -> None:
        """Drop the cached blocks of the stale namespaces that are not in use any more."""
        core = self._core
        waiting = {request.namespace for request in core.suspended}  # resumed requests may publish there again
        for namespace in [*core.stale]:
            with suppress(RetryLater):
                core.capacity.forget(core.prefix.clear, namespace)
                core.stale -= {namespace} - waiting

    # -- fences ------------------------------------------------------------------------------------------------------

    def check_unfenced(self, request: Request, what: str) -> None:
        """Raise RetryLater if a fence is around ``request``, which therefore cannot be ``what``."""
        if request.num_fences and self._core.dropped_fences:
            self.leave_dropped_fences()
        if request.num_fences:
            text = f"slot {request.slot} has {request.num_fences} fences and cannot be {what}"
            raise RetryLater.with_hint(text, "leave them first", available=request.num_fences)

    def enter_fence(self, requests: Many[Request], fenced: list[Request]) -> None:
        """Add one fence around each of ``requests``, and append each to ``fenced``. Raises StaleHandle, adding none."""
        for request in requests:
            request.check_running()
        for request in requests:
            request.num_fences += 1
            fenced.append(request)

    def leave_fence(self, fenced: list[Request], num_left: int = 0) -> None:
        """Remove one fence around each request of ``fenced``, and the request from the list, from the last one on until
        ``num_left`` are left; then do what waited for a last fence. An error in one request does not stop the others;
        the first error is raised at the end."""
        ended, errors = list[Request](), list[BaseException]()
        while len(fenced) > num_left:
            request = fenced[-1]
            if request.num_fences == 1:
                ended.append(request)
            if request.num_fences:  # 0 after a reset
                request.num_fences -= 1
            fenced.pop()
        for request in () if self._core.guard.is_torn else ended:  # ``reset`` will end them
            try:
                self._leave(request)
            except BaseException as error:
                errors.append(error)
                if self._core.guard.is_torn:
                    break
                try:
                    self._leave(request)  # once more: no later call but ``KVCache.close`` would do it
                except BaseException as again:
                    errors.append(again)
        if errors:
            raise errors[0]

    def leave_dropped_fences(self) -> bool:
        """Leave the fences that were collected inside their ``with`` block; return whether there were any. If it
        raises, the next call does the rest."""
        fences = self._core.dropped_fences
        num_fences = len(fences)
        for _ in range(num_fences):
            self.leave_fence(fences[0])
            fences.popleft()
        return num_fences > 0

    def _leave(self, request: Request) -> None:
        """Do what waited for the last fence around ``request``: close it, or publish what it committed."""
        if request.state is State.CLOSING:
            self.close(request)
        elif request.state is State.RUNNING and request in self._core.waiting:
            request.detach()
            self._settler.settle(request)
