"""Operations: requests are handed over, at once or layer by layer, and received in the same cache, with equal rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpagoda.errors import BadInput, HandoverMiss, NeverFits, OutOfBlocks, RetryLater, StaleHandle, TicketRefused

from .faults import Fault, Refused
from .life import compute_lacking, look, make_room
from .steps import at_last, commit, compute
from .texts import Request, Tokens

if TYPE_CHECKING:
    from .driver import Driver


@dataclass(eq=False)
class Promise:
    """The ticket of a request for its first ``upto`` tokens before all of these are computed. ``tokens``: what is known of its
    text."""

    request: Request
    ticket: Any
    upto: int
    tokens: Tokens
    media: dict[int, bytes]
    epochs: list[tuple[int, int]]
    goes_on: bool
    is_over: bool = False

    def is_begun(self) -> bool:
        """Whether its request has the beginning of what is promised."""
        one, length = self.request, self.request.length
        return length <= self.upto and np.array_equal(one.text, self.tokens[:length]) and self.has_media(length)

    def has_media(self, upto: int) -> bool:
        """Whether its request has the promised media before ``upto``. A rewind takes those behind it away, for good."""
        of_request, promised = (
            {at: one for at, one in media.items() if at < upto} for media in (self.request.media, self.media)
        )
        return of_request == promised

    def is_open(self) -> bool:
        """Whether its request may still compute what is promised."""
        one = self.request
        is_ahead = one.num_written > one.length or not self.is_begun()
        return one.is_running and not self.is_over and not is_ahead and not one.fences and self.has_media(self.upto)

    def can_complete(self) -> bool:
        """Whether its request has committed these tokens, and no other ones."""
        one = self.request
        return (
            one.is_running and one.length == self.upto and not one.fences and not is_mixed(one)
            and one.handle.epochs == self.epochs and self.is_begun()
        )  # fmt: skip


def is_mixed(request: Request) -> bool:
    """Whether its tokens are of several versions of the weights, or of what its namespace stands for. A change behind its
    tokens is of some that it lost since."""
    return any(0 < first < request.num_written for first, _ in request.seeds)


def may_refuse(request: Request) -> list[type[Exception]]:
    """Return what a hand-over may raise for a request that changed its weights or the meaning of its namespace, if only before
    it had tokens."""
    return [BadInput] if request.has_changed else []


def hand_over_one(driver: Driver) -> None:
    """Hand a request over and receive it as a second one; the first runs on."""
    parent = driver.pick(lambda one: one.is_running and one.num_written == one.length > 0 and not one.fences)
    if parent.handle.epochs != [(0, driver.cache.epoch)]:
        raise Refused("of earlier weights")
    line = f"a hand-over of #{parent.number} at {parent.length}"
    ticket = driver.attempt(line, lambda: parent.handle.hand_over(60.0, goes_on=True), OutOfBlocks, *may_refuse(parent))
    driver.require(not is_mixed(parent), f"{parent} was handed over, and has rows of two versions: {parent.seeds}")
    received(driver, parent, ticket, parent.tokens[: max(parent.length, parent.prompt_length)], parent.media)


def received(driver: Driver, parent: Request, ticket: Any, tokens: Tokens, media: dict[int, bytes]) -> None:
    """Receive the request of ``ticket``, that of ``parent``, of which ``tokens`` with ``media`` were known, and compare its
    rows. Raises Refused if there is no room."""
    reserve, number = parent.length + driver.between(0, 20), driver.next_number()
    try:
        handle = driver.attempt(
            f"#{number} = #{parent.number}, received, reserve={reserve}",
            lambda: driver.cache.receive(ticket, driver.transfer, parent.namespace, reserve=reserve),
            RetryLater, *([NeverFits] if max(reserve, len(tokens)) > driver.longest else []),
        )  # fmt: skip
    except Refused:
        driver.sender.give_up(ticket)
        raise
    media = {at: digest for at, digest in media.items() if at < len(tokens)}
    child = Request(number, handle, 0, parent.namespace, tokens.copy(), media, max(len(tokens), reserve))
    child.seeds, child.has_changed = [*parent.seeds], parent.has_changed
    child.length = child.num_written = child.started_at = child.highest = parent.length
    child.is_blank = parent.is_blank
    driver.requests[handle] = child
    compute_lacking(driver, child)
    if handle.capacity > child.length:
        look(driver, child)


# -- layer by layer --------------------------------------------------------------------------------------------------------


def promise_one(driver: Driver) -> None:
    """Hand a request over before all of its prompt is computed."""
    driver.promises = driver.promises[-3:]
    least = driver.one(0, 1, 1, 1)
    request = driver.pick(
        lambda one: (
            one.is_running
            and one.handle.epochs == [(0, driver.cache.epoch)]
            and one.length + least <= max(one.length, one.prompt_length)
        )
    )
    known = max(request.length, request.prompt_length)
    if not known:
        raise Refused("nothing is known of it")
    upto, goes_on = driver.between(max(1, request.length), known), driver.chance(0.5)
    ticket = driver.attempt(
        f"a promise of {upto} tokens of #{request.number} at {request.length}, goes_on={goes_on}",
        lambda: request.handle.hand_over(60.0, goes_on=goes_on, upto=upto),
        OutOfBlocks, *may_refuse(request),
    )  # fmt: skip
    driver.require(not is_mixed(request), f"{request} was promised, and has rows of two versions: {request.seeds}")
    tokens = request.tokens[:known].copy()
    promise = Promise(request, ticket, upto, tokens, {**request.media}, [*request.handle.epochs], goes_on)
    driver.promises.append(promise)
    if promise.is_open() and driver.chance(0.7):
        prefill(driver, promise)


def pick_promise(driver: Driver, is_open: bool = False) -> Promise:
    """Return one of the promises, with ``is_open`` one that can still be completed; those of closed requests are forgotten,
    sometimes. Raises Refused if there is none."""
    if driver.chance(0.3):
        driver.promises = [one for one in driver.promises if not one.request.is_closed]
    found = [one for one in driver.promises if not is_open or one.is_open()]
    if not found:
        raise Refused("nothing is promised")
    return driver.one(*found)


def report_layers(driver: Driver) -> None:
    """Say which layers of a promise are written: of what is committed; or of more, which is then committed or taken back."""
    promise = pick_promise(driver)
    request, layers = promise.request, len(driver.cache.schema.layers)
    is_alive, passed = request.is_running and not promise.is_over, not promise.is_begun()
    layer = driver.one(None, *range(layers))
    most = min(promise.upto, request.num_written) if is_alive else 0
    end = driver.between(0, most) if driver.chance(0.3) else min(most, request.length) if driver.chance(0.6) else most
    driver.attempt(
        f"layer_done(#{request.number}, {layer}, {end}) at {request.length} of {promise.upto}",
        lambda: driver.sender.layer_done(promise.ticket, layer, end), *([] if is_alive else [StaleHandle]),
        *([BadInput] if passed else []),
    )  # fmt: skip
    driver.require(is_alive and not passed, f"layers of {request} were taken, whose promise is over or passed")
    if end > request.length:
        driver.attempt(
            f"layer_done(#{request.number}, None, {request.length}), taken back",
            lambda: driver.sender.layer_done(promise.ticket, None, request.length), may_fail=False,
        )  # fmt: skip


def prefill_one(driver: Driver) -> None:
    """Compute some of what was promised, chunk by chunk, and complete it if that was all."""
    prefill(driver, pick_promise(driver, is_open=True))


def prefill(driver: Driver, promise: Promise) -> None:
    """See ``prefill_one``. Most layers are reported, before or after their rows are committed."""
    request, ticket, layers = promise.request, promise.ticket, len(driver.cache.schema.layers)
    while request.length < promise.upto and promise.is_begun() and driver.chance(0.9):
        most = min(driver.settings.step_tokens, promise.upto - request.length, driver.cache.step_limit(request.handle))
        new = promise.tokens[request.length : request.length + driver.between(1, most)]
        if request.handle.capacity < request.length + len(new):
            make_room(driver, [request], len(new))
        driver.log.append(f"a chunk of {len(new)} of #{request.number} at {request.length} of {promise.upto}")
        compute(driver, driver.cache.batch([request.handle], [len(new)]), [request], [new], 1)
        end, is_after = request.length + len(new), driver.chance(0.5)
        if is_after:
            at_last(partial(commit, driver, request, len(new)))
        for layer in range(layers):
            if driver.chance(0.8):
                call = partial(driver.sender.layer_done, ticket, layer, end)
                at_last(partial(driver.attempt, f"layer_done(#{request.number}, {layer}, {end})", call))
        if not is_after:
            at_last(partial(commit, driver, request, len(new)))
    if promise.can_complete():
        complete(driver, promise)


def receive_early(driver: Driver) -> None:
    """Receive what is not complete: it is refused, and what arrived of it changes nothing."""
    promise = pick_promise(driver)
    try:
        driver.attempt(
            f"receive of the promise of #{promise.request.number}",
            lambda: driver.cache.receive(promise.ticket, driver.transfer, promise.request.namespace), RetryLater, HandoverMiss,
            NeverFits, TicketRefused,
        )  # fmt: skip
    except Refused:
        return
    raise Fault("a request was received that is not computed")


def complete_one(driver: Driver) -> None:
    """Complete a promise and receive it; or be refused, since its request has not computed what was promised."""
    complete(driver, pick_promise(driver))


def complete(driver: Driver, promise: Promise) -> None:
    """See ``complete_one``."""
    request, ticket = promise.request, promise.ticket
    if request.num_written > request.length:
        raise Refused("its states may be ahead")
    can = promise.can_complete() and not promise.is_over
    driver.attempt(
        f"complete(#{request.number}) at {request.length} of {promise.upto}",
        lambda: driver.sender.complete(ticket), *([] if can else [BadInput, RetryLater, StaleHandle]), *may_refuse(request),
    )  # fmt: skip
    driver.require(can, f"{request} is complete, of which {promise.upto} tokens of {promise.epochs} were promised")
    driver.promises.remove(promise)
    driver.counts["completed"] += 1
    if promise.goes_on:
        received(driver, request, ticket, promise.tokens, promise.media)
        return
    driver.require(not request.handle.is_open, f"{request} is open, and handed over")
    for other in driver.promises:
        other.is_over |= other.request is request
    del driver.requests[request.handle]
    driver.lingering.add(request)  # it keeps its slot
    try:
        if driver.chance(0.3):
            driver.sender.take_back(ticket)
            raise Refused("taken back")
        received(driver, request, ticket, promise.tokens, promise.media)
    except Refused:
        driver.lingering.remove(request)
        if not request.handle.is_open:  # given up
            request.is_closed = True
            return
        driver.requests[request.handle] = request
        if request.handle.capacity > request.length:
            look(driver, request)
        return
    driver.require(driver.sender.expire() >= 1, "a request that was fetched keeps its slot")
    driver.lingering.remove(request)
    request.is_closed = True


def end_promise(driver: Driver) -> None:
    """Take back or give up a promise. Its request runs on."""
    promise = pick_promise(driver)
    name = driver.one("take_back", "give_up")
    is_alive = promise.request.is_running and not promise.is_over
    try:
        driver.attempt(
            f"{name}(the promise of #{promise.request.number})",
            lambda: getattr(driver.sender, name)(promise.ticket),
            StaleHandle,
        )
    except Refused:
        if not is_alive:
            driver.promises.remove(promise)
        raise
    promise.is_over = True


OPERATIONS = {
    "hand over": (2.0, hand_over_one),
    "promise": (1.5, promise_one),
    "layers": (3.0, report_layers),
    "prefill": (3.0, prefill_one),
    "receive early": (1.0, receive_early),
    "complete": (2.0, complete_one),
    "end a promise": (0.2, end_promise),
}
