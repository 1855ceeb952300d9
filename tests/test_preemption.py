"""Which requests run and which wait: each one ends, the oldest is never preempted, and nothing is held afterwards."""

from __future__ import annotations

import doctest
import functools
import random
from collections.abc import Sequence as Many

import numpy as np
import pytest

from kvpagoda import KVCache, Limits, Retention
from kvpagoda.core import scheduling
from kvpagoda.core.cache.sequence import Sequence
from kvpagoda.errors import OutOfBlocks, RetryLater
from kvpagoda.scheduling import (
    Costs,
    Job,
    LeastComputed,
    PreemptionMode,
    PreemptionPolicy,
    RunQueue,
    Youngest,
    cheapest,
)
from kvpagoda.schema import Attention, Growth, Layer, LayerKind, Recurrent, Rows, Schema

FULL = Attention(1, 4, 4, "float32")
WINDOW = Attention(1, 4, 4, "float32", Growth(window=5))
STATE = Recurrent((Rows("state", (4,), "float32"),))


def schema_of(*kinds: LayerKind) -> Schema:
    return Schema(tuple(Layer(i, type(kind).__name__, (kind,)) for i, kind in enumerate(kinds)), "test")


SCHEMAS = {
    "full": schema_of(FULL),
    "window": schema_of(FULL, WINDOW),
    "windows only": schema_of(WINDOW),
    "state": schema_of(FULL, STATE),
    "mixed": schema_of(FULL, WINDOW, STATE),
}
CHUNK, BLOCK = 2, 2


@functools.cache
def books_of(name: str, num_blocks: int) -> KVCache:
    """Return a cache without memory. It is used again, because every mix leaves it empty."""
    return KVCache(
        SCHEMAS[name], num_blocks=num_blocks, max_requests=4, block_size=BLOCK, device="none",
        limits=Limits(step_tokens=CHUNK), retention=Retention(num_blocks % 4),
    )  # fmt: skip


def books_with(num_blocks: int, max_requests: int = 4) -> KVCache:
    return KVCache(SCHEMAS["full"], num_blocks=num_blocks, max_requests=max_requests, block_size=BLOCK, device="none")


def entered(queue: RunQueue[Job], *sizes: tuple[int, int]) -> list[Job]:
    """Enter and admit jobs of (prompt, total) tokens, with different prompts, and return them."""
    jobs = [Job(np.full(prompt, 10 + i, np.int32), total) for i, (prompt, total) in enumerate(sizes)]
    for job in jobs:
        queue.enter(job)
    queue.admit()
    return jobs


def compute(queue: RunQueue[Job], job: Job, n: int) -> None:
    """Make room for ``n`` tokens of ``job`` and commit them."""
    assert job.sequence is not None and queue.make_room(job, n)
    job.sequence.commit(job.text[job.sequence.length :][:n])


def test_without_a_policy_everything_is_reserved_and_no_request_is_preempted() -> None:
    queue: RunQueue[Job] = RunQueue(books_with(8))
    first, second, third = entered(queue, (2, 8), (2, 8), (2, 4))
    assert queue.running == [first, second] and queue.waiting == [third]
    queue.remove(first)
    queue.admit()
    assert queue.running == [second, third] and queue.num_preempted == 0


def test_with_a_policy_the_youngest_is_preempted_and_resumes_first() -> None:
    queue: RunQueue[Job] = RunQueue(books_with(7), Youngest())
    first, second, third, fourth = entered(queue, (4, 14), (4, 12), (2, 4), (2, 4))
    assert queue.running == [first, second] and queue.waiting == [third, fourth]
    compute(queue, first, 4)
    compute(queue, second, 4)
    first.extend([1] * 8)
    compute(queue, first, 8)  # six blocks of seven
    assert queue.running == [first] and queue.waiting == [second, third, fourth] and second.num_preempted == 1
    queue.admit()
    assert queue.running == [first]
    queue.remove(first)
    queue.admit()  # six of the seven blocks are reserved for it now
    assert queue.running == [second] and queue.waiting == [third, fourth] and second.sequence is not None
    assert second.sequence.cached_tokens == 2  # its first block was still cached; the second was evicted
    queue.cache.check()


