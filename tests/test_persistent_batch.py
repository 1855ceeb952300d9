"""A persistent batch shows the same arrays as a fresh batch of its sequences, whatever they do between steps."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from kvpagoda.core.batch.batch import Batch
from kvpagoda.core.cache.sequence import Sequence
from kvpagoda.core.kv_cache import KVCache
from kvpagoda.errors import BadInput, OutOfBlocks, RetryLater, StaleHandle
from kvpagoda.schema import Attention, Compressed, Growth, Layer, LayerKind, Recurrent, Rows, Schema
from kvpagoda.tiers import host_tier
from late_device import Late
from options import grouped, move_blocks
from raises import raises

FULL = Attention(1, 2, 2, "float32")
WINDOW = Attention(1, 2, 2, "float32", Growth(window=10))
SLACK = Attention(1, 2, 2, "float32", Growth(window=6, slack=3))
CHUNK = Attention(1, 2, 2, "float32", Growth(chunk=12))
STATE = Recurrent((Rows("recurrent", (3,), "float32"),))
DEEP = Recurrent((Rows("recurrent", (3,), "float32"),), verify_width=2)
KINDS: dict[str, tuple[LayerKind, ...]] = {
    "full": (FULL,),
    "window": (WINDOW,),
    "chunk": (CHUNK, SLACK),
    "state": (STATE,),
    "full and state": (FULL, STATE),
    "mixed": (FULL, WINDOW, SLACK, CHUNK, STATE),
    "states that go back": (FULL, SLACK, DEEP),
}
SIZES: dict[str, dict[str, Any]] = {
    "full": {"num_blocks": 30},
    "window": {"num_blocks": 40, "checkpoints": 3},
    "chunk": {"num_blocks": 40, "checkpoints": 3},
    "state": {"num_blocks": 8, "checkpoints": 2},
    "full and state": {"budget": "2KiB", "checkpoints": 3},
    "mixed": {"budget": "3KiB", "checkpoints": 3},
    "states that go back": {"budget": "3KiB", "checkpoints": 3},
}
NAMES = ("cache_seqlens", "slot_mapping", "kv_indptr", "kv_indices", "kv_last_page_len", "kv_start")


def cache_of(*kinds: LayerKind, **arguments: Any) -> KVCache:
    schema = Schema(
        tuple(Layer(i, type(kind).__name__, (kind,)) for i, kind in enumerate(kinds)), "test", vocab_size=100
    )
    usual = {"max_requests": 8, "block_size": 4, "max_context": 80, "step_tokens": 8, "device": "cpu"}
    return KVCache(schema, **grouped(**{**usual, **arguments}))


def running(cache: KVCache, length: int, first: int = 0, **arguments: Any) -> Sequence:
    """Return a sequence whose prompt, the ``length`` tokens ``first, first + 1, ...``, is committed."""
    sequence = cache.open([(first + i) % 100 for i in range(length)], capacity=0, **arguments)
    while sequence.length < length:
        n = min(4 - sequence.length % 4, length - sequence.length)
        sequence.extend(n)
        sequence.commit([(first + i) % 100 for i in range(sequence.length, sequence.length + n)])
    return sequence


def assert_right(cache: KVCache, batch: Batch, members: tuple[Sequence, ...], n: int, num_rows: int) -> None:
    """Compare all arrays of ``batch`` with arrays that are computed from the block tables, token by token."""
    if isinstance(batch.buffers.arrays, Late):
        for view in [batch.layer(layer.index) for layer in cache.schema.layers if layer.growth is not None]:
            assert all(getattr(view, name) is getattr(view, name) for name in ("block_table", *NAMES))
        assert batch.state_writes is batch.state_writes
        batch.buffers.arrays.wait()
    size = cache.block_size
    before = [sequence.length for sequence in members]
    padding = num_rows - len(members)
    slots = [sequence.slot for sequence in members]
    counts = [n] * len(members) + [1] * padding
    assert batch.qo_indptr.tolist() == np.cumsum([0, *counts]).tolist()
    assert batch.positions.tolist() == [p for b in before for p in range(b, b + n)] + [0] * padding
    assert batch.step.request_slots.tolist() == [slot for slot in slots for _ in range(n)] + [-1] * padding
    assert batch.step.request_ids.tolist() == np.repeat(np.arange(num_rows), counts).tolist()
    group = cache.core.states
    places = [[0] if group is None else group.held_places(slot).tolist() for slot in slots]
    width = 1 if group is None else group.places
    states = [own[b % width] for own, b in zip(places, before)] + [0] * padding
    assert batch.state_indices.tolist() == states
    last = [
        range(b + n - width + 1 if n > width else b + 1, b + n + 1) for b in before
    ]  # lengths whose states are left
    written = [[own[length % width] for length in lengths] for own, lengths in zip(places, last)]
    left = batch.state_writes.tolist()
    assert [row[: len(own)] for row, own in zip(left, written)] == written
    assert left[len(places) :] == [[0] * width] * padding and batch.state_writes.shape == (num_rows, width)
    assert n > width or [row[-1] for row in left] == states
    assert batch.step.state_rows is not None
    assert batch.step.state_rows.tolist() == np.repeat(states, counts).tolist()
    for layer in cache.schema.layers:
        if layer.growth is None:
            continue
        ledger = next(ledger for ledger in cache.core.groups if ledger.growth == layer.growth)
        view, cells = batch.layer(layer.index), ledger.table.cells
        ends = [-(-(b + n) // size) for b in before]
        firsts = [min(layer.growth.first_needed(b) // size, end) for b, end in zip(before, ends)]
        rows = [cells[slot, first:end].tolist() for slot, first, end in zip(slots, firsts, ends)]
        for i, (row, first, end) in enumerate(zip(rows, firsts, ends)):
            assert view.block_table[i, :end].tolist() == [0] * first + row
        assert view.block_table.shape[0] == num_rows
        expected = {
            "cache_seqlens": [b + n for b in before] + [0] * padding,
            "slot_mapping": [
                int(cells[slot, p // size]) * size + p % size for slot, b in zip(slots, before) for p in range(b, b + n)
            ]
            + [0] * padding,
            "kv_indptr": np.cumsum([0, *map(len, rows)] + [0] * padding).tolist(),
            "kv_indices": [cell for row in rows for cell in row],
            "kv_last_page_len": [(b + n - 1) % size + 1 for b in before] + [0] * padding,
            "kv_start": [first * size for first in firsts] + [0] * padding,
        }
        assert {name: getattr(view, name).tolist() for name in NAMES} == expected


@pytest.mark.parametrize("copied", [False, True], ids=["shared memory", "a late device"])
@pytest.mark.parametrize("name", KINDS)
def test_random_traffic(name: str, copied: bool) -> None:
    """Steps of one or more tokens, while members join, leave, fork, rewind, are fenced, step alone and have blocks
    moved. Memory is short."""
    random = np.random.default_rng(copied)
    cache = cache_of(*KINDS[name], **SIZES[name])
    together = cache.persistent_batch(num_rows=6)
    if copied:
        together._buffers.arrays = Late()
    texts: dict[Sequence, list[int]] = {}
    seen = {"steps": 0, "short": 0, "closed": 0, "forked": 0, "rewound": 0, "alone": 0, "fenced": 0, "moved": 0}

    def close(sequence: Sequence) -> None:
        del texts[sequence]
        if random.random() < 0.5:
            together.remove(sequence)
            sequence.close()
        else:
            sequence.close()
            if len(together.sequences) > 1:
                with raises(StaleHandle, needed=[ANY]):
                    together.extend()
            together.remove(sequence)
        seen["closed"] += 1

    for _ in range(250):
        chance = random.random()
        members = together.sequences
        if chance < 0.12 and len(members) < 6:
            try:
                sequence = running(cache, int(random.integers(1, 20)), int(random.integers(0, 3)))
            except (RetryLater, OutOfBlocks):
                for request in {*cache.core.running.values()} - {one._request for one in members}:
                    Sequence(cache._calls, request).close()
                continue
            texts[sequence] = sequence.tokens.tolist()
            together.add(sequence)
        elif chance < 0.16 and members:
            close(members[random.integers(len(members))])
        elif chance < 0.20 and 0 < len(members) < 6:
            parent = members[random.integers(len(members))]
            try:
                child = parent.fork()
            except RetryLater:
                continue
            texts[child] = [*texts[parent]]
            together.add(child)
            seen["forked"] += 1
        elif chance < 0.26 and members:
            sequence = members[random.integers(len(members))]
            try:
                sequence.rewind(int(random.integers(1, 4)))
            except (BadInput, OutOfBlocks):
                continue
            del texts[sequence][sequence.length :]
            seen["rewound"] += 1
        elif chance < 0.32 and members:
            sequence = members[random.integers(len(members))]
            try:
                sequence.extend(2)
            except (OutOfBlocks, BadInput):
                continue
            sequence.commit([7, 8])
            texts[sequence] += [7, 8]
            seen["alone"] += 1
        elif chance < 0.36 and members:
            ledger = cache.core.groups[random.integers(len(cache.core.groups))]
            held_ids = ledger.held_places(members[random.integers(len(members))].slot)
            if len(held_ids) and ledger.free.num_free:
                move_blocks(cache, ledger, random.choice(held_ids, 1))
                seen["moved"] += 1
        elif members:
            n = int(random.choice([1, 1, 1, 1, 2, 6]))
            cache.lookup([0, 0])  # publishes what was deferred, so that a step that fails changes nothing
            held = [([*ledger.end], ledger.outstanding, ledger.free.num_free) for ledger in cache.core.groups]
            try:
                batch = together.extend(n)
            except (OutOfBlocks, BadInput) as error:
                seen["short"] += isinstance(error, OutOfBlocks)
                assert held == [
                    ([*ledger.end], ledger.outstanding, ledger.free.num_free) for ledger in cache.core.groups
                ]
                assert all(sequence.length == len(texts[sequence]) for sequence in members)
                close(max(members, key=lambda sequence: sequence.length))
                continue
            if random.random() < 0.7:  # arrays that were not read in one step must be right in the next
                assert_right(cache, batch, members, n, 6)
            if random.random() < 0.3:
                subset = members[: random.integers(1, len(members) + 1)]
                fresh = cache.batch(subset, [n] * len(subset))
                assert_right(cache, fresh, subset, n, len(subset))
            tokens = [len(texts[sequence]) % 50 for sequence in members]  # the same token in many texts
            with ExitStack() as stack:
                fenced = [members[random.integers(len(members))]] if random.random() < 0.2 else []
                stack.enter_context(cache.fence(fenced))
                seen["fenced"] += len(fenced)
                together.commit(tokens)
                cache.lookup([0, 0])  # publishes what was deferred, and windows slide
                for ledger in cache.core.groups:
                    # what slid out is freed, except what the last whole block needs
                    for sequence in {*members} - {*fenced}:
                        size = min(ledger.block_size, 4)
                        kept = ledger.growth.first_kept(sequence.length) // ledger.block_size
                        kept = min(
                            kept, ledger.growth.first_needed(sequence.length // size * size) // ledger.block_size
                        )
                        assert ledger.first[sequence.slot] >= min(kept, ledger.end[sequence.slot])
            for sequence, token in zip(members, tokens):
                texts[sequence].append(token)
            seen["steps"] += 1
        cache.check()
        if random.random() < 0.3:
            for sequence, text in texts.items():
                assert sequence.length == len(text) and sequence.tokens.tolist() == text
    never = {"rewound"} if STATE in KINDS[name] else set()
    never |= set() if FULL in KINDS[name] else {"short"}  # without it a request holds few blocks
    assert all(count for what, count in seen.items() if what not in never), seen
    for sequence in together.sequences:
        assert sequence.tokens.tolist() == texts[sequence]
        sequence.close()
    cache.check()


def test_addresses_stay_and_unchanged_values_are_not_written() -> None:
    cache = cache_of(FULL, WINDOW, num_blocks=60)
    first, second = running(cache, 5), running(cache, 9, 50)
    together = cache.persistent_batch([first, second], num_rows=4)
    seen = set()
    for _ in range(30):
        batch = together.extend()
        views = [batch.layer(0), batch.layer(1)]
        tensors = [getattr(view, name) for view in views for name in (*NAMES, "block_table")]
        tensors += [batch.positions, batch.qo_indptr, batch.state_indices, batch.state_writes]
        tensors += [batch.step.request_slots, batch.step.request_ids, batch.step.state_rows]
        seen.add(tuple(tensor.data_ptr() for tensor in tensors))
        cache.batch([first], [1]).layer(0).block_table.zero_()  # another batch has arrays of its own
        together.commit([1, 2])
        if first.length % 4 and second.length % 4 and first.length % 4 != 1 and second.length % 4 != 1:
            before = batch.layer(0).kv_indices
            before.fill_(-1)
            assert (together.extend().layer(0).kv_indices == -1).all()
            before.copy_(cache.batch([first, second], [1, 1]).layer(0).kv_indices)
    assert len(seen) == 1


def test_a_batch_is_over_when_the_next_is_made_or_a_sequence_closed() -> None:
    cache = cache_of(FULL, num_blocks=60)
    first, second = running(cache, 5), running(cache, 9, 50)
    together = cache.persistent_batch([first, second])
    batch = together.extend()
    cache.batch([first], [1])
    assert batch.layer(0).cache_seqlens.tolist() == [6, 10]
    together.commit([1, 2])
    assert batch.layer(0).slot_mapping.shape == (2,)  # read for the first time: still the step's values
    newer = together.extend()
    with raises(StaleHandle, needed="batch", available="over"):
        batch.layer(0)
    second.close()
    with raises(StaleHandle, needed="batch", available="over"):
        newer.layer(0)
    for call in (together.extend, lambda: together.commit([1, 2])):
        with raises(StaleHandle, needed=[1]):
            call()
    together.remove(second)
    assert together.extend().layer(0).cache_seqlens.tolist() == [7, 0]


def test_extend_makes_room_for_all_sequences_or_for_none() -> None:
    cache = cache_of(FULL, num_blocks=7)
    first, second, third = (running(cache, 8, 10 * i) for i in range(3))
    together = cache.persistent_batch([first, second, third])
    with raises(OutOfBlocks, needed=3, available=1, group="full"):
        together.extend()
    assert [sequence.capacity for sequence in together.sequences] == [8, 8, 8] and cache.stats().groups[0].free == 1
    with raises(BadInput, needed=3, available=3):
        together.commit([1, 2, 3])
    third.close()
    together.remove(third)
    together.extend()
    together.commit([1, 2])
    assert first.tokens.tolist() == [*range(8), 1] and second.capacity == 12
    cache.check()


def test_bad_arguments_are_refused_before_anything_changes() -> None:
    cache = cache_of(FULL, num_blocks=60)
    first, second = running(cache, 5), running(cache, 9, 50)
    begun = cache.open([1, 2, 3])
    together = cache.persistent_batch([first], num_rows=2)
    for sequences, needed, available in [
        ([first], 2, 2), ([second, second], 3, 2), ([second, begun], 3, 2),
        ([begun], 2, 0),  # all of its prompt but the last token is to be committed first
    ]:  # fmt: skip
        with raises(BadInput, needed=needed, available=available):
            together.add(*sequences)
    with raises(BadInput, needed=2, available=1):
        together.remove(first, second)
    assert together.sequences == (first,)
    with raises(BadInput, field="the number of tokens that a step computes of each sequence", needed=0, available=1):
        together.extend(0)
    with raises(BadInput, field="num_rows", needed=0, available=1):
        cache.persistent_batch(num_rows=0)
    closed = running(cache, 3, 80)
    closed.close()
    with raises(StaleHandle, needed="sequence", available="closed"):
        together.add(closed)
    together.extend()
    for tokens, needed, available in [([1, 2], 1, 2), ([100], 100, 99), ([0.5], np.dtype(float), [1])]:
        with raises(BadInput, needed=needed, available=available):
            together.commit(tokens)
    assert first.length == 5
    together.commit(np.array([3]))
    assert first.tokens.tolist() == [0, 1, 2, 3, 4, 3]


def test_calls_of_a_sequence_between_extend_and_commit_take_effect() -> None:
    cache = cache_of(FULL, num_blocks=60)
    first, second = running(cache, 6), running(cache, 9, 50)
    together = cache.persistent_batch([first, second])
    together.extend()
    first.extend(2)
    first.commit([7])
    together.commit([8, 9])
    assert first.tokens[6:].tolist() == [7, 8] and second.tokens[9:].tolist() == [9]
    assert cache.lookup([*range(6), 7, 8, 0]).cached == 8 and first._request.lease.num_blocks == 2
    batch = together.extend()
    move_blocks(cache, cache.core.groups[0], cache.core.groups[0].held_places(first.slot)[:1])
    with raises(StaleHandle, needed="batch", available="over"):
        batch.layer(0)


def test_without_sequences_all_rows_are_padded() -> None:
    cache = cache_of(FULL, WINDOW, num_blocks=60)
    together = cache.persistent_batch(num_rows=3)
    assert_right(cache, together.extend(), (), 1, 3)
    together.commit([])
    together.add(running(cache, 4))
    assert_right(cache, together.extend(), together.sequences, 1, 3)


def test_a_sequence_may_change_from_one_batch_to_another() -> None:
    cache = cache_of(FULL, STATE, num_blocks=60)
    sequence = running(cache, 6)
    one, other = (cache.persistent_batch([sequence]) for _ in range(2))
    for token in range(12):
        together = (one, other)[token % 3 == 0]
        assert together.extend().layer(0).cache_seqlens.tolist() == [7 + token]
        together.commit([token])
    assert sequence.tokens.tolist() == [*range(6), *range(12)]


def test_tokens_that_a_step_wrote_limit_how_far_a_sequence_rewinds() -> None:
    """As with ``KVCache.batch``, rings also hold the tokens that were computed and not committed."""
    cache = cache_of(Compressed(16, 8, "float32", 4, verify_width=3), num_blocks=60, block_size=8)
    alone, member = running(cache, 10), running(cache, 10, 50)
    together = cache.persistent_batch([member])
    for n in (1, 3, 1):
        alone.extend(n)
        cache.batch([alone], [n])
        alone.commit([1])
        together.extend(n)
        together.commit([1])
    for sequence in (alone, member):
        with raises(BadInput, needed=4, available=2):
            sequence.rewind(4)
    short = running(cache, 3, 90)
    together.remove(member)
    together.add(short)
    together.extend()
    together.commit([1])
    short.rewind(3)
    assert short.length == 1


def test_deferred_blocks_are_published_before_any_call_that_needs_them() -> None:
    """Nothing shows that publishing is deferred: each of these calls finds all blocks that steps completed before."""
    for look in ("lookup", "open", "pin", "fork", "close", "suspend"):
        cache = cache_of(FULL, num_blocks=60)
        sequence, other = running(cache, 5), running(cache, 9, 50)
        together = cache.persistent_batch([sequence, other])
        for token in range(30):
            together.extend()
            together.commit([token, token + 40])
        assert sequence._request in cache.core.waiting and sequence._request.lease.num_blocks < 35 // 4
        text = sequence.tokens.tolist()
        if look == "lookup":
            assert cache.lookup(text).cached == 32
        elif look == "open":
            with cache.open(text) as again:
                assert again.cached_tokens == 32
        elif look == "pin":
            cache.unpin(cache.pin(text))
            assert sequence._request.lease.num_blocks == 8
        elif look == "fork":
            with sequence.fork() as child:
                assert child._request.lease.num_blocks == 8 and child.tokens.tolist() == text
        elif look == "close":
            together.remove(sequence)
            sequence.close()
            assert sequence._request not in cache.core.waiting
            assert cache.lookup([*text, 0]).cached >= 32
        else:
            together.remove(sequence)
            sequence.suspend()
            assert sequence._request not in cache.core.waiting
            sequence.resume()
            assert cache.lookup([*text, 0]).cached >= 32 and sequence.tokens.tolist() == text
        cache.check()


def test_steps_publish_deferred_blocks_by_themselves() -> None:
    cache = cache_of(FULL, num_blocks=500, max_context=800)
    members = [running(cache, 4 + i, 20 * i) for i in range(3)]
    together, most = cache.persistent_batch(members), 0
    for token in range(600):
        together.extend()
        together.commit([token % 10, token % 11, token % 12])
        behind = [one.length // 4 - one._request.lease.num_blocks for one in members]
        most = max(most, *behind)
    assert 8 < most <= 66  # some blocks wait, none for ever
    assert together._rows.newest.shape[1] == 66 * 4
    for i, one in enumerate(members):
        assert one.tokens.tolist() == [(20 * i + j) % 100 for j in range(4 + i)] + [t % (10 + i) for t in range(600)]
    cache.check()


def test_windows_slide_in_turns_and_at_once_where_blocks_lack() -> None:
    ample, tight = cache_of(WINDOW, num_blocks=60), cache_of(WINDOW, num_blocks=12)
    for cache in (ample, tight):
        members = [running(cache, 12, first, reserve=76) for first in (0, 50)]
        together, lagging = cache.persistent_batch(members), list[int]()
        (group,) = cache.core.groups
        while members[0].length < 76:
            together.extend()
            together.commit(np.full(2, members[0].length, np.int32))
            slid = [group.growth.first_kept(member.length) // 4 for member in members]
            lagging.append(max(end - group.first[member.slot] for member, end in zip(members, slid)))
            cache.check()
        assert max(lagging) in (range(5, 10) if cache is ample else range(5))
        cache.lookup([0, 0])
        assert all(group.first[member.slot] == (76 - 10) // 4 for member in members)


def test_duplicate_blocks_become_free_before_a_step_fails_for_room() -> None:
    """Both requests write the same 20 blocks, and there are 28: duplicates become free when a step needs room."""
    cache = cache_of(FULL, num_blocks=28)
    members = [running(cache, 4), running(cache, 4)]
    together = cache.persistent_batch(members)
    for token in range(76):
        together.extend()
        together.commit([token % 7, token % 7])
        cache.check()
    assert [one.length for one in members] == [80, 80]


def test_blocks_are_allocated_in_advance_only_if_they_are_reserved_and_free() -> None:
    cache = cache_of(FULL, num_blocks=60)
    promised = cache.open(range(8), reserve=76)
    promised.commit(range(8))
    together = cache.persistent_batch([promised], num_rows=2)
    together.extend()
    assert promised.capacity == 4 * (2 + 1 + 15) and cache.core.full.outstanding == 1
    together.commit([1])
    plain = running(cache, 8, 50)
    together.add(plain)
    together.extend()
    assert plain.capacity == 12 and promised.capacity == 72
    cache.check()


def test_a_sequence_that_lost_tokens_while_suspended_steps_through_its_text_again() -> None:
    cache = cache_of(FULL, num_blocks=8)
    first = running(cache, 9)
    together = cache.persistent_batch([first])
    first.suspend(whole=False)
    running(cache, 30, 50).close()  # takes every block
    assert first.resume() == 9
    for at in range(9):
        assert_right(cache, together.extend(), together.sequences, 1, 1)
        with raises(BadInput, needed=60, available=at):
            together.commit([60])
        assert first.tokens.tolist() == list(range(at))
        together.commit([at])
    together.extend(2)
    together.commit([60, 61], [2])
    assert first.tokens.tolist() == [*range(9), 60, 61]
    cache.check()


@pytest.mark.parametrize("name", ["states", "tiers", "neither"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_one_commit_may_be_of_any_number_of_tokens_of_a_row(name: str, block_size: int) -> None:
    """The first commits are of many blocks, of other rows each time: all tokens stay in their own rows."""
    kinds = (FULL, STATE) if name == "states" else (FULL,)
    arguments: dict[str, Any] = {"checkpoints": 3} if name == "states" else {}
    if name == "tiers":
        arguments["tiers"] = [host_tier("1MiB")]
    with closing(cache_of(*kinds, num_blocks=900, max_context=300, block_size=block_size, **arguments)) as cache:
        members = [running(cache, 8, 10 * i) for i in range(3)]
        texts = [member.tokens.tolist() for member in members]
        together = cache.persistent_batch(members, num_rows=4)
        for counts in ([40, 1, 0], [2, 80, 33], [0, 0, 0], [1, 1, 150], [7, 0, 1]):
            together.extend(max(*counts, 1))
            new = [[60 + 10 * row + at % 7 for at in range(count)] for row, count in enumerate(counts)]
            together.commit([token for tokens in new for token in tokens], counts)
            cache.check()
            for text, tokens in zip(texts, new):
                text += tokens
            assert [member.length for member in members] == [len(text) for text in texts]
        assert [member.tokens.tolist() for member in members] == texts
        for member, text in zip(members, texts):
            member.close()
            assert cache.lookup([*text, 0]).cached >= len(text) // block_size * block_size * (name != "states")
        cache.check()


def test_blocks_after_a_long_commit_are_found_under_the_text_that_was_computed() -> None:
    """The row of the token at position p holds p, so a hit under a text with tokens left out would read wrong rows."""
    with closing(cache_of(FULL, num_blocks=40, tiers=[host_tier("1MiB")])) as cache:
        sequence = running(cache, 4, reserve=40)
        together = cache.persistent_batch([sequence], num_rows=3)
        for new in ([7] * 12, *[[8]] * 8):
            view = together.extend(len(new)).layer(0)
            positions = view.step.positions.float()[:, None, None].expand(-1, 1, 2)
            view.write(k=positions, v=positions)
            together.commit(new, [len(new)])
        sequence.close()
        start = [0, 1, 2, 3]
        assert cache.lookup([*start, *[7] * 12, *[8] * 8, 9]).cached == 24
        for num_sevens in (4, 8):
            assert cache.lookup([*start, *[7] * num_sevens, *[8] * 12, 9]).cached == 4 + num_sevens
        with cache.open([*start, *[7] * 12, *[8] * 8, 9]) as again:
            view = cache.batch([again], [1]).layer(0)
            rows = view["k"][view.block_table[0, :6].long()].reshape(-1, 2)
            assert rows[4:24, 0].tolist() == [float(position) for position in range(4, 24)]
