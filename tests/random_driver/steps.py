"""Operations: steps of fresh and of persistent batches, and fences around steps in flight."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpagoda.errors import BadInput, StaleHandle

from .caches import is_suspended
from .faults import Fault, Refused
from .life import begin, close, crowd, make_room, open_one, resume, suspend
from .oracle import DIALECTS, Shown, StepTexts, left_states
from .texts import Request, Tokens

if TYPE_CHECKING:
    from .driver import Driver


def compute(driver: Driver, batch: Any, requests: list[Request], news: list[Tokens], num_rows: int) -> StepTexts:
    """Do what an engine does in a step: read and compare the rows of earlier tokens, and write those of new tokens."""
    before = StepTexts(requests, [len(new) for new in news], [()] * len(requests))
    for shown in driver.oracle.shown(batch, before, driver.one(*DIALECTS)):
        shown.verify(requests)
    step = StepTexts(requests, [len(new) for new in news], news)
    if driver.chance(0.3):
        driver.oracle.check_arrays(batch, step, num_rows)
    driver.oracle.write(batch, step)
    for request in requests:
        request.left.clear()
    for row, position, _ in left_states(batch):
        requests[row].left.add(position)
        driver.counts["states left in a step"] += 1
    if driver.chance(0.3):
        for shown in driver.oracle.shown(batch, step, driver.one(*DIALECTS), new=True):
            shown.verify(requests)
    return step


def commit(driver: Driver, request: Request, count: int) -> None:
    """Commit the next ``count`` tokens that were written."""
    tokens = request.tokens[request.length : request.length + count]
    given: Any = tokens.tolist() if driver.chance(0.3) else tokens.copy()
    asked, end = {*request.handle.step_checkpoints}, request.length + count
    left = [one for one in sorted(asked & request.left) if one <= end and driver.chance(0.8)]
    named = {"checkpoints": left} if left or driver.chance(0.2) else {}
    driver.attempt(
        f"#{request.number}.commit({tokens.tolist()}, {left}) at {request.length}",
        lambda: request.handle.commit(given, **named),
    )
    request.length += count
    driver.right_length(request.handle, request)


def wanted_tokens(driver: Driver, request: Request) -> Tokens:
    """Return the tokens that the next step of ``request`` computes: part of its prompt, or a few tokens after it."""
    length, most = request.length, driver.settings.step_tokens
    n = driver.one(1, 1, driver.between(1, most), most)
    if request.prompt_length > length + 1:
        n = driver.one(n, most, min(most, request.prompt_length - length))
        if driver.chance(0.7):
            n = min(n, driver.cache.step_limit(request.handle))
    n = min(n, driver.longest - length)
    if n < 1:
        raise Refused("at its longest")
    return request.next_tokens(n, driver.documents.after(max(length, request.prompt_length), n))


def step(driver: Driver) -> None:
    """Make a step of some requests, and commit its tokens, mostly at once and all of them."""
    requests, news = begin_step(driver, driver.between(1, 4))
    finish_step(driver, requests, news)


def begin_step(driver: Driver, most: int, running: list[Request] | None = None) -> tuple[list[Request], list[Tokens]]:
    """Make room for a step of up to ``most`` of the ``running`` requests (None: of all); compute it. Raises Refused."""
    requests, news = [], []
    if running is None:
        running = [request for request in driver.requests.values() if request.is_running]
        driver.random.shuffle(running)  # type: ignore[arg-type]
    for request in running[:most]:
        try:
            new = wanted_tokens(driver, request)
            if request.handle.capacity < request.length + len(new) or driver.chance(0.2):
                make_room(driver, [request], len(new))
        except Refused:
            if request.length > 40 and driver.chance(0.5) and not driver.num_fences:
                close(driver, request)
            continue
        requests.append(request)
        news.append(new)
    if not requests:
        raise Refused("nobody could go on")
    num_rows = len(requests) + driver.one(0, 0, 1, 3)
    counts = [len(new) for new in news]
    line = f"step of {[(request.number, n) for request, n in zip(requests, counts)]} in {num_rows} rows"
    batch = driver.attempt(
        line, lambda: driver.cache.batch([one.handle for one in requests], counts, num_rows), may_fail=False
    )
    compute(driver, batch, requests, news, num_rows)
    return requests, news


def finish_step(driver: Driver, requests: list[Request], news: list[Tokens]) -> None:
    """Commit the tokens that a step wrote for each request, mostly all of them."""
    for request, new in zip(requests, news):
        draft = min(len(new), driver.draft_width)
        left = driver.between(0, draft) if draft and driver.chance(0.2) else 0
        if len(new) > left or driver.chance(0.3):
            at_last(partial(commit, driver, request, len(new) - left))


def at_last(call: Callable[[], None]) -> None:
    """Repeat ``call`` until memory does not fail in it: what was written must be committed."""
    while True:
        try:
            return call()
        except Refused:
            continue


def commit_draft(driver: Driver) -> None:
    """Commit some of the tokens that an earlier step wrote, or none of them."""
    request = driver.pick(lambda one: one.is_running and one.num_written > one.length)
    commit(driver, request, driver.between(0, request.num_written - request.length))


def commit_nothing(driver: Driver) -> None:
    commit(driver, driver.pick(), 0)


# -- persistent batches ------------------------------------------------------------------------------------------------


def members_of(driver: Driver, together: Any) -> list[Request]:
    """Return the requests of a persistent batch, row by row. None of them may be closed."""
    return [driver.requests[handle] for handle in together.sequences]


def change_members(driver: Driver) -> None:
    """Make a persistent batch, or let a request join or leave one."""
    if len(driver.together) < 2 and driver.chance(0.3):
        rows = driver.between(1, 5)
        width = driver.one(
            None, None, 1, min(1 + driver.draft_width, driver.settings.step_tokens), most_together(driver)
        )
        line = f"persistent_batch({rows}, tokens_per_row={width})"
        driver.together.append(
            driver.attempt(line, lambda: driver.cache.persistent_batch((), rows, tokens_per_row=width))
        )
    if not driver.together:
        raise Refused("there is no persistent batch")
    together = driver.one(*driver.together)
    members = [*together.sequences]
    if members and driver.chance(0.2):
        handle = driver.one(*members)
        number = driver.requests[handle].number if handle in driver.requests else "closed"
        driver.attempt(f"remove(#{number}) from a persistent batch", lambda: together.remove(handle), may_fail=False)
        return
    request = driver.pick(
        lambda one: one.is_running and one.length >= one.prompt_length - 1 and one.handle not in members
    )
    driver.attempt(
        f"add(#{request.number}) to a persistent batch of {len(members)}", lambda: together.add(request.handle),
        *([BadInput] if len(members) == together.num_rows else []), may_fail=False,
    )  # fmt: skip


def most_together(driver: Driver) -> int:
    """Return the most tokens that a persistent batch computes of each request in a step: mostly several blocks."""
    return 2 * driver.settings.step_tokens


def step_some_together(driver: Driver) -> None:
    if not driver.together:
        raise Refused("there is no persistent batch")
    step_together(driver, driver.one(*driver.together))


def step_together(driver: Driver, together: Any) -> None:
    """Make steps of a persistent batch: one token of each request, or several of which some are committed."""
    closed = [handle for handle in together.sequences if not driver.requests.get(handle)]
    suspended = [handle for handle in together.sequences if is_suspended(handle)]
    if closed or suspended:
        step_of_some_gone(driver, together, closed + suspended)
        return
    for _ in range(driver.one(1, 1, 2, 5)):
        requests = members_of(driver, together)
        drafted = min(1 + driver.draft_width, driver.settings.step_tokens)
        n = together.tokens_per_row or driver.one(1, 1, 1, drafted, driver.between(1, most_together(driver)))
        if not requests:
            raise Refused("nobody is in it")
        if max(request.length for request in requests) + n > driver.longest:
            close(driver, max(requests, key=lambda request: request.length))
            return
        line = f"step of {n} together: {[request.number for request in requests]}"
        batch = make_room(driver, requests, n, partial(together.extend, n), line)
        afters = [driver.documents.after(max(one.length, one.prompt_length), n) for one in requests]
        news = [request.next_tokens(n, after) for request, after in zip(requests, afters)]
        compute(driver, batch, requests, news, together.num_rows)
        with ExitStack() as stack:
            if driver.chance(0.1):
                fenced = [request for request in requests if driver.chance(0.5)]
                stack.enter_context(driver.cache.fence([request.handle for request in fenced]))
            if driver.chance(0.3):
                counts = [driver.between(max(0, n - driver.draft_width), n) for _ in requests]
                commit_of_each(driver, together, requests, news, counts)
                continue
            first = n - driver.draft_width  # states cannot rewind these: they are committed at once
            if first > 1:
                commit_of_each(driver, together, requests, news, [first] * len(requests))
            for i in range(first if first > 1 else 0, driver.between(max(1, first), n)):
                tokens = [int(new[i]) for new in news]
                line = f"commit({tokens}) together"
                at_last(partial(driver.attempt, line, partial(together.commit, tokens)))
                for request in requests:
                    request.length += 1
                    driver.right_length(request.handle, request)


def commit_of_each(
    driver: Driver, together: Any, requests: list[Request], news: list[Tokens], counts: list[int]
) -> None:
    """Commit the first ``counts[i]`` of the new tokens of each request, in one call."""
    tokens = np.concatenate([new[:count] for new, count in zip(news, counts)])
    line = f"commit({tokens.tolist()}, {counts}) together"
    at_last(partial(driver.attempt, line, partial(together.commit, tokens, counts)))
    for request, count in zip(requests, counts):
        request.length += count
        driver.right_length(request.handle, request)


def step_of_some_gone(driver: Driver, together: Any, gone: list[Any]) -> None:
    """Closed members must be removed, and suspended ones removed or resumed; until then a step is refused."""
    if not driver.chance(0.4):
        try:
            driver.attempt("step together with some gone", together.extend, StaleHandle, may_fail=False)
        except Refused:
            pass
        else:
            raise Fault("a persistent batch stepped with a sequence that is closed or suspended")
    leaving = [handle for handle in gone if not handle.is_open or driver.chance(0.3)]
    if leaving:
        driver.attempt("remove who is gone", lambda: together.remove(*leaving), may_fail=False)


def set_aside(driver: Driver) -> None:
    """Suspend a request, let others take its memory, and resume it: in another slot, or without evicted blocks."""
    together = [one for one in driver.together if one.sequences and driver.chance(0.6)]
    if together:
        step_together(driver, together[0])
        request = driver.pick(lambda one: one.is_running and one.handle in together[0].sequences)
    else:
        tokens, media = driver.documents.one()
        if not len(tokens):
            raise Refused("an empty text is not opened here")
        request = begin(driver, tokens, media, None, capacity=0)
        finish_step(driver, *begin_step(driver, 1, [request]))
    suspend(driver, request, driver.chance(0.5 if together else 0.1))
    for _ in range(driver.between(1, 3)):
        with suppress(Refused):
            open_one(driver)
        if driver.chance(0.4):
            driver.operate()
    if driver.chance(0.5):
        crowd(driver)
    if request.is_suspended and request.handle in driver.requests:
        resume(driver, request)
        if together:
            step_together(driver, together[0])
        for _ in range(driver.between(0, 4)):
            if request.handle in driver.requests:  # a step that found no room may have closed it
                finish_step(driver, *begin_step(driver, 1, [request]))
        if request.handle in driver.requests and driver.chance(0.5):
            close(driver, request)


# -- fences --------------------------------------------------------------------------------------------------------------


def fence(driver: Driver) -> None:
    """Fence a step in flight: whatever happens inside the fence, the rows that it reads and writes do not change."""
    if driver.num_fences > 1:
        raise Refused("fenced twice already")
    fenced, news = begin_step(driver, 2) if driver.chance(0.8) else ([driver.pick()], [])
    kept, versions = in_flight(driver, fenced), [request.version for request in fenced]
    driver.log.append(f"fence({[request.number for request in fenced]}) begins")
    driver.num_fences += 1
    with driver.cache.fence([request.handle for request in fenced]):
        for request in fenced:
            request.fences += 1
        if news:
            finish_step(driver, [one for one in fenced if one.is_running], news)
        for request in fenced:
            if request.handle in driver.requests and driver.chance(0.3):
                close(driver, request)
        for _ in range(driver.between(0, 6)):
            driver.operate()
        same = np.array([request.version == version for request, version in zip(fenced, versions)])
        for shown in kept:
            shown.verify(fenced, same[shown.rows])
        for request in fenced:
            request.fences -= 1
        driver.lingering -= {request for request in fenced if not request.fences}
        driver.num_fences -= 1
        driver.log.append(f"fence({[request.number for request in fenced]}) ends")
    driver.check()


def in_flight(driver: Driver, requests: list[Request]) -> list[Shown]:
    """Return the rows that the step in flight of ``requests`` reads and writes."""
    requests = [request for request in requests if request.num_written > request.length]
    if not requests:
        return []
    counts = [request.num_written - request.length for request in requests]
    batch = driver.cache.batch([request.handle for request in requests], counts)
    for request in requests:
        request.left.clear()  # this batch names other places
    texts = StepTexts(requests, counts, [()] * len(requests))
    return driver.oracle.shown(batch, texts, driver.one(*DIALECTS), new=True)


def fence_closed(driver: Driver) -> None:
    """Fence a sequence that is closed: this is refused, and no sequence is fenced."""
    request, closed = driver.pick(), driver.pick()
    if request is closed or closed.fences:
        raise Refused("one suits alone")
    close(driver, closed)

    def fenced() -> None:
        with driver.cache.fence([request.handle, closed.handle]):
            raise Fault("a closed sequence was fenced")

    line = f"fence([#{request.number}, #{closed.number}, which is closed])"
    with suppress(Refused):
        driver.attempt(line, fenced, StaleHandle, may_fail=False)


OPERATIONS = {
    "step": (30.0, step),
    "commit a draft": (3.0, commit_draft),
    "commit nothing": (0.7, commit_nothing),
    "change members": (6.0, change_members),
    "step together": (8.0, step_some_together),
    "set aside": (3.0, set_aside),
    "fence": (3.0, fence),
    "fence closed": (0.4, fence_closed),
}
