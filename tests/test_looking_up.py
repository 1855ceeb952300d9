"""Lookup without admission, requests that only read or only publish, epochs, the hit grid, and the ends of steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvpagoda import KVCache, Limits, Namespace, Retention
from kvpagoda.errors import BadInput
from kvpagoda.scheduling import Job, RunQueue
from kvpagoda.schema import Attention, Growth, Layer, LayerKind, Recurrent, Rows, Schema
from kvpagoda.tiers import host_tier
from raises import raises

FULL = Attention(2, 4, 4, "float32")
WINDOW = Attention(1, 4, 4, "float32", Growth(window=10))
STATE = Recurrent((Rows("recurrent", (2, 4, 4), "float32"),))
KINDS: dict[str, tuple[LayerKind, ...]] = {
    "full": (FULL,), "window": (WINDOW,), "full and window": (FULL, WINDOW), "state": (STATE,),
    "all": (FULL, WINDOW, STATE),
}  # fmt: skip


def cache_of(*kinds: LayerKind, **arguments: Any) -> KVCache:
    schema = Schema(tuple(Layer(i, type(kind).__name__, (kind,)) for i, kind in enumerate(kinds)), "test")
    return KVCache(schema, num_blocks=60, block_size=4, max_requests=4, device="none", **arguments)


def compute(cache: KVCache, sequence: Any, end: int | None = None) -> None:
    """Compute the prompt of ``sequence`` up to ``end`` (None: all of it), in steps no longer than ``step_limit``."""
    prompt, end = sequence._request.tokens.copy(), sequence.prompt_length if end is None else end
    while sequence.length < end:
        n = min(end - sequence.length, cache.step_limit(sequence))
        sequence.extend(n)
        sequence.commit(prompt[sequence.length : sequence.length + n])


def leave(cache: KVCache, tokens: Any, **arguments: Any) -> int:
    """Compute ``tokens`` in a request and close it. Returns how many tokens were cached."""
    with cache.open(tokens, capacity=0, **arguments) as sequence:
        compute(cache, sequence)
        cached = sequence.cached_tokens
    cache.check()
    return int(cached)


@pytest.mark.parametrize("name", KINDS)
def test_a_look_up_says_what_open_finds_and_changes_nothing(name: str) -> None:
    cache, random = cache_of(*KINDS[name]), np.random.default_rng(1)
    texts = [random.integers(0, 3, random.integers(1, 60)) for _ in range(30)]
    num_hits = 0
    for text in texts:
        text[:20] = np.arange(min(20, len(text)))
        found, again = cache.lookup(text), cache.lookup(text.tolist())
        assert found == again and found.pending == 0
        with cache.open(text, capacity=0) as sequence:
            match = sequence.match
            assert (found.cached, found.resumable) == (match.num_tokens, match.resumable)
            assert (found.groups, found.limited_by) == (match.groups, match.limited_by)
            compute(cache, sequence)
        num_hits += found.resumable > 0
    assert num_hits > 5


@pytest.mark.parametrize("loads", [True, False])
def test_a_hit_that_is_shorter_than_a_look_up_says_that_memory_limited_it(loads: bool) -> None:
    """Where the copy of a part of a block has no room, and where room that was made for records of a tier took that part,
    and then the tier failed."""
    text, other = [1] * 9 + [3] * 11, [1] * 9 + [2] * 3
    schema = Schema((Layer(0, "full", (FULL,)),), "test")
    cache = KVCache(schema, num_blocks=6, block_size=4, max_requests=1, tiers=[host_tier("1MiB", write="commit")])
    for one in (text, [7] * 24, other):  # the second evicts the first
        with cache.open(one) as sequence:
            sequence.commit(one[sequence.length :])
    before = cache.lookup([*text, 4, 4, 4, 4])
    assert (before.cached, before.resumable, before.limited_by) == (9, 9, "nothing")
    if not loads:
        cache.core.tiers.load = lambda hit, targets, whole: 0  # type: ignore[method-assign]
    with cache.open([*text, 4, 4, 4, 4]) as sequence:
        match = sequence.match
    assert (match.num_tokens, match.resumable, match.limited_by) == ((20, 20, "nothing") if loads else (9, 8, "memory"))
    assert sum(one.tokens for one in cache.stats().short_hits if one.reason == "memory") == (not loads)
    cache.check()

    cache = KVCache(schema, num_blocks=4, block_size=4, max_requests=1, device="none")
    for one in ([*other[:9], 2], [5] * 4):
        with cache.open(one) as sequence:
            sequence.commit(one)
    assert cache.lookup([*other[:9], *[3] * 6]).resumable == 9
    with cache.open([*other[:9], *[3] * 6]) as sequence:
        assert sequence.match[:3] == (9, 8, "memory")


def test_a_look_up_needs_no_slot_and_says_what_is_about_to_be_published() -> None:
    cache = cache_of(FULL)
    running = [cache.open(range(40 * i, 40 * i + 40), capacity=0) for i in range(4)]
    # whole blocks of all tokens but the last
    assert (cache.lookup(range(40)).pending, cache.lookup(range(30)).pending) == (36, 28)
    assert cache.lookup([*range(10), 99, *range(11, 40)]).pending == 8
    assert cache.lookup(range(40), namespace="other").pending == cache.lookup(range(500, 540)).pending == 0
    compute(cache, running[0], 20)
    found = cache.lookup(range(40))
    assert (found.cached, found.resumable, found.pending) == (20, 20, 16)
    compute(cache, running[0])
    assert cache.lookup(range(40)).pending == 0
    cache.check()


@pytest.mark.parametrize("name", KINDS)
def test_one_lookup_of_many_texts_equals_one_for_each(name: str) -> None:
    """One lookup of many texts answers like one lookup for each, whatever runs. Texts may have any form; namespaces and
    media are given once or for each text."""
    cache, random = cache_of(*KINDS[name]), np.random.default_rng(2)
    photo, other = b"p" * 16, b"q" * 16
    num_pending = num_hits = 0
    for _ in range(20):
        texts = [np.arange(random.integers(2, 50), dtype=np.int32) for _ in range(6)]
        for text in texts:
            text[random.integers(1, len(text)) :] += int(random.integers(0, 3))
        namespaces = [(None, "a", Namespace("a"), Namespace(adapter="a"))[random.integers(4)] for _ in texts]
        media = [({0: photo}, None, {1: other})[random.integers(3)] for _ in texts]
        running = []
        for text, namespace, one in zip(texts[:3], namespaces, media):
            running.append(cache.open(text, namespace, media=one, capacity=0, publish=bool(random.random() < 0.9)))
            compute(cache, running[-1], int(random.integers(0, len(text) + 1)))
        found = cache.lookup(texts, namespaces, media=media)
        assert found == [cache.lookup(*one[:2], media=one[2]) for one in zip(texts, namespaces, media)]
        assert cache.lookup(tuple(text.tolist() for text in texts), "a") == [cache.lookup(text, "a") for text in texts]
        assert cache.lookup(texts, media=media[0]) == [cache.lookup(text, media=media[0]) for text in texts]
        num_pending += sum(one.pending > 0 for one in found)
        num_hits += sum(one.resumable > 0 for one in found)
        for sequence in running:
            sequence.close()
    assert num_pending > 10 and num_hits > 10, (num_pending, num_hits)
    cache.check()


def test_bad_lists_of_texts_are_refused() -> None:
    cache = cache_of(FULL)
    assert cache.lookup([]) == cache.lookup(()) == cache.lookup(np.array([], np.int32)) != []
    assert cache.lookup([[]]) == [cache.lookup([])] and cache.lookup([np.int64(1), 2]).cached == 0
    for wrong, figures in (
        (lambda: cache.lookup([[1], [2]], ["a"]), {"needed": 2}),
        (lambda: cache.lookup([[1]], media=[{}, {}]), {"needed": 1}),
        (lambda: cache.lookup([[1], [-2]]), {"needed": -2, "available": 2**31 - 1}),
        (lambda: cache.lookup([[1], 2]), {"needed": "TypeError"}),
        (lambda: cache.lookup([1, 2], ["a", "b"]), {"needed": ["a", "b"]}),
        (lambda: cache.lookup(np.ones((2, 2), np.int32)), {"needed": np.dtype("int32"), "available": [2, 2]}),
    ):
        with raises(BadInput, **figures):
            wrong()


@pytest.mark.parametrize("name", KINDS)
def test_requests_that_only_read_and_requests_that_only_publish(name: str) -> None:
    cache, text = cache_of(*KINDS[name]), list(range(33))
    assert leave(cache, text, publish=False) == 0 and cache.lookup(text).cached == 0
    most = 33 if name == "full" else 32
    assert leave(cache, text) == 0 and leave(cache, [*text, 1], publish=False) == most
    before = cache.lookup([*text, *range(40, 60)])
    assert leave(cache, [*text, *range(40, 60)], publish=False) == before.resumable
    assert cache.lookup([*text, *range(40, 60)]) == before
    assert leave(cache, text, lookup=False) == 0 and leave(cache, text) == 32
    with cache.open(text, publish=False, capacity=33) as sequence:
        child = sequence.fork()
        child.close()
    cache.check()
    assert all(group.held == group.evictable for group in cache.stats().groups)


def test_steps_that_pass_a_checkpoint_boundary_are_counted() -> None:
    cache, text = cache_of(FULL, STATE), list(range(33))
    with cache.open(text) as sequence:
        assert cache.step_limit(sequence) == 32 and cache.step_limit([sequence]).tolist() == [32]
        sequence.commit(text)
    assert cache.stats().passed_boundaries == 1 and cache.lookup(text).resumable == 0
    assert leave(cache, text) == 0 and leave(cache, text) == 32
    assert cache.stats().passed_boundaries == 1
    windows = cache_of(FULL, WINDOW)
    with windows.open(text) as sequence:
        assert windows.step_limit(sequence) == windows.max_context
        sequence.commit(text)
    assert windows.lookup(text).resumable == 32


@pytest.mark.parametrize("name", KINDS)
def test_hits_end_on_the_grid(name: str) -> None:
    cache = cache_of(*KINDS[name], limits=Limits(hit_grid=16))
    assert [leave(cache, range(n)) for n in (47, 47, 49, 49)] == [0, 32, 32, 48]
    with raises(BadInput, needed=6, available=4):
        cache_of(FULL, limits=Limits(hit_grid=6))
    with raises(BadInput, field="hit_grid", needed=0, available=1):
        Limits(hit_grid=0)


def test_every_token_knows_its_weights() -> None:
    cache, text = cache_of(FULL), list(range(40))
    sequence = cache.open(text)
    assert cache.epoch == 0 and sequence.epochs == [(0, 0)]
    sequence.commit(text[:10])
    cache.invalidate("one adapter")
    assert cache.epoch == 0
    cache.invalidate()
    sequence.commit(text[10:20])
    child = sequence.fork(reserve=40)
    assert cache.epoch == 1 and sequence.epochs == child.epochs == [(0, 0), (10, 1)]
    cache.invalidate()
    cache.invalidate()
    assert sequence.epochs == [(0, 0), (10, 1), (20, 3)]
    sequence.rewind(14)
    assert sequence.epochs == [(0, 0), (6, 3)] and child.epochs == [(0, 0), (10, 1), (20, 3)]
    child.suspend()
    cache.invalidate()
    child.resume()
    assert child.epochs == [(0, 0), (10, 1), (20, 4)]
    with cache.open(text) as fresh:  # nothing that other weights computed is found
        assert fresh.cached_tokens == 0 and fresh.epochs == [(0, 4)]
    cache.check()


@pytest.mark.parametrize("name", KINDS)
def test_every_token_carries_the_epoch_that_computed_it(name: str) -> None:
    """Every committed token carries the epoch in which it was computed, also if it was a hit. A hit was computed
    completely in the epoch of the request that finds it. ``random_driver`` compares bytes as well."""
    cache, random = cache_of(*KINDS[name]), np.random.default_rng(3)
    truth: dict[Any, list[int]] = {}  # sequence -> the epoch of each of its tokens
    staying: dict[Any, int] = {}  # sequence -> the epoch that it stays on
    computed: dict[int, int] = {}  # epoch -> the most tokens of the text that were computed in it alone
    num_crossed = num_joined = 0
    for step in range(1500):
        chance, alive = random.random(), [*truth]
        if chance < 0.25 and len(alive) < 4:
            epoch = int(random.choice([*staying.values(), cache.epoch])) if random.random() < 0.5 else None
            space = Namespace(epoch=epoch)
            found = cache.lookup(np.arange(50), space)
            sequence = cache.open(np.arange(random.integers(1, 40)), space, capacity=0, reserve=48)
            epoch = cache.epoch if epoch is None else epoch
            if space.epoch is not None:
                staying[sequence] = epoch
            truth[sequence] = [epoch] * sequence.cached_tokens
            assert sequence.cached_tokens <= found.cached <= computed.get(epoch, 0)
            num_joined += epoch < cache.epoch and sequence.cached_tokens > 0
        elif chance < 0.29:
            cache.invalidate()
        elif chance < 0.36 and alive:
            sequence = alive[random.integers(len(alive))]
            sequence.suspend(whole=bool(random.random() < 0.5))
            if random.random() < 0.3:
                cache.invalidate()
            again = sequence.resume()
            assert again == 0 or sequence.length < len(truth[sequence])
            del truth[sequence][sequence.length :]
        elif chance < 0.4 and alive and len(alive) < 4:
            sequence = alive[random.integers(len(alive))]
            child = sequence.fork(reserve=48)
            truth[child] = [*truth[sequence]]
            if sequence in staying:
                staying[child] = staying[sequence]
        elif chance < 0.47 and alive:
            del truth[sequence := alive[random.integers(len(alive))]]
            staying.pop(sequence, None)
            sequence.close()
        elif alive:
            sequence = alive[random.integers(len(alive))]
            n = int(min(random.integers(1, 6), 48 - sequence.length, cache.step_limit(sequence)))
            if n > 0:
                sequence.extend(n)
                sequence.commit(np.arange(sequence.length, sequence.length + n))
                truth[sequence] += [staying.get(sequence, cache.epoch)] * n
                if len({*truth[sequence]}) == 1:
                    epoch = truth[sequence][0]
                    computed[epoch] = max(computed.get(epoch, 0), sequence.length)
        for sequence, epochs in truth.items():
            said = np.zeros(len(epochs), np.int64)
            for first, epoch in sequence.epochs:
                said[first:] = epoch
            assert said.tolist() == epochs, (step, sequence.epochs)
            assert sequence.epochs[-1][1] == staying.get(sequence, cache.epoch)
            num_crossed += len({*epochs}) > 1
        cache.check()
    assert num_crossed > 10 and num_joined > 5, (num_crossed, num_joined)


@pytest.mark.parametrize("name", KINDS)
def test_samples_stay_on_the_epoch_that_their_namespace_names(name: str) -> None:
    cache, text = cache_of(*KINDS[name]), list(range(33))
    group = Namespace("team", epoch=cache.epoch)
    first = cache.open(text, group, capacity=0, reserve=48)
    compute(cache, first)
    assert cache.lookup(text, "team") == cache.lookup(text, group), "of the newest epoch by either way"
    cache.invalidate()
    assert cache.lookup(text, "team").cached == 0 and cache.lookup(text, group).resumable == 32
    assert leave(cache, text, namespace=group) == leave(cache, [*text, 1], namespace=group) - (name == "full") == 32
    child = first.fork(reserve=48)
    child.commit([7, 7])
    assert first.epochs == child.epochs == [(0, 0)]
    assert leave(cache, text, namespace="team") == 0 and leave(cache, text, namespace="team") == 32
    cache.invalidate("team")  # invalidates the namespace in all epochs
    assert cache.lookup(text, group).cached == cache.lookup(text, "team").cached == 0
    assert leave(cache, text, namespace=group) == 0
    for sequence in (first, child):
        sequence.close()
    assert cache.lookup(text, group).cached == 0, "what an old epoch left goes with the last request on it"
    assert not cache.core.stale and all(not group.held for group in cache.stats().groups)
    for epoch, figures in (
        (2, {"needed": 2, "available": 1}),
        (-1, {"field": "the epoch of a namespace", "needed": -1, "available": 0}),
        ("1", {"field": "the epoch of a namespace", "needed": "1", "available": 0}),
    ):
        with raises(BadInput, **figures):
            cache.open(text, Namespace(epoch=epoch))  # type: ignore[arg-type]
    cache.check()


def test_blocks_of_weights_that_return_are_found_and_those_of_mixed_weights_are_not() -> None:
    cache, text = cache_of(FULL), list(range(40))
    cache.invalidate(weights="w")
    crossing, staying = cache.open(text), cache.open(text, Namespace(epoch=1))
    crossing.commit(text[:8])
    cache.invalidate(weights="x")
    crossing.commit(text[8:])
    cache.invalidate(weights="w")
    assert cache.lookup(text).cached == 8 and crossing.epochs == [(0, 1), (8, 2), (40, 3)]
    staying.commit(text)
    assert cache.lookup(text).cached == 39 and staying.epochs == [(0, 1)], "of the same weights, by their name"
    crossing.close()
    staying.close()
    assert cache.lookup(text).cached == 39, "what is current again is not dropped"
    cache.check()


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_should_wait_while_a_running_request_computes_a_part_of_it(name: str) -> None:
    """Until the running request is where the two part, or is at the last whole block of both; with states a step of it ends
    there. Not for less than a block, for what was found already, or for what another namespace computes."""
    cache, text = cache_of(*KINDS[name]), list(range(40))
    parting = [*range(22), *[7] * 20]
    assert not cache.should_wait(text)
    running = cache.open(text, capacity=0)
    assert cache.should_wait(text) and cache.should_wait(parting)
    assert not cache.should_wait(text, "other") and not cache.should_wait(text, media={0: b"p" * 16})
    assert not cache.should_wait([0, 1, 2, 9, 9, 9]) and not cache.should_wait(range(4)) and cache.should_wait(range(5))
    with raises(BadInput, needed=-2, available=2**31 - 1):
        cache.should_wait([-2])
    compute(cache, running, 12)
    assert cache.should_wait(parting) and not cache.should_wait([*range(13), *[7] * 20])
    compute(cache, running, 20)
    assert cache.should_wait(text) and not cache.should_wait(parting)
    with cache.open(parting, capacity=0) as second:
        assert second.cached_tokens == 20
    compute(cache, running)
    running.extend(8)
    running.commit([9] * 8)
    assert not cache.should_wait([*text, *[9] * 20]), "a request that decodes computes no prompt"
    cache.check()


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_waits_for_who_computes_its_beginning_again(name: str) -> None:
    """The first request computed 20 tokens of the third prompt in one step, where no states were kept. The second computes
    them again, and keeps them there."""
    cache, has_states = cache_of(*KINDS[name]), STATE in KINDS[name]
    texts = [[*range(20), *[100 + i] * 20] for i in range(3)]
    first = cache.open(texts[0], capacity=0)
    first.extend(32)
    first.commit(texts[0][:32])
    second = cache.open(texts[1], capacity=0)
    assert second.cached_tokens == (0 if has_states else 20)
    assert cache.should_wait(texts[2]) is has_states
    compute(cache, second, 20)
    assert not cache.should_wait(texts[2]) and cache.open(texts[2], capacity=0).cached_tokens == 20
    cache.check()


def test_nobody_waits_for_states_that_are_not_kept() -> None:
    """Without checkpoints no request starts from another's states, so waiting would not help."""
    cache = cache_of(FULL, STATE, retention=Retention(checkpoints=0))
    with cache.open(range(40), capacity=0):
        assert cache.lookup(range(40)).pending == 36 and not cache.should_wait(range(40))


