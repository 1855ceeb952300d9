"""Operations: requests open, fork, rewind, suspend, resume and close; caches are drained and restarted."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from time import monotonic, sleep
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpagoda.errors import BadInput, NeverFits, OutOfBlocks, RetryLater, StaleHandle

from .caches import has_places, is_prefetched, prompt_length, staging_in_use
from .faults import Fault, Refused
from .keeping import envelope
from .oracle import DIALECTS, StepTexts
from .texts import NAMESPACES, Request, Tokens, epoch_of, on_epoch

if TYPE_CHECKING:
    from .driver import Driver


def begin(
    driver: Driver, tokens: Tokens, media: dict[int, bytes], namespace: Any, what: str = "open", **settings: Any
) -> Request:
    """Open a request and compare the rows that it starts from. Raises Refused."""
    length, room, reserve = len(tokens), settings.get("capacity"), settings.get("reserve")
    number, first_room = driver.next_number(), length if room is None else room
    total = max(length, first_room if reserve is None else reserve)
    may_never = total > driver.longest or first_room > driver.settings.step_tokens
    is_idle = not driver.requests and not driver.lingering
    line = f"#{number} = {what}({tokens.tolist()}, {namespace!r}, media={media}, {settings})"
    handle = driver.attempt(
        line,
        lambda: driver.cache.open(tokens, namespace, media=media or None, **settings),
        *([NeverFits] if may_never else []),
        *([] if is_idle and not may_never else [RetryLater]),
    )
    return started(driver, number, handle, namespace, tokens, media, int(total), settings)


def started(
    driver: Driver, number: int, handle: Any, namespace: Any, tokens: Tokens, media: dict[int, bytes], total: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Request:  # fmt: skip
    """Return the driver's record of the request that ``open`` returned as ``handle``."""
    core = driver.cache.core
    if len(core.running) > 1 and "hints" not in settings:  # what they pin is not free any more
        nothing = [0] * len(core.groups)
        driver.require(core.capacity.keeps_watermark(nothing), f"#{number} started beyond the watermark")
    request = Request(number, handle, driver.epochs.seed(namespace), namespace, tokens, media, total)
    request.length = request.num_written = request.highest = request.started_at = handle.length
    request.is_blank = request.length == 0
    driver.requests[handle] = request
    driver.log[-1] += f" -> starts at {request.length}"
    if epoch_of(namespace) not in (None, driver.cache.epoch):
        driver.counts["cached tokens of an older epoch"] += request.length
    driver.require(
        request.length == handle.cached_tokens < len(tokens), f"{request} starts with {handle.cached_tokens}"
    )
    compute_lacking(driver, request)
    if handle.capacity > request.length:
        look(driver, request)
    asked = [one.asked for one in handle.checkpoints]
    given = [*settings.get("checkpoints", ())]
    driver.require(asked[: len(given)] == given, f"{request} says {handle.checkpoints}")
    driver.require(len(asked) == len(given) or "hints" in settings, f"{request} says {handle.checkpoints}")
    return request


def look(driver: Driver, request: Request) -> None:
    """Compare everything that the next token of ``request`` may read."""
    batch = driver.cache.batch([request.handle], [1])
    request.reached(request.length + 1)
    for shown in driver.oracle.shown(batch, StepTexts([request], [1], [()]), driver.one(*DIALECTS)):
        shown.verify([request])


def compute_lacking(driver: Driver, request: Request) -> None:
    """Compute the rows that optional groups lack of what ``request`` starts from."""
    first = request.handle.match.lacking_from
    if first is None or first >= request.length:
        return
    count = request.length - first
    batch = driver.cache.batch([request.handle], [count], firsts=[first])
    driver.counts["tokens computed for optional groups"] += count
    request.reached(request.length)
    driver.oracle.write_optional(batch, request, first)


def namespace_of(driver: Driver) -> Any:
    """Return a namespace, mostly None. Some stay on an epoch, often on that of an open request that does so too."""
    namespace = driver.one(*NAMESPACES) if driver.chance(0.25) else None
    if not driver.chance(0.3):
        return namespace
    staying = [one for one in driver.requests.values() if epoch_of(one.namespace) is not None]
    if staying and driver.chance(0.8):
        return driver.one(*staying).namespace
    return on_epoch(namespace, driver.between(max(0, driver.cache.epoch - 2), driver.cache.epoch))


