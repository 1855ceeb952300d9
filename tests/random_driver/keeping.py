"""Operations: pins, hints, invalidation, reset, sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvpagoda.core.cache.outcome import ANSWERS, ENDS
from kvpagoda.errors import Asleep, OutOfBlocks, RetryLater

from .faults import Fault, Refused
from .texts import NAMESPACES, Request, Tokens

if TYPE_CHECKING:
    from .driver import Driver


def pin(driver: Driver) -> None:
    if driver.requests and driver.chance(0.4):
        request = driver.pick(lambda one: one.length > 0)
        tokens, namespace = request.text.copy(), request.namespace
        media = {at: digest for at, digest in request.media.items() if at < len(tokens)}
    else:
        (tokens, media), namespace = driver.documents.one(), driver.one(None, None, *NAMESPACES)
    line = f"pin({tokens.tolist()}, {namespace!r}, media={media})"
    driver.pins.append(driver.attempt(line, lambda: driver.cache.pin(tokens, namespace, media=media), OutOfBlocks))
    driver.check()


def unpin(driver: Driver) -> None:
    """Unpin a pin, perhaps one that the cache has released or that was unpinned before."""
    if not driver.pins:
        raise Refused("there are no pins")
    pin = driver.one(*driver.pins)
    driver.attempt(f"unpin, held: {pin.is_held}", lambda: driver.cache.unpin(pin))
    driver.require(not pin.is_held, "a pin is held after unpin")
    if driver.chance(0.8):
        driver.pins.remove(pin)


def envelope(driver: Driver) -> dict[str, Any]:
    """Return a few hints, some of them wrong, about texts of this driver and sessions."""
    actions = []
    for number in range(driver.one(1, 2, 4)):
        payload: dict[str, Any] = {
            "session_id": driver.one("a", "b", "c"),
            "event": driver.one("begin", "continue", "end"),
        }
        if driver.chance(0.6):
            payload["token_ids"] = driver.documents.prompt()[0].tolist()
        kind = driver.one("retain", "retain", "pin", "release", "demote", "session", "checkpoint", "x")
        payload |= driver.one(
            {}, {"seconds": 1e-4}, {"seconds": 60, "priority": 90}, {"range": [0, 9]}, {"answer": {"priority": 0}},
            {"discard": True}, {"tier": "none"}, {"positions": [5, 9]}, {"seconds": -1}, {"promise": "0"},
        )  # fmt: skip
        actions.append(
            {"action_id": str(number), "action_type": f"kv.{kind}", "action_version": "1.0", "payload": payload}
        )
    return {"message_id": "m", "actions": actions}


def hint(driver: Driver) -> None:
    """Apply hints. Each is answered, and nothing else happens that a request could see."""
    hints, namespace = envelope(driver), driver.one(None, None, *NAMESPACES)
    answers = driver.attempt(f"apply({hints}, {namespace!r})", lambda: driver.cache.apply(hints, namespace))
    driver.require(len(answers) == len(hints["actions"]), f"{len(answers)} answers")
    driver.require({one.status for one in answers} <= {*ANSWERS}, f"answers {answers}")
    if driver.chance(0.5):
        driver.require({one.status for one in driver.cache.hints.ended()} <= {*ANSWERS, *ENDS}, "an unknown end")
    driver.check()


def invalidate(driver: Driver) -> None:
    namespaces = tuple(one for one in NAMESPACES if driver.chance(0.3))
    weights = driver.one(None, "w", "x") if not namespaces else None
    if weights is None:
        driver.attempt(f"invalidate{namespaces}", lambda: driver.cache.invalidate(*namespaces))
    else:
        driver.attempt(f"invalidate(weights={weights!r})", lambda: driver.cache.invalidate(weights=weights))
        driver.weights = weights
    driver.epochs.renew(namespaces, weights)
    for request in driver.requests.values():
        if (seed := driver.epochs.seed(request.namespace)) != request.seeds[-1][1]:
            request.enter(seed)


def reset(driver: Driver) -> None:
    """Reset the cache. While anything is open, this is refused, and pins must hold what they held."""
    is_open = driver.requests or driver.lingering
    held = [pin.is_held for pin in driver.pins]
    try:
        driver.attempt("reset()", driver.cache.reset, *([RetryLater] if is_open else []))
    except Refused:
        after = [pin.is_held for pin in driver.pins]
        driver.require(held == after, f"reset() raised, but {held.count(True) - after.count(True)} pins were given up")
        raise
    if is_open:
        raise Fault("reset() forgot what a request uses")


def sleep(driver: Driver) -> None:
    """Put the cache to sleep and wake it. Meanwhile a request may be closed, and weights may change."""
    keep, nbytes = driver.one("nothing", "tree"), driver.one(None, None, 1, 2048)
    driver.attempt(
        f"sleep({keep!r}, nbytes={nbytes})", lambda: driver.cache.sleep(keep, nbytes=nbytes),
        *([RetryLater] if driver.num_fences else []),
    )  # fmt: skip
    driver.require(not any(one.fences for one in driver.requests.values()), "a cache with fences sleeps")
    tokens, media = driver.documents.prompt()
    for call in (lambda: driver.cache.open(tokens), lambda: driver.cache.batch([], []), driver.cache.flush):
        try:
            call()
        except Asleep:
            continue
        raise Fault("a sleeping cache took a call")
    driver.cache.lookup(tokens, media=media)
    driver.cache.check()
    ended = None
    if driver.requests and driver.chance(0.3):
        ended = driver.pick(lambda one: not one.is_closed)
        driver.log.append(f"#{ended.number}.close() at {ended.length}, asleep")
        ended.handle.close()
        ended.is_closed = True
        del driver.requests[ended.handle]
    if driver.chance(0.2):
        invalidate(driver)
    driver.attempt("wake()", driver.cache.wake, may_fail=False)
    driver.check()
    if not driver.num_fences:
        driver.audit()


def should_wait(driver: Driver) -> None:
    """Ask whether a prompt should wait: only for a request that runs and has not computed all that they have in common."""
    if driver.requests and driver.chance(0.7):
        other = driver.pick(lambda one: len(one.tokens) > 0)
        tokens, media, namespace = other.tokens[: driver.between(1, len(other.tokens))], other.media, other.namespace
        tail = driver.documents.after(len(tokens), driver.between(0, 9))
        tokens, media = np.concatenate((tokens, tail)), {at: one for at, one in media.items() if at < len(tokens)}
    else:
        (tokens, media), namespace = driver.documents.prompt(), driver.one(None, *NAMESPACES)
    line = f"should_wait({tokens.tolist()}, {namespace!r}, media={media})"
    waits = driver.attempt(line, lambda: driver.cache.should_wait(tokens, namespace, media=media))
    driver.log[-1] += f" -> {waits}"
    driver.require(not waits or any(_is_ahead(driver, one, tokens, media) for one in driver.requests.values()), line)
    driver.counts["prompts that wait"] += waits
    driver.check()


def _is_ahead(driver: Driver, request: Request, tokens: Tokens, media: dict[int, bytes]) -> bool:
    """Return whether ``request`` is to compute a block of its prompt that ``tokens`` with ``media`` have, too."""
    size, end = driver.settings.block_size, min(len(tokens) - 1, request.prompt_length)
    same = request.tokens[:end] == tokens[:end]
    same &= np.array([request.media.get(at) == media.get(at) for at in range(end)], np.bool_)
    return request.is_running and request.length < (end if same.all() else int(same.argmin())) // size * size


OPERATIONS = {
    "should wait": (2.0, should_wait),
    "sleep": (0.8, sleep),
    "pin": (2.5, pin),
    "hint": (1.0, hint),
    "unpin": (1.5, unpin),
    "invalidate": (0.3, invalidate),
    "reset": (0.8, reset),
}