@pytest.mark.parametrize("name", KINDS)
def test_nobody_waits_for_a_request_that_ends_in_its_prompt(name: str) -> None:
    """One that nobody can name any more, or that was closed while a step of it is in flight, computes nothing further."""
    cache, text = cache_of(*KINDS[name]), range(40)
    running = cache.open(text, capacity=0)
    assert cache.should_wait(text) and cache.lookup(text).pending
    del running
    assert not cache.should_wait(text) and not cache.lookup(text).pending
    running = cache.open(text, capacity=8)
    with cache.fence([running]):
        assert cache.should_wait(text)
        running.close()
        assert not cache.should_wait(text) and not cache.lookup(text).pending
    cache.check()


@pytest.mark.parametrize("name", KINDS)
def test_nobody_waits_for_states_that_a_step_in_flight_passes(name: str) -> None:
    """Unless another request that has the same beginning is not there yet. Rows are found after the step wherever it ends."""
    cache, has_states = cache_of(*KINDS[name]), STATE in KINDS[name]
    texts = [[*range(20), *[100 + i] * 20] for i in range(4)]
    first = cache.open(texts[0], capacity=0)
    first.extend(32)
    cache.batch([first], [32])
    with cache.fence([first]):
        assert cache.should_wait(texts[2]) is not has_states
        second = cache.open(texts[1], capacity=0)
        assert cache.should_wait(texts[2])
        assert not has_states or cache.step_limit(second) == 20
        first.commit(texts[0][:32])
    assert not cache.stats().passed_boundaries
    compute(cache, second, 20)
    assert cache.open(texts[2], capacity=0).cached_tokens == 20
    cache.check()