def open_one(driver: Driver) -> None:
    tokens, media = driver.documents.prompt()
    settings: dict[str, Any] = {}
    if driver.chance(0.8):
        settings["capacity"] = driver.one(0, 0, driver.between(0, driver.settings.step_tokens), len(tokens))
    if driver.chance(0.7):
        settings["reserve"] = min(len(tokens) + driver.between(0, 24), driver.one(driver.longest, driver.longest, 99))
    if driver.chance(0.3):
        settings["priority"] = driver.between(0, 4)
    if driver.settings.tiers != "none" and driver.chance(0.4):
        settings["layerwise"] = True
    if driver.chance(0.4):
        most = min(len(tokens) + 1, driver.longest)
        settings["checkpoints"] = [driver.between(0, most) for _ in range(driver.between(0, 4))]
    if driver.chance(0.15):
        settings["hints"] = envelope(driver)
    begin(driver, tokens, media, namespace_of(driver), **settings)


def crowd(driver: Driver) -> None:
    """Let a request of some other text take as much room as it can, so that cached blocks are evicted, and close it."""
    for length in (driver.longest, driver.longest * 2 // 3, driver.longest // 2, driver.longest // 3):
        tokens = driver.random.integers(50, 90, length).astype(np.int32)
        with suppress(Refused):
            request = begin(driver, tokens, {}, None, capacity=length)
            close(driver, request)
            return


def open_prefetched(driver: Driver) -> None:
    """Prefetch a text; or open a request with an earlier prefetch, of the same text or another."""
    if not driver.tier_drivers:
        tokens, _ = driver.documents.prompt()
        driver.attempt("prefetch without tiers", lambda: driver.cache.prefetch(tokens), BadInput)
        raise Fault("prefetch without tiers was accepted")
    if len(driver.prefetches) < 2 and driver.chance(0.6):
        (tokens, media), namespace = driver.documents.prompt(), namespace_of(driver)
        line = f"prefetch({tokens.tolist()}, {namespace!r}, media={media})"
        prefetch = driver.attempt(line, lambda: driver.cache.prefetch(tokens, namespace, media=media), may_fail=False)
        while driver.settings.settled and not is_prefetched(prefetch):
            sleep(0.0005)
        driver.prefetches.append((prefetch, (tokens, media, namespace)))
        if driver.chance(0.6):
            return
    if not driver.prefetches:
        raise Refused("nothing was prefetched")
    prefetch, (tokens, media, namespace) = driver.prefetches.pop(driver.between(0, len(driver.prefetches) - 1))
    if driver.chance(0.15):
        driver.attempt("close of a prefetch", prefetch.close, may_fail=False)
        return
    if driver.chance(0.2):
        tokens, media = driver.documents.prompt()
    settings = {"prefetch": prefetch, "layerwise": driver.chance(0.5), "capacity": 0, "reserve": len(tokens)}
    try:
        begin(driver, tokens, media, namespace, **settings)
    finally:
        prefetch.close()


def open_twice(driver: Driver) -> None:
    """Open a request with a prefetch that has finished: ``open`` must not look up anything in the tiers again."""
    if not driver.tier_drivers or driver.num_fences:
        raise Refused("no tiers")
    tokens, media = driver.documents.prompt()
    driver.require(driver.cache.flush(), "flush() gave up")
    driver.log.append(f"prefetch({tokens.tolist()}, media={media}), at once for open")
    prefetch = driver.cache.prefetch(tokens, media=media)
    while not is_prefetched(prefetch):
        sleep(0.0005)
    before = sum(one.num_lookups for one in driver.tier_drivers)
    try:
        begin(driver, tokens, media, None, prefetch=prefetch, capacity=0, reserve=len(tokens))
    finally:
        prefetch.close()
    asked = sum(one.num_lookups for one in driver.tier_drivers) - before
    driver.require(not asked, f"open with a prefetch that was done asked tiers {asked} times again")


def fork_one(driver: Driver) -> None:
    parent = driver.pick()
    reserve = driver.one(None, parent.length, parent.length + driver.between(1, 20))
    may_wait = len(driver.requests) > 1 or driver.lingering or reserve != parent.length or driver.settings.watermark
    number = driver.next_number()
    handle = driver.attempt(
        f"#{number} = #{parent.number}.fork(reserve={reserve}) at {parent.length}",
        lambda: parent.handle.fork(reserve=reserve),
        *([RetryLater] if parent.fences or may_wait else []),
        RetryLater, *([NeverFits] if (reserve or 0) > driver.longest else []),
    )  # fmt: skip
    driver.require(not parent.fences, "a fenced sequence was forked")
    media = {at: digest for at, digest in parent.media.items() if at < parent.length}
    total = max(parent.length, reserve or 0)
    child = Request(number, handle, 0, parent.namespace, parent.text.copy(), media, total)
    child.seeds, child.has_changed = [*parent.seeds], parent.has_changed
    child.length = child.num_written = child.started_at = child.highest = parent.length
    child.is_blank = parent.is_blank
    driver.requests[handle] = child
    if handle.capacity > child.length:
        look(driver, child)


def rewind_one(driver: Driver) -> None:
    request = driver.pick(lambda one: one.is_running and one.length > 0)
    most = min(request.length, driver.one(2, 5, request.length))
    n = driver.between(1, most)
    width, to = driver.rewind_width, request.length - n
    may_refuse = width is not None and to < max(request.started_at, request.highest - width)
    driver.attempt(
        f"#{request.number}.rewind({n}) from {request.length}",
        lambda: request.handle.rewind(n),
        OutOfBlocks, *([BadInput] if may_refuse else []), *([RetryLater] if request.fences else []),
    )  # fmt: skip
    driver.require(not request.fences, "a fenced sequence was rewound")
    request.cut(to)
    request.reserve = None  # blocks that it shared may need copies, which nothing reserved
    driver.right_length(request.handle, request)
    if request.handle.capacity > to:
        look(driver, request)


def extend_one(driver: Driver) -> None:
    request = driver.pick()
    n = driver.between(0, driver.settings.step_tokens * driver.one(1, 1, 2))
    make_room(driver, [request], n)


def make_room(driver: Driver, requests: list[Request], n: int, call: Any = None, what: str = "") -> Any:
    """Extend ``requests`` by ``n`` tokens, or make ``call`` instead. Raises Refused.

    Within the reserve this must not fail; once a prompt is computed, windows have room for a block at a time."""
    ends = [request.length + n for request in requests]
    is_promised = not driver.num_fences and n <= driver.settings.step_tokens
    for request, end in zip(requests, ends):
        is_promised &= request.reserve is not None and end <= request.reserve
        is_promised &= request.length < request.handle.prompt_length or n <= driver.cache.block_size
    return driver.attempt(
        what or f"#{requests[0].number}.extend({n}) at {ends[0] - n} of reserve {requests[0].reserve}",
        call or (lambda: requests[0].handle.extend(n)),
        *([] if is_promised else [OutOfBlocks]),
        *([BadInput] if max(ends) > driver.longest else []),
    )


def suspend_one(driver: Driver) -> None:
    suspend(driver, driver.pick(), driver.chance(0.5))


def suspend(driver: Driver, request: Request, whole: bool) -> None:
    whole |= any(at >= request.length for at in request.media)
    driver.attempt(
        f"#{request.number}.suspend(whole={whole}) at {request.length}",
        lambda: request.handle.suspend(whole) if whole else request.handle.suspend(whole=False),
        OutOfBlocks, *([RetryLater] if request.fences else []),
    )  # fmt: skip
    driver.require(not request.fences, "a fenced sequence was suspended")
    request.is_suspended, request.num_written = True, request.length
    for promise in driver.promises:
        promise.is_over |= promise.request is request
    if has_places(driver.cache):
        request.started_at = request.length  # older states are not copied
    request.version += 1


def resume_one(driver: Driver) -> None:
    resume(driver, driver.pick(lambda one: one.is_suspended))


def resume(driver: Driver, request: Request) -> None:
    before, settings = request.length, {}
    if driver.chance(0.2):
        settings["capacity"] = min(before + driver.between(0, 4), driver.longest)
    if driver.chance(0.2):
        settings["reserve"] = min(before + driver.between(0, 16), driver.longest)
    lost = driver.attempt(
        f"#{request.number}.resume({settings})", lambda: request.handle.resume(**settings), RetryLater, NeverFits
    )
    driver.log[-1] += f" -> {lost} lost of {before}"
    request.is_suspended = False
    if prompt_length(request.handle) != request.prompt_length:  # the prompt ends at what was committed
        driver.documents.add(request.tokens[: request.prompt_length].copy(), request.media)
        driver.counts["prompts ended by resume"] += 1
        request.cut(before, before)
        request.prompt_length = prompt_length(request.handle)
    if lost:
        request.length = request.num_written = request.started_at = before - lost
        request.forget_behind(request.length)
        request.highest, request.is_blank = request.length, request.length == 0
    request.highest = max(request.highest, request.length)
    if "reserve" in settings:
        request.reserve = max(before, settings["reserve"])
    driver.right_length(request.handle, request)
    if lost:
        compute_lacking(driver, request)
    if request.handle.capacity > request.length:
        look(driver, request)


def close_one(driver: Driver) -> None:
    close(driver, driver.pick(lambda one: not one.is_closed))


def close(driver: Driver, request: Request) -> None:
    driver.attempt(f"#{request.number}.close() at {request.length}", request.handle.close)
    request.is_closed = True
    del driver.requests[request.handle]
    driver.require(not request.handle.is_open, f"{request} is open after close")
    if request.fences:
        driver.lingering.add(request)
    if driver.chance(0.4):
        driver.documents.keep(request)
    if driver.chance(0.1):
        for call in (request.handle.close, request.handle.resume, lambda: request.handle.extend(1)):
            driver.attempt(f"call of #{request.number}, which is closed", call_raises(call), may_fail=False)


def call_raises(call: Any) -> Any:
    """Return a function that makes ``call``, which must raise StaleHandle."""

    def checked() -> None:
        try:
            call()
        except StaleHandle:
            return
        raise Fault("a closed sequence took a call")

    return checked


def count_openings(driver: Driver) -> int:
    """Return how many requests of one token can be open at once in the empty cache."""
    handles = []
    try:
        for token in range(driver.settings.max_requests):
            handles.append(driver.cache.open([50 + token]))
    except RetryLater:
        pass
    for handle in handles:
        handle.close()
    driver.cache.reset()
    return len(handles)


def drain(driver: Driver) -> None:
    """Close and reset everything: then all memory must be free, and as many requests must open as at first."""
    if driver.num_fences:
        raise Refused("fenced")
    memory_fails, driver.memory_fails = driver.memory_fails, 0.0
    for request in [*driver.requests.values()]:
        close(driver, request)
    for pin in driver.pins:
        driver.cache.unpin(pin)
    for prefetch, _ in driver.prefetches:
        prefetch.close()
    driver.pins, driver.prefetches, driver.together = [], [], []
    driver.attempt("reset() when nothing runs", driver.cache.reset)
    driver.require(driver.cache.flush(), "flush() gave up")
    driver.check()
    stats = driver.cache.stats()
    left = [group for group in stats.groups if group.free != group.total or group.outstanding]
    driver.require(not left and not stats.swap_nbytes, f"something is held when all is forgotten: {left}, {stats}")
    deadline = monotonic() + 10
    while any(staging := staging_in_use(driver.cache)) and monotonic() < deadline:
        sleep(0.001)  # a closed prefetch frees its staging records when its reads end
    driver.require(not any(staging), f"{staging} staging records of the tiers are lost")
    openings = count_openings(driver)
    driver.require(openings == driver.most_open, f"{openings} requests can be opened, {driver.most_open} at first")
    driver.memory_fails = memory_fails


def restart(driver: Driver) -> None:
    """Close the cache as it is, and make another over the same folder, with the same weights or others."""
    if driver.num_fences:
        raise Refused("fenced")
    driver.log.append(f"restart over {driver.settings.tiers} tiers")
    driver.count_cache()
    driver.cache.close()
    for request in driver.requests.values():
        driver.require(not request.handle.is_open, f"{request} is open in a closed cache")
    for prefetch, _ in driver.prefetches:
        prefetch.close()
    try:
        driver.cache.open([1])
    except StaleHandle:
        pass
    else:
        raise Fault("a closed cache opened a request")
    driver.weights = driver.one("w", "w", "w", "x")
    driver.start()


OPERATIONS = {
    "open": (14.0, open_one),
    "open prefetched": (3.0, open_prefetched),
    "open after prefetch": (0.5, open_twice),
    "crowd": (1.5, crowd),
    "fork": (4.0, fork_one),
    "rewind": (4.0, rewind_one),
    "extend": (3.0, extend_one),
    "suspend": (3.0, suspend_one),
    "resume": (6.0, resume_one),
    "close": (8.0, close_one),
    "drain": (0.3, drain),
    "restart": (0.25, restart),
}