def test_the_youngest_preempts_itself_and_the_only_request_raises() -> None:
    queue: RunQueue[Job] = RunQueue(books_with(5), Youngest())
    first, second = entered(queue, (4, 8), (2, 8))
    second.extend([1] * 4)
    assert not queue.make_room(second, 6)
    assert queue.running == [first] and queue.waiting == [second] and first.num_preempted == 0
    others = [queue.cache.open([1, 2]), queue.cache.open([3, 4])]  # requests outside the queue hold blocks and slots
    with pytest.raises(OutOfBlocks):
        queue.make_room(first, 8)
    queue.remove(first)
    with pytest.raises(RetryLater):
        queue.admit()
    for other in others:
        other.close()
    queue.admit()
    assert queue.running == [second]


def test_the_request_that_computed_least_is_preempted() -> None:
    queue: RunQueue[Job] = RunQueue(books_with(8), LeastComputed())
    first, second, third = entered(queue, (2, 12), (2, 4), (4, 6))
    compute(queue, second, 1)
    compute(queue, third, 4)
    compute(queue, first, 2)
    first.extend([1] * 6)
    compute(queue, first, 6)
    assert queue.running == [first, third] and queue.waiting == [second]


def test_a_fork_without_room_waits_in_its_place() -> None:
    queue: RunQueue[Job] = RunQueue(books_with(12, max_requests=2))
    source, fork = Job(np.full(4, 1, np.int32), 8), Job(np.full(4, 1, np.int32), 8)
    queue.enter(source, fork)
    entered(queue, (2, 4), (2, 4))
    assert fork.number == 1 and fork not in queue.waiting
    compute(queue, source, 4)
    queue.fork(source, fork)  # no slot is free
    assert queue.waiting[0] is fork and fork.sequence is None
    queue.remove(queue.running[1])
    queue.admit()
    assert queue.running == [source, fork] and fork.sequence is not None and fork.sequence.cached_tokens == 3
    for job in (source, fork, fork, *queue.waiting):
        queue.remove(job)
    assert not queue.running and queue.cache.stats().running == 0


class Watched:
    """A policy that asserts, before another one chooses, that all candidates are younger than the request in need."""

    def __init__(self, policy: PreemptionPolicy) -> None:
        self.policy, self.queue = policy, None

    def victim(self, candidates: Many[Sequence]) -> Sequence:
        running = [job.sequence for job in self.queue.running]
        assert candidates and list(candidates) == running[-len(candidates) :] != running  # younger than the one in need
        return self.policy.victim(candidates)