def test_a_prompt_does_not_wait_for_less_than_the_grid() -> None:
    cache = cache_of(FULL, limits=Limits(hit_grid=16))
    with cache.open(range(40), capacity=0):
        assert not cache.should_wait([*range(15), 99, 99]) and cache.should_wait([*range(16), 99, 99])


@pytest.mark.parametrize("common", [32, 160])
@pytest.mark.parametrize("name", KINDS)
def test_a_short_common_prefix_holds_up_nobody_for_long(name: str, common: int) -> None:
    """64 jobs with a system prompt of a few blocks, 64 tokens of each in a step: the others wait for one step, or for the
    three in which the first computes it."""
    schema = cache_of(*KINDS[name]).schema
    cache = KVCache(schema, num_blocks=4000, block_size=16, max_requests=64, device="none")
    queue: RunQueue[Job] = RunQueue(cache)
    for i in range(64):
        queue.enter(Job(np.concatenate((np.arange(common), np.full(256, 1000 + i))).astype(np.int32), common + 256))
    steps = 0
    while queue.waiting or queue.running:
        queue.admit()
        for job in [*queue.running]:
            assert job.sequence is not None
            n = min(64, job.total - job.sequence.length, cache.step_limit(job.sequence))
            assert queue.make_room(job, n)
            job.sequence.commit(job.text[job.sequence.length : job.sequence.length + n])
            if job.sequence.length == job.total:
                queue.remove(job)
        steps += 1
    assert cache.stats().computed_tokens == common + 64 * 256
    alone = -(-common // 64) + 4  # the steps of one request alone, and of states one more for the end of its prompt
    assert steps <= alone + (common < 64) + ("state" in name or name == "all")


@pytest.mark.parametrize("name", KINDS)
def test_jobs_with_a_common_prefix_share_it(name: str) -> None:
    """Eight prompts have 224 of their 256 tokens in common, which are computed once."""
    cache = KVCache(cache_of(*KINDS[name]).schema, num_blocks=800, block_size=4, max_requests=8, device="none")
    queue: RunQueue[Job] = RunQueue(cache)
    for i in range(8):
        prompt = np.concatenate((np.arange(224), np.full(32, 1000 + i))).astype(np.int32)
        queue.enter(Job(prompt, 256))
    while queue.waiting or queue.running:
        queue.admit()
        for job in [*queue.running]:
            assert job.sequence is not None
            n = min(64, 256 - job.sequence.length, cache.step_limit(job.sequence))
            assert queue.make_room(job, n)
            job.sequence.commit(job.text[job.sequence.length : job.sequence.length + n])
            if job.sequence.length == 256:
                queue.remove(job)
    assert cache.stats().computed_tokens == 256 + 7 * 32


@pytest.mark.parametrize("num_tokens", [3, 4, 9, 11, 12])
def test_the_last_block_of_a_closed_request_is_reusable_up_to_its_end(num_tokens: int) -> None:
    cache = cache_of(FULL)
    text = np.arange(num_tokens + 4, dtype=np.int32)
    assert leave(cache, text[:num_tokens]) == 0
    assert cache.lookup(text[:num_tokens]).resumable == num_tokens - 1  # the last token is left to compute
    assert cache.lookup(text).resumable == num_tokens
    assert cache.lookup(np.append(text[:2], 99)).resumable == min(2, num_tokens)
    assert leave(cache, text) == num_tokens and cache.lookup(text).resumable == num_tokens + 3
    assert leave(cache, text[:num_tokens]) == num_tokens - 1
    cache.check()


@pytest.mark.parametrize("windows", [0, 1], ids=["full", "and a window that slid past where it crossed"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_request_that_crossed_to_other_weights_resumes_with_its_own_rows(whole: bool, windows: int) -> None:
    window = Attention(2, 4, 4, "float32", Growth(window=3))
    schema = Schema((Layer(0, "full", (FULL,)), *[Layer(1, "window", (window,))] * windows), "test")
    cache = KVCache(schema, num_blocks=20, block_size=4, max_requests=3, device="cpu", poison=True)
    text = np.arange(12, dtype=np.int32)

    def compute(sequence: Any, tokens: Any, value: float) -> None:
        sequence.extend(len(tokens))
        batch, rows = cache.batch([sequence], [len(tokens)]), torch.full((len(tokens), 2, 4), value)
        for layer in range(1 + windows):
            batch.layer(layer).write(k=rows, v=rows)
        sequence.commit(tokens)

    crossing, other = cache.open(text, capacity=0), cache.open(text, capacity=0)
    compute(crossing, text[:6], 1.0)
    cache.lookup(text)  # publishes its block, before the other has one of the same tokens
    compute(other, text, 2.0)
    cache.invalidate()
    compute(crossing, text[6:], 3.0)
    crossing.suspend(whole)
    assert crossing.resume() == 0
    table = cache.core.groups[0].table.cells[crossing.slot, :3].astype(np.int64)
    assert cache.layer(0)["k"][table].reshape(12, -1)[:, 0].tolist() == [1.0] * 6 + [3.0] * 6
    cache.check()


def test_a_request_that_computed_nothing_leaves_nothing() -> None:
    cache = cache_of(FULL)
    text = np.arange(11, dtype=np.int32)
    leave(cache, text)
    before = cache.stats().groups[0]
    cache.open(text).close()
    assert cache.stats().groups[0] == replace(before, found_tokens=before.found_tokens + 10, peak_held=4)
    cache.check()


def test_completed_blocks_are_published_by_whoever_reads_the_tree_or_lacks_memory() -> None:
    cache = cache_of(FULL)
    text = np.arange(9, dtype=np.int32)
    first = cache.open(text, reserve=16)
    first.commit(text)
    (waiting,) = cache.core.waiting
    assert cache.core.prefix.tree.num_cached == 0 and waiting is first._request
    assert cache.lookup(text).cached == 8 and cache.core.prefix.tree.num_cached == 2 and not cache.core.waiting
    first.extend(4)
    first.commit(np.arange(20, 24))
    first.extend(13)
    first.commit(np.arange(24, 37))
    assert cache.core.prefix.tree.num_cached == 2 and first._request in cache.core.waiting
    cache.core.capacity.ensure_free([cache.core.groups[0].free.num_free])  # nothing is lacking yet
    assert cache.core.prefix.tree.num_cached == 2
    twin = cache.open(text, reserve=20)  # reads the tree
    assert cache.core.prefix.tree.num_cached == 6 and twin.cached_tokens == 8
    twin.commit(text[8:])
    twin.extend(17)
    twin.commit(np.append(np.arange(20, 24), np.arange(24, 37)))
    assert twin._request in cache.core.waiting and cache.core.groups[0].num_held == 7 + 5
    twin.extend(cache.core.groups[0].free.num_free * 4 + 4)  # lacks memory: its duplicates are given back
    assert twin._request not in cache.core.waiting and cache.core.prefix.tree.num_cached == 6
    for one in (first, twin):
        one.close()
    assert not cache.core.waiting and cache.core.prefix.tree.num_cached == 7
    cache.check()


@pytest.mark.parametrize("width, more", [(0, 0), (3, 0), (3, 2), (3, 3)])
@pytest.mark.parametrize("kinds", [(STATE,), (FULL, STATE), (FULL, WINDOW, STATE)])
def test_a_prompt_starts_from_the_state_of_a_running_request(
    kinds: tuple[LayerKind, ...], width: int, more: int
) -> None:
    """Also if the running request is ``more`` tokens ahead, but has the older state in another place still."""
    layers = tuple(Layer(i, type(kind).__name__, (kind,)) for i, kind in enumerate(kinds))
    schema = Schema(layers, "test").rewindable(width)
    cache = KVCache(schema, num_blocks=600, block_size=16, max_requests=4, device="cpu")
    text = np.arange(4096, dtype=np.int32)
    ahead = cache.open(text, capacity=0)
    ahead.extend(2048 + more)
    ahead.commit(text[: 2048 + more])
    layer = cache.layer(len(kinds) - 1)
    rows = layer["recurrent"]
    rows[cache.core.states.rows(np.array([ahead.slot]), np.array([2048]))] = 7.0
    with cache.fence([ahead]):  # a step may be writing its states
        assert cache.open(text[:3000], capacity=0).cached_tokens == 0
    behind = cache.open(text[:3000], capacity=0)
    assert behind.cached_tokens == 2048 and len(cache.core.prefix.kept) == 1
    behind.extend(1)
    assert (rows[cache.batch([behind], [1]).state_indices.long()] == 7.0).all()
    assert cache.open(text[:1000], capacity=0).cached_tokens == 0  # this prompt ends before that state
    cache.check()


def test_where_hits_end_at_a_grid_a_last_block_is_kept_only_if_a_hit_can_end_in_it() -> None:
    cache = cache_of(FULL, limits=Limits(hit_grid=4))
    leave(cache, np.arange(11, dtype=np.int32))
    assert cache.stats().groups[0].held == 2
