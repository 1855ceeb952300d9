"""With a device, what a step needs there goes in one copy and one launch, and the device has the host's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpagoda import KVCache
from kvpagoda.core.batch.step_buffers import StepBuffers
from kvpagoda.core.cache.sequence import Sequence
from kvpagoda.core.memory.staging import NUM_SLOTS
from kvpagoda.core.memory.writes import Writes
from kvpagoda.errors import BadInput, OutOfBlocks, RetryLater
from late_device import ARRAYS, Apart, Late, LateEvent, assert_as_on_the_host, read
from test_persistent_batch import DEEP, FULL, KINDS, SIZES, STATE, WINDOW, cache_of, running

MODELS = {
    "full": (FULL,), "windows": (WINDOW, FULL), "states": (STATE, STATE, STATE, FULL), "states that go back": (DEEP, FULL),
}  # fmt: skip
ROWS, SIZE = 6, 4
OF_GROUP = ("cache_seqlens", "slot_mapping", "kv_last_page_len")


def late_cache(*kinds: Any, **arguments: Any) -> tuple[KVCache, Late]:
    """Return a cache whose batches have their arrays on a late device, and these."""
    cache, arrays = cache_of(*kinds, **{"num_blocks": 400, "max_context": 200, **arguments}), Late()
    cache.core.memory.arrays = cache._step_buffers.arrays = arrays
    return cache, arrays


def nbytes_of(words: int, runs: int) -> int:
    return -(-words // 2) * 8 + 32 * runs


@pytest.mark.parametrize("tokens_per_row", [None, 1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_a_steady_step_is_one_upload_and_one_spread(model: str, tokens_per_row: int | None) -> None:
    """From the second step on, whichever arrays the kernels read, also when sequences join and leave."""
    cache, arrays = late_cache(*MODELS[model])
    batch_of_rows = cache.persistent_batch(num_rows=ROWS, tokens_per_row=tokens_per_row)
    names = (*ARRAYS, "state_writes")
    addresses = set()
    for step in range(40):
        members = batch_of_rows.sequences
        if step in (0, 1, 7, 8, 19, 30):
            batch_of_rows.add(running(cache, 3 + 5 * step % 17, step))
        if step in (12, 25):
            batch_of_rows.remove(members[0])
            members[0].close()
        before, flattened = len(arrays.sent), arrays.flattened
        batch = batch_of_rows.extend()
        found = read(batch, names)
        assert step < 1 or len(arrays.sent) == before + 1, f"step {step}: {len(arrays.sent) - before} uploads"
        assert arrays.flattened - flattened <= sum(not group.growth.is_state for group in cache.core.groups)
        addresses.add(tuple((name, one.data_ptr()) for name, one in found.items()))
        arrays.wait()
        assert_as_on_the_host(batch, found, names)
        batch_of_rows.commit([step % 50] * len(batch_of_rows.sequences))
    assert len(addresses) == 1


def test_bytes_of_each_upload() -> None:
    """Of a decode step: the arrays that change, a run for each, and the cells of the blocks that begin."""
    cache, arrays = late_cache(FULL, max_context=200)
    members = [running(cache, 5 + i % 3, 10 * i) for i in range(ROWS)]
    together = cache.persistent_batch(members)
    for step in range(30):
        begun = sum(member.length % SIZE == 0 for member in members)
        read(together.extend(), ARRAYS)
        every = 1 + len(OF_GROUP)  # with positions
        words, runs = ROWS * every, every
        if begun:  # kv_indptr changes, and a cell of each of these rows
            words, runs = words + ROWS + 1 + begun, runs + 1 + begun
        assert step < 2 or arrays.sent[-1] == nbytes_of(words, runs)
        together.commit([step] * ROWS)


def test_a_row_that_is_renewed_goes_along() -> None:
    cache, arrays = late_cache(FULL)
    first, second, third = (running(cache, length, 10 * length) for length in (6, 10, 17))
    together = cache.persistent_batch([first, second], num_rows=3)
    for _ in range(3):
        read(together.extend())
        together.commit([1, 2])
    together.add(third)
    arrays.sent.clear()
    read(together.extend())
    of_rows = len(OF_GROUP) + 3  # positions, and as there are other rows now, request_slots and request_ids
    cells, indptr = 5, 2  # of the step and of the group
    assert arrays.sent == [nbytes_of(3 * of_rows + 4 * indptr + cells, of_rows + indptr + 1)]


def test_pieces_of_prompts_and_other_sequences_in_each_step() -> None:
    """``KVCache.batch``: other rows, and other numbers of tokens, in every step."""
    random = np.random.default_rng(5)
    cache, arrays = late_cache(FULL, WINDOW, STATE, max_requests=8, step_checkpoints=4)
    sequences = [cache.open([(7 * i + j) % 100 for j in range(60)], capacity=0) for i in range(8)]
    names = (*ARRAYS, "state_writes", "checkpoints")
    for step in range(25):
        chosen = [sequences[i] for i in random.permutation(8)[: random.integers(1, 9)] if sequences[i].length < 100]
        counts = [int(random.integers(1, 9)) for _ in chosen]
        for sequence, count in zip(chosen, counts):
            sequence.extend(count)
        before = len(arrays.sent)
        batch = cache.batch(chosen, counts, pad_to=len(chosen) + step % 3)
        found = read(batch, names)
        assert step < 1 or len(arrays.sent) == before + 1
        arrays.wait()
        assert_as_on_the_host(batch, found, names)
        for sequence, count in zip(chosen, counts):
            prompt = [(7 * sequences.index(sequence) + j) % 100 for j in range(60)]
            left = prompt[sequence.length : sequence.length + count]
            sequence.commit(left + [1] * (count - len(left)))


@pytest.mark.parametrize("name", KINDS)
def test_the_device_has_the_hosts_arrays_in_a_random_life(name: str) -> None:
    """Each step reads some of the arrays: what was not read before is sent by itself, what is no longer read not at all."""
    random = np.random.default_rng([3, [*KINDS].index(name)])
    cache = cache_of(*KINDS[name], **SIZES[name])
    arrays = Late()
    cache.core.memory.arrays = cache._step_buffers.arrays = arrays
    together = [cache.persistent_batch(num_rows=4), cache.persistent_batch(num_rows=3, tokens_per_row=2)]
    open_ones: list[Sequence] = []
    steps = most = 0
    for _ in range(300):
        chance = random.random()
        try:
            if chance < 0.15:
                open_ones.append(running(cache, int(random.integers(1, 20)), int(random.integers(0, 3))))
                where = together[random.integers(2)]
                if len(where.sequences) < where.num_rows and random.random() < 0.7:
                    where.add(open_ones[-1])
            elif chance < 0.25 and open_ones:
                sequence = open_ones.pop(random.integers(len(open_ones)))
                for where in together:
                    if sequence in where.sequences:
                        where.remove(sequence)
                sequence.close()
            elif chance < 0.35 and open_ones:
                open_ones[random.integers(len(open_ones))].rewind(int(random.integers(1, 4)))
            elif chance < 0.42 and open_ones:
                open_ones.append(open_ones[random.integers(len(open_ones))].fork())
            else:
                steps += 1
                names = tuple(one for one in (*ARRAYS, "state_writes", "checkpoints") if random.random() < 0.6)
                batch, sequences = None, []
                if chance < 0.7 and open_ones:
                    sequences = [open_ones[i] for i in random.permutation(len(open_ones))[:3]]
                    for sequence in sequences:
                        sequence.extend(2)
                    batch = cache.batch(sequences, [2] * len(sequences))
                else:
                    where = together[random.integers(2)]
                    batch = where.extend()
                found = read(batch, names)
                if random.random() < 0.5:
                    arrays.wait()
                    assert_as_on_the_host(batch, found, names)
                for sequence in sequences:
                    sequence.commit([1, 2][: random.integers(0, 3)])
                if not sequences and where.sequences:
                    where.commit([1] * len(where.sequences))
        except (BadInput, OutOfBlocks, RetryLater):
            if open_ones and random.random() < 0.5:
                longest = max(open_ones, key=lambda one: one.length)
                open_ones.remove(longest)
                for where in together:
                    if longest in where.sequences:
                        where.remove(longest)
                longest.close()
        most = max(most, len(arrays.stream))
    assert steps > 100 and most > 10
    cache.check()


def test_wide_arrays_are_sent_in_whole() -> None:
    """As slots are in groups of 2^31 rows or more. More words than the host has room for at first are sent, too."""
    buffers = StepBuffers(Apart())
    for step in range(3):
        values, narrow = np.arange(5) * 3_000_000_000 + step, np.arange(9_000) + step
        buffers.begin()
        wide, other = buffers.put("wide", values, np.int64), buffers.put("narrow", narrow)
        buffers.send()
        assert wide.tolist() == values.tolist() and other.tolist() == narrow.tolist()
    again = buffers.put("narrow", narrow * 2)
    assert buffers.put("narrow", narrow * 3) is again
    buffers.send()
    assert again.tolist() == (narrow * 3).tolist()


def test_an_array_that_is_no_longer_read_is_no_longer_sent() -> None:
    cache, arrays = late_cache(FULL)
    together = cache.persistent_batch([running(cache, 5)])
    sizes = []
    for step in range(40):
        read(together.extend(), ARRAYS if step < 3 else ("cache_seqlens",))
        sizes.append(arrays.sent[-1])
        together.commit([1])
    assert sizes[5] > nbytes_of(2, 2) == sizes[-1]  # positions and cache_seqlens
    before = len(arrays.sent)
    found = read(batch := together.extend(), ARRAYS)
    assert len(arrays.sent) > before + 1
    arrays.wait()
    assert_as_on_the_host(batch, found)


def test_the_host_waits_only_for_the_oldest_slot_of_a_full_ring() -> None:
    """It may be as many uploads ahead as there are slots; then the device does one, and not all."""
    cache, arrays = late_cache(FULL, max_context=400)
    together = cache.persistent_batch([running(cache, 5)])
    LateEvent.waits = 0
    read(together.extend())
    together.commit([1])
    while len(arrays.sent) < NUM_SLOTS:
        read(together.extend())
        together.commit([1])
    assert LateEvent.waits == 0
    for ahead in range(1, 5):
        read(batch := together.extend(), ())
        together.commit([1])
        assert LateEvent.waits == ahead and len(arrays.stream) >= 2 * (NUM_SLOTS - 1)
    found = read(batch, ("cache_seqlens",))
    arrays.wait()
    assert found["positions"].tolist() == [batch.before[0]]


@pytest.mark.parametrize("call", ["pack", "take", "put"])
def test_after_a_failure_everything_is_sent_again(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch that is made, or where an array is read for the first time: also in the same batch."""
    cache, arrays = late_cache(FULL, WINDOW)
    first, second = running(cache, 6), running(cache, 9, 50)
    together = cache.persistent_batch([first, second])
    for step in range(3):
        read(together.extend(), ARRAYS if step else ("cache_seqlens",))
        together.commit([1, 2])

    def fails(*_: Any) -> None:
        raise MemoryError("no memory")

    def stops(self: Writes, name: str, target: Any, _: Any) -> None:
        self._names.add(name)
        self._whole.append(target)
        raise KeyboardInterrupt

    where, does = {
        "pack": ("writes.Writes.pack", fails), "take": ("staging.Staging._take", fails), "put": ("writes.Writes.put", stops),
    }[call]  # fmt: skip
    for is_read in (False, True):
        batch = together.extend() if is_read else None
        monkeypatch.setattr(f"kvpagoda.core.memory.{where}", does)
        with pytest.raises((MemoryError, KeyboardInterrupt)):
            _ = together.extend() if batch is None else batch.state_writes
        monkeypatch.undo()
        batch = batch or together.extend()
        found = read(batch, (*ARRAYS, "state_writes")[: None if is_read else -1])
        arrays.wait()
        assert_as_on_the_host(batch, found, ARRAYS)
        together.commit([1, 2])
    assert found["state_writes a"].tolist() == [[0], [0]]