def run_mix(seed: int) -> tuple[int, int, int]:
    """Run 2 to 6 requests, some with a shared prefix, that together need 1 to 4 times the pool. Returns (steps,
    preemptions, preemptions that suspended)."""
    ways, source = random.Random(seed), random.Random(seed)
    name = source.choice(list(SCHEMAS))
    sizes = [(source.randint(1, 4), source.randint(2, 8)) for _ in range(source.randint(2, 6))]
    wanted = sum(-(-(prompt + new) // BLOCK) for prompt, new in sizes)
    most = max(-(-(prompt + new) // BLOCK) for prompt, new in sizes)
    books = books_of(name, max(most, int(wanted / source.uniform(1, 4))))
    policy = Watched(source.choice([Youngest(), LeastComputed()]))
    queue: RunQueue[Job] = RunQueue(books, policy, lambda costs: ways.choice([cheapest(costs), *PreemptionMode]))
    queue.rate.add(0.5, 1)
    policy.queue = queue
    jobs = [Job(np.arange(prompt, dtype=np.int32) % source.choice([3, 100]), prompt + new) for prompt, new in sizes]
    steps, arriving = 0, list(jobs)
    alone = sum(-(-prompt // CHUNK) + new + 1 for prompt, new in sizes)  # steps if they ran one after another
    while arriving or queue.waiting or queue.running:
        while arriving and (source.random() < 0.7 or not (queue.waiting or queue.running)):
            queue.enter(arriving.pop(0))
        queue.admit()
        steps += 1
        assert queue.running and steps <= alone
        oldest = queue.running[0]
        assert [job.number for job in queue.running] == sorted(job.number for job in queue.running)
        for job in list(queue.running):
            if job.sequence is None:
                continue
            begin = job.sequence.length
            stop = min(len(job.text), job.sequence.length + books.step_limit(job.sequence))
            tokens = job.text[begin : min(begin + CHUNK, stop)]
            if queue.make_room(job, len(tokens)):
                job.sequence.commit(tokens)
                if job.sequence.length == len(job.text):
                    job.extend([source.randint(0, 2)])
                    if len(job.text) == job.total:
                        queue.remove(job)
        assert oldest.sequence is not None or len(oldest.text) == oldest.total  # it ran on, and was not preempted
    books.check()
    stats = books.stats()
    assert stats.running == stats.suspended == 0 and all(
        g.free + g.evictable == g.total and not g.outstanding for g in stats.groups
    )
    books.reset()
    assert all(group.free == group.total for group in books.stats().groups)
    return steps, queue.num_preempted, queue.num_swapped


@pytest.mark.parametrize("part", [*range(8), *(pytest.param(part, marks=pytest.mark.slow) for part in range(8, 40))])
def test_every_request_of_ten_thousand_random_mixes_ends(part: int) -> None:
    """Without ``-m slow``, two thousand of them run."""
    _, preempted, swapped = map(sum, zip(*(run_mix(seed) for seed in range(part * 250, part * 250 + 250))))
    assert preempted > 50 and swapped > 20


def test_the_cheapest_mode_is_chosen_and_of_equals_the_one_that_moves_least() -> None:
    assert (
        cheapest(Costs(2.0, 1.0, 3.0)) is PreemptionMode.PART and cheapest(Costs(2.0, 2.0, 1.0)) is PreemptionMode.SWAP
    )
    assert (
        cheapest(Costs(0.0, 0.0, 0.0)) is PreemptionMode.RECOMPUTE
        and cheapest(Costs(1.0, 0.5, 0.5)) is PreemptionMode.PART
    )


def costs_with(num_blocks: int, name: str = "full", total: int = 14) -> Costs:
    """Return the costs of preempting a job with five of its six tokens computed, at a second for each token and for
    each byte, while another job of ``total`` tokens runs."""
    cache = KVCache(
        SCHEMAS[name], num_blocks=num_blocks, max_requests=2, block_size=BLOCK, device="none",
        limits=Limits(step_tokens=CHUNK),
    )  # fmt: skip
    queue: RunQueue[Job] = RunQueue(cache, Youngest())
    _, second = entered(queue, (4, total), (6, 8))
    compute(queue, second, 4)
    compute(queue, second, 1)
    queue.rate.add(1e9, 10**9)
    queue.cache.core.swap.rate.add(1e9, 10**9)
    return queue.costs(second)


def test_the_costs_of_preempting() -> None:
    row = SCHEMAS["full"].plan(num_blocks=8, block_size=BLOCK).groups[0].row_nbytes
    near = functools.partial(pytest.approx, rel=1e-3)
    # no published block is evicted: compute the last token, or move the last block out and in, or three out and one in
    roomy = costs_with(20)
    assert (roomy.recompute, roomy.part, roomy.swap) == (near(1), near(2 * row), near(4 * row))
    tight = costs_with(8)  # the other job needs seven of eight blocks: one of the two published blocks is evicted
    assert (tight.recompute, tight.part, tight.swap) == (near(3), near(2 * row + 3), near(5 * row))
    state = costs_with(20, "state")  # and without a checkpoint everything is computed again
    assert state.recompute == near(1) and costs_with(8, "state").recompute == near(5)


def test_requests_that_do_not_fit_in_the_swap_recompute_and_others_resume_by_age() -> None:
    row = SCHEMAS["full"].plan(num_blocks=9, block_size=BLOCK).groups[0].row_nbytes
    cache = KVCache(
        SCHEMAS["full"], num_blocks=9, max_requests=4, block_size=BLOCK, device="none", limits=Limits(swap=3 * row)
    )
    queue: RunQueue[Job] = RunQueue(cache, Youngest(), lambda costs: PreemptionMode.SWAP)
    jobs = first, second, third = entered(queue, (4, 18), (4, 6), (4, 6))
    for job in jobs:
        compute(queue, job, 4)
    for job in (third, second):
        queue.preempt(job)
    assert (
        queue.num_swapped == 1 and third.suspended is not None and second.suspended is None and queue.running == [first]
    )
    queue.admit()
    assert queue.running == [first, second, third] and third.suspended is None
    assert third.sequence is not None and third.sequence.length == 4
    for job in jobs:
        queue.remove(job)
    queue.cache.check()


def test_the_examples_run() -> None:
    tried = doctest.testmod(scheduling)
    assert tried.attempted and not tried.failed
