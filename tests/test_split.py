"""A scheduler without memory, and a worker whose memory is that of a cache that has both, after the copies of each batch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from kvpagoda import (
    BadInput,
    Exhausted,
    KVCache,
    Limits,
    NeedsReset,
    OutOfBlocks,
    Retention,
    Schema,
    StaleHandle,
    Worker,
)
from kvpagoda.core.memory.copies import KINDS, Copies
from kvpagoda.tiers import host_tier
from raises import raises
from random_driver.caches import budget_of, settings_of
from random_driver.schemas import schema_named
from random_driver.split import text_of

LLAMA = dict(model_type="llama", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
SCHEMA = Schema.from_hf_config(LLAMA, dtype="float32")
SIZES: dict[str, Any] = dict(num_blocks=16, max_requests=4)
STATES = schema_named("qwen3_next")
CASES = {
    "full": {},
    "gemma": {},
    "deepseek_v4": {},
    "mamba": {},
    "qwen3_next": dict(
        retention=Retention(checkpoint_every=1, checkpoint_format="int8", rounds_states=True),
        limits=Limits(72, 12, hit_grid=8),
    ),
    "mixed": dict(retention=Retention(checkpoint_format="bfloat16")),
}  # fmt: skip
KIND_IN = {
    "block": "full", "move": "gemma", "state": "qwen3_next", "swap_out": "full", "swap_in": "full", "reset": "mamba",
    "round": "qwen3_next", "clear": "gemma",
}  # fmt: skip


class Twins:
    """A cache with memory beside a scheduler and its worker, with the same calls. ``without``: a kind of copies that the
    worker does not get."""

    def __init__(self, name: str, seed: int, without: str = "") -> None:
        block_size = 8 if name == "deepseek_v4" else 4
        few = replace(
            settings_of(name, 0), num_long=2, max_requests=4, block_size=block_size, order=None, checkpoints=4
        )
        few = replace(few, step_tokens=12, kernel_page=None)
        schema = schema_named(name)
        given = {"limits": Limits(72, 12), **CASES[name]}
        budget = budget_of(
            replace(few, checkpoint_format=getattr(given.get("retention"), "checkpoint_format", None)), schema
        )
        made = [
            KVCache(schema, budget, device, max_requests=4, block_size=block_size, **given)
            for device in ("cpu", "none", "cpu")
        ]
        self.caches, self.worker = made[:2], Worker(made[2])
        self.memories = [made[0].core.memory, made[2].core.memory]
        self.random = np.random.default_rng(seed)
        self.texts = [self.random.integers(0, 50, 40).tolist() for _ in range(3)]
        self.without, self.kinds = without, Counter[str]()
        self.text_of: dict[Any, list[int]] = {}
        self.running: list[tuple[Any, Any]] = []
        self.suspended: list[tuple[Any, Any]] = []

    def both(self, calls: Any) -> tuple[Any, Any] | None:
        """Make both calls; None if there was no room, for both alike."""
        results = []
        for call in calls:
            try:
                results.append(call())
            except Exhausted as error:
                results.append(type(error))
        assert (results[0] is results[1]) == isinstance(results[0], type) or results[0] is None, results
        return None if isinstance(results[0], type) else (results[0], results[1])

    def one(self, pairs: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        return pairs[int(self.random.integers(len(pairs)))]

    def open(self) -> None:
        text = self.texts[int(self.random.integers(3))][: int(self.random.integers(1, 41))]
        text = text + self.random.integers(0, 50, int(self.random.integers(5))).tolist()
        if pair := self.both([lambda one=one: one.open(text, capacity=0) for one in self.caches]):
            assert pair[0].length == pair[1].length
            self.text_of[pair[0]] = text
            self.running.append(pair)

    def step(self) -> None:
        pair = self.one(self.running)
        whole = pair[0]
        left = whole.prompt_length - whole.length
        count = min(int(self.random.integers(1, 13)), left) if left > 0 else 1
        if whole.length + count > 72 or not self.both([lambda one=one: [one.extend(count)] for one in pair]):
            return self.close(pair)
        batches = [cache.batch([one], [count]) for cache, one in zip(self.caches, pair)]
        copies = batches[1].copies
        self.kinds.update(one.kind for one in copies)
        self.worker.apply(text_of(copies, self.without))
        assert not len(batches[0].copies)
        for first, second in zip(*(memory.arenas for memory in self.memories)):
            assert torch.equal(first.buffer, second.buffer), f"memory differs after {copies}"
        self.write(*batches)
        text = self.text_of[whole]
        if len(text) == whole.length:
            text.append(int(self.random.integers(50)))
        tokens = text[whole.length : whole.length + count]
        for one in pair:
            one.commit(tokens)

    def write(self, batch: Any, other: Any) -> None:
        """Fill the blocks and states that the step writes with random numbers, the same in both memories."""
        for layer in {layer.owner for layer in self.caches[0].schema.layers}:
            view, arrays, memory = batch.layer(layer), other.layer(layer), self.worker.layer(layer)
            places = []
            if view.blocks is not None:
                assert view.slot_mapping.tolist() == arrays.slot_mapping.tolist()
                places.append((view.blocks, np.unique(arrays.slot_mapping // view.page_size)))
            if view.state is not None:
                assert batch.state_writes.tolist() == other.state_writes.tolist()
                places.append((view.state, np.unique(other.state_writes)))
            for pool, rows in places:
                for name in pool.fields:
                    values = torch.from_numpy(self.random.random((len(rows), *pool[name].shape[1:]), np.float32))
                    pool[name][torch.from_numpy(rows)] = values.to(pool[name].dtype)
                    memory[name][torch.from_numpy(rows)] = values.to(pool[name].dtype)

    def fork(self) -> None:
        parents = self.one(self.running)
        if pair := self.both([one.fork for one in parents]):
            self.text_of[pair[0]] = self.text_of[parents[0]][: pair[0].length]
            self.running.append(pair)

    def suspend(self) -> None:
        pair = self.one(self.running)
        if self.both([lambda one=one: [one.suspend()] for one in pair]):
            self.running.remove(pair)
            self.suspended.append(pair)

    def resume(self) -> None:
        pair = self.one(self.suspended or self.running)
        if pair in self.suspended and self.both([lambda one=one: [one.resume()] for one in pair]):
            self.suspended.remove(pair)
            self.running.append(pair)

    def close(self, pair: Any = None) -> None:
        pair = pair or self.one(self.running)
        self.running.remove(pair)
        for one in pair:
            one.close()

    def run(self, num_steps: int) -> None:
        calls: list[Callable[[], None]] = [self.step] * 8 + [
            self.fork,
            self.suspend,
            self.resume,
            self.close,
            self.open,
        ]
        for _ in range(num_steps):
            if len(self.running) < 2:
                self.open()
            if self.running:
                calls[int(self.random.integers(len(calls)))]()


@pytest.mark.parametrize("name", CASES)
def test_memory_is_equal_to_the_last_byte(name: str) -> None:
    twins = Twins(name, 0)
    twins.run(400)
    assert {kind for kind, case in KIND_IN.items() if case == name} <= {*twins.kinds}, twins.kinds


@pytest.mark.parametrize(("kind", "name"), KIND_IN.items())
def test_a_kind_of_copies_that_is_left_out_is_seen(kind: str, name: str) -> None:
    with pytest.raises(AssertionError, match="memory differs"):
        Twins(name, 0, kind).run(400)


def test_every_kind_of_copies_is_tested() -> None:
    assert {*KIND_IN, "poison", "wrote", "reads"} == {*KINDS}  # of these in test_sanitizer_written.py


# -- one batch after another -------------------------------------------------------------------------------------------


def made(**more: Any) -> tuple[KVCache, Worker]:
    """Return a scheduler and its worker."""
    settings = {**SIZES, **more}
    return KVCache(SCHEMA, device="none", **settings), Worker(KVCache(SCHEMA, device="cpu", **settings))


def stepped(scheduler: KVCache, sequence: Any, tokens: list[int]) -> Copies:
    """Run a step of ``sequence`` in the scheduler alone, and return its copies."""
    sequence.extend(len(tokens))
    copies: Copies = scheduler.batch([sequence], [len(tokens)]).copies
    sequence.commit(tokens)
    return copies


def three_batches(scheduler: KVCache) -> list[Copies]:
    """Return the copies of three batches. Before the second one a request is forked inside of a block."""
    first = scheduler.open(range(40), reserve=60)
    copies = [stepped(scheduler, first, [*range(40)])]
    fork = first.fork(reserve=60)
    return [*copies, stepped(scheduler, fork, [41]), stepped(scheduler, fork, [42])]


def test_a_copy_names_blocks_and_rows() -> None:
    scheduler, _ = made()
    for copies in three_batches(scheduler)[1:2]:
        (copy,) = copies
        first, fork = (scheduler.core.groups[0].table.cells[slot, 2] for slot in (0, 1))
        assert (copy.kind, copy.group, copy.rows) == ("block", 0, 8)
        assert (copy.source.tolist(), copy.target.tolist()) == ([first], [fork])


@pytest.mark.parametrize("how", ["open", "fork"])
def test_a_request_that_goes_on_inside_a_block_reads_the_rows_before(how: str) -> None:
    scheduler, worker = made()
    keys, size, text = worker.layer(0)["k"], worker.block_size, [*range(1, 41)]

    def step(sequence: Any, tokens: list[int]) -> list[int]:
        sequence.extend(len(tokens))
        batch, end = scheduler.batch([sequence], [len(tokens)]), sequence.length + len(tokens)
        worker.apply(batch.copies.to_json())
        slots = torch.from_numpy(batch.layer(0).slot_mapping)
        keys[slots // size, slots % size, 0, 0] = torch.tensor(tokens).float()
        blocks = torch.from_numpy(batch.layer(0).block_table[0, : -(-end // size)])
        sequence.commit(tokens)
        return [int(key) for key in keys[blocks, :, 0, 0].flatten()[:end]]

    first = scheduler.open(text, reserve=60)
    assert step(first, text) == text
    if how == "open":
        first.close()
    second = scheduler.open([*text, 91, 92, 93], reserve=60) if how == "open" else first.fork(reserve=60)
    assert second.length == 40
    assert step(second, [91, 92, 93]) == [*text, 91, 92, 93]


def test_a_batch_that_is_lost_doubled_or_early_is_refused() -> None:
    scheduler, worker = made()
    first, second, third = three_batches(scheduler)
    worker.apply(first)
    with raises(StaleHandle, needed=(0, 0), available=(0, 1)):
        worker.apply(first)
    with raises(NeedsReset, needed=(0, 1), available=(0, 2)) as caught:
        worker.apply(third)
    assert (caught.value.needed, caught.value.available) == ((0, 1), (0, 2))
    worker.apply(second)
    worker.apply(third)


def test_after_a_reset_of_the_scheduler_a_worker_begins_anew() -> None:
    scheduler, worker = made()
    _, second, _ = three_batches(scheduler)
    scheduler.reset()  # nobody has the requests any more
    sequence = scheduler.open(range(5), reserve=60)
    again = stepped(scheduler, sequence, [*range(5)])
    later = stepped(scheduler, sequence, [6])
    with pytest.raises(NeedsReset):
        worker.apply(later)
    worker.apply(again)
    with pytest.raises(StaleHandle):
        worker.apply(second)
    worker.apply(later)


def test_a_batch_that_raises_loses_no_copies() -> None:
    scheduler, worker = made()
    first = scheduler.open(range(40), reserve=60)
    worker.apply(stepped(scheduler, first, [*range(40)]))
    fork = first.fork(reserve=60)
    for wrong in ([0], [4000], [1, 1]):
        with pytest.raises(BadInput):
            scheduler.batch([fork], wrong)
    together = scheduler.persistent_batch([fork])
    with pytest.raises(OutOfBlocks):
        together.extend(4000)
    batch = together.extend()
    assert [one.kind for one in batch.copies] == ["block"]
    worker.apply(batch.copies)


def test_batches_of_both_kinds_are_counted_together_and_copies_outlive_their_batch() -> None:
    scheduler, worker = made()
    sequence = scheduler.open(range(5), reserve=60)
    sequence.extend(5)
    one = scheduler.batch([sequence], [5])
    sequence.commit(range(5))
    two = scheduler.persistent_batch([sequence]).extend()
    sequence.close()
    assert [(one.copies.resets, one.copies.number), (two.copies.resets, two.copies.number)] == [(0, 0), (0, 1)]
    worker.apply(one.copies)
    worker.apply(two.copies)


def test_a_scheduler_that_was_started_again_needs_a_worker_of_its_own() -> None:
    """The batches of the new one have numbers that the worker expects next; its copies are of other blocks."""
    scheduler, worker = made()
    for copies in three_batches(scheduler):
        worker.apply(copies)
    again, own = made()
    begun = [*three_batches(again), stepped(again, again.open(range(50, 60), reserve=60), [*range(50, 60)])]
    for copies in begun:
        with raises(NeedsReset, needed=ANY, available=ANY):
            worker.apply(copies.to_json())
    for copies in begun:
        own.apply(copies.to_json())
    worker.apply(stepped(scheduler, scheduler.open(range(50, 60), reserve=60), [*range(50, 60)]))


def test_copies_that_fail_halfway_are_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, worker = made()
    first = scheduler.open(range(40), reserve=60)
    worker.apply(stepped(scheduler, first, [*range(40)]))
    first.fork(reserve=60)
    second = first.fork(reserve=60)
    copies = stepped(scheduler, second, [41])
    assert len(copies) == 2
    memory, calls = worker._core.memory, list[int]()
    real = memory.copy

    def copy(*given: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OutOfBlocks("no memory for a copy")
        real(*given)

    monkeypatch.setattr(memory, "copy", copy)
    with pytest.raises(OutOfBlocks):
        worker.apply(copies)
    worker.apply(copies)
    assert len(calls) == 3
    with pytest.raises(StaleHandle):
        worker.apply(copies)


def test_all_that_runs_may_be_suspended_and_others_resumed_between_two_batches() -> None:
    scheduler = KVCache(SCHEMA, device="none", num_blocks=6000, max_requests=2, limits=Limits(swap="1GiB"))
    turns = []
    for first in (0, 1):
        sequence = scheduler.open(np.arange(first, first + 95_000) % 999, capacity=95_001)
        scheduler.batch([sequence], [1])
        sequence.commit(np.arange(first, first + 95_000) % 999)
        sequence.suspend()
        turns.append(sequence)
    first, second = turns
    first.resume()
    scheduler.batch([first], [1])
    first.suspend()
    second.resume()
    second.suspend()
    first.resume()
    copies = scheduler.batch([first], [1]).copies
    assert [one.kind for one in copies] == ["swap_out", "swap_in"] * 2
    assert all(len(one.source) > 5800 for one in copies)


def test_a_scheduler_takes_no_memory_to_suspend_and_measures_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, _ = made()
    guess = scheduler.core.swap.rate.seconds
    monkeypatch.setattr("kvpagoda.core.memory.no_memory.pages", None)
    sequence = scheduler.open(range(40), capacity=40)
    sequence.commit(range(40))
    sequence.suspend()
    sequence.resume()
    assert sequence.length == 40 and scheduler.core.swap.rate.seconds == guess


def test_copies_of_nothing_need_no_swap() -> None:
    scheduler, worker = made(limits=Limits(swap="1KiB"))
    data = json.loads(three_batches(scheduler)[0].to_json())
    worker.apply(json.dumps({**data, "operations": [["swap_out", 0, [], [], 0, 0], ["swap_in", 0, [], [], 0, 0]]}))


def test_blocks_that_are_free_again_are_poisoned() -> None:
    scheduler, worker = made(poison=True)
    sequence = scheduler.open(range(40), capacity=40)
    worker.apply(scheduler.batch([sequence], [40]).copies)
    blocks = scheduler.core.groups[0].table.cells[0, :3].tolist()
    worker.layer(0)["k"][blocks] = 1.0
    sequence.close()  # with nothing committed
    other = scheduler.open([7])
    copies = scheduler.batch([other], [1]).copies
    assert "poison" in {one.kind for one in copies}
    worker.apply(copies.to_json())
    assert worker.layer(0)["k"][blocks].isnan().all()


def test_blocks_that_could_not_be_poisoned_are_not_poisoned_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, worker = made(poison=True)
    sequence = scheduler.open(range(40), capacity=40)
    worker.apply(scheduler.batch([sequence], [40]).copies)
    sequence.close()
    sequence = scheduler.open(range(40), capacity=41)
    copies = scheduler.batch([sequence], [40]).copies
    (arena,) = worker._core.memory.arenas
    with monkeypatch.context() as patch:
        patch.setattr(arena, "poison", None)
        with pytest.raises(TypeError):
            worker.apply(copies)
    sequence.close()
    scheduler.reset()
    sequence = scheduler.open(range(40), capacity=41, reserve=60)
    worker.apply(stepped(scheduler, sequence, [*range(40)]))
    blocks = scheduler.core.groups[0].table.cells[0, :3].tolist()
    worker.layer(0)["k"][blocks] = 1.0
    sequence.fork(reserve=60)
    worker.apply(stepped(scheduler, sequence, [7]))
    assert (worker.layer(0)["k"][blocks] == 1.0).all()


# -- what is refused -----------------------------------------------------------------------------------------------------


def test_a_simulator_that_makes_no_batch_keeps_few_copies() -> None:
    scheduler, worker = made()
    first = scheduler.open(range(40), capacity=40)
    first.commit(range(40))
    most = 0
    for _ in range(4500):
        first.fork().close()
        most = max(most, len(scheduler.core.memory._operations or ()))
    assert 4000 < most < 4200 and scheduler.core.memory._operations is None
    first.extend(1)
    batch = scheduler.batch([first], [1])
    with raises(NeedsReset, needed=0) as caught:
        _ = batch.copies
    assert caught.value.hint
    later = scheduler.batch([first], [1]).copies
    with pytest.raises(NeedsReset):
        worker.apply(later)
    first.close()
    scheduler.reset()
    sequence = scheduler.open([1], capacity=1)
    worker.apply(scheduler.batch([sequence], [1]).copies)


def test_tiers_need_the_bytes() -> None:
    scheduler = KVCache(SCHEMA, device="none", tiers=[host_tier("1MiB", staging="256KiB")], **SIZES)
    batch = scheduler.batch([scheduler.open([1])], [1])
    with raises(BadInput, needed="memory") as caught:
        _ = batch.copies
    assert caught.value.hint
    scheduler.close()


def test_a_worker_takes_a_cache_with_memory_and_closes_it() -> None:
    for wrong in (KVCache(SCHEMA, device="none", **SIZES), KVCache, None):
        with pytest.raises(BadInput):
            Worker(wrong)  # type: ignore[arg-type]
    cache = KVCache(SCHEMA, device="cpu", **SIZES)
    cache.sleep()
    with raises(BadInput, needed="memory"):
        Worker(cache)
    cache.wake()
    worker = Worker(cache)
    with pytest.raises(StaleHandle):
        cache.open([1])
    assert (worker.block_size, worker.plan, str(worker.device)) == (16, cache.plan, "cpu")
    with_tier = KVCache(SCHEMA, device="cpu", tiers=[host_tier("1MiB", staging="256KiB")], **SIZES)
    with raises(BadInput, needed="memory"):
        Worker(with_tier)
    with_tier.close()


@pytest.mark.parametrize(
    "other",
    [dict(num_blocks=17), dict(block_size=8), dict(dtype="bfloat16"), dict(limits=Limits(swap="64KiB"))],
    ids=str,
)
def test_another_plan_is_refused(other: dict[str, Any]) -> None:
    scheduler, _ = made()
    _, worker = made(**other)
    with raises(BadInput, needed=ANY, available=ANY):
        worker.apply(three_batches(scheduler)[0])


def test_ranks_share_the_decisions_of_one_scheduler() -> None:
    rank = SCHEMA.split(tp=2)
    scheduler = KVCache(rank, device="none", **SIZES)
    workers = [Worker(KVCache(rank, device="cpu", **SIZES)) for _ in range(2)]
    for copies in three_batches(scheduler):
        for worker in workers:
            worker.apply(copies.to_json())


def test_copies_as_json_are_the_copies() -> None:
    scheduler, _ = made()
    for copies in three_batches(scheduler):
        text = copies.to_json()
        again = Copies.from_json(text.encode())
        assert again.to_json() == text and (again.plan, again.number) == (copies.plan, copies.number)
        assert [one.source.dtype for one in again] == [np.int32] * len(copies)


BLOCK = ["block", 0, [1], [2], 8, 0]
MALFORMED = [
    [], ["block"], ["blocks", 0, [1], [2], 8, 0], [None, 0, [1], [2], 8, 0], [["block"], 0, [1], [2], 8, 0],
    ["block", -1, [1], [2], 8, 0], ["block", 1, [1], [2], 8, 1], ["block", 0, [1], [2], 8, 9], ["block", True, [1], [2], 8, 0],
    ["block", 0, [0], [2], 8, 0], ["block", 0, [1], [17], 8, 0], ["block", 0, [1], [2**31], 8, 0],
    ["block", 0, [1], [10**30], 8, 0], ["block", 0, [1.0], [2], 8, 0], ["block", 0, [True], [2], 8, 0],
    ["block", 0, ["1"], [2], 8, 0], ["block", 0, 1, 2, 8, 0], ["block", 0, [[1]], [[2]], 8, 0],
    ["block", 0, [1, 2], [3], 8, 0], ["block", 0, [1], [2], -8, 0], ["block", 0, [1], [2], 10**30, 0],
    ["swap_out", 0, [1], [17], 0, 0], ["swap_out", 0, [1, 2], [3], 0, 0], ["swap_in", 0, [17], [1], 0, 0],
    ["swap_in", 0, [1], [1, 2], 0, 0], ["clear", 0, [], [1], 0, 0], ["reset", 0, [1], [1], 0, 0],
    ["round", 0, [], [1], 0, 0], ["poison", 0, [], [0], 0, 0], ["wrote", 0, [1], [], 0, 0], ["wrote", 0, [], [1], 0, 0],
    ["wrote", 0, [1], [17], 0, 0], ["wrote", 0, [1] * 65, [1], 0, 0], ["wrote", 0, [1], [1], 10**30, 0],
    ["wrote", 0, [2**31], [1], 0, 0], ["reads", 0, [], [1], 0, 0], ["reads", 0, [1], [17], 0, 0], {"kind": "block"}, "block",
    7, None,
]  # fmt: skip


@pytest.mark.parametrize("wrong", MALFORMED, ids=str)
def test_a_copy_that_is_out_of_bounds_is_refused_before_any_is_done(wrong: Any) -> None:
    scheduler, worker = made()
    data = json.loads(three_batches(scheduler)[0].to_json())
    worker.layer(0)["k"][1] = 5.0
    with pytest.raises(BadInput):
        worker.apply(json.dumps({**data, "operations": [BLOCK, wrong]}))
    assert not worker.layer(0)["k"][2].any()
    worker.apply(json.dumps({**data, "operations": [BLOCK]}))
    assert (worker.layer(0)["k"][2] == 5.0).all()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", "null", '"text"', "[" * 5000, b"\xff", '{"kvpagoda_copies": 1}'],
    ids=range(9),
)  # fmt: skip
def test_text_that_is_no_copies_is_refused(text: str | bytes) -> None:
    with pytest.raises(BadInput):
        Copies.from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        dict(kvpagoda_copies=2), dict(kvpagoda_copies="1"), dict(plan=None), dict(plan=7), dict(scheduler=7),
        dict(resets=-1), dict(number=-1), dict(number=1.5), dict(number=True), dict(number=10**40), dict(operations=None),
        dict(operations={}), dict(operations="block"), dict(operations=7),
    ],
    ids=str,
)  # fmt: skip
def test_fields_of_other_types_are_refused(change: dict[str, Any]) -> None:
    scheduler, _ = made()
    data = json.loads(three_batches(scheduler)[0].to_json())
    with pytest.raises(BadInput):
        Copies.from_json(json.dumps({**data, **change}))


STATE, AT_REST, FULL = "state", "state at rest", "full"


@pytest.mark.parametrize(
    ("kind", "group", "into", "is_possible"),
    [
        ("state", STATE, AT_REST, True), ("state", AT_REST, STATE, True), ("round", STATE, AT_REST, True),
        ("state", FULL, STATE, False), ("block", STATE, AT_REST, False), ("round", AT_REST, STATE, False),
        ("round", STATE, STATE, False), ("round", FULL, FULL, False), ("round", FULL, AT_REST, False),
        ("swap_out", STATE, AT_REST, False), ("reset", STATE, AT_REST, False), ("clear", STATE, AT_REST, False),
    ],
)  # fmt: skip
def test_states_are_copied_to_states_alone(kind: str, group: str, into: str, is_possible: bool) -> None:
    settings: dict[str, Any] = dict(num_blocks=16, max_requests=4, retention=Retention(checkpoint_format="int8"))
    worker = Worker(KVCache(STATES, device="cpu", **settings))
    groups = worker.plan.groups
    index = {
        STATE if one.growth.is_state else FULL: i for i, one in enumerate(groups) if not one.growth.is_at_rest
    } | {AT_REST: next(i for i, one in enumerate(groups) if one.growth.is_at_rest)}  # fmt: skip
    first, second = (groups[index[name]].first_id for name in (group, into))
    scheduler = KVCache(STATES, device="none", **settings)
    data = json.loads(scheduler.batch([scheduler.open([1], capacity=1)], [1]).copies.to_json())
    source = [] if kind in ("round", "reset", "clear") else [first]
    target = second if kind == "state" else first
    for wrong in (0, groups[index[into if kind == "state" else group]].num_rows):
        with pytest.raises(BadInput):
            copies = [[kind, index[group], source, [wrong], 0, index[into]]]
            worker.apply(json.dumps({**data, "operations": copies}))
    text = json.dumps({**data, "operations": [[kind, index[group], source, [target], 0, index[into]]]})
    if is_possible:
        worker.apply(text)
        return
    with raises(BadInput, needed=kind):
        worker.apply(text)


def test_other_objects_are_no_copies() -> None:
    _, worker = made()
    for wrong in (None, 7, [], {}):
        with raises(BadInput, field="copies", needed=type(wrong).__name__):
            worker.apply(wrong)  # type: ignore[arg-type]


# -- two processes -------------------------------------------------------------------------------------------------------


WORKER = """
import json, sys
import torch
from kvpagoda import KVCache, Schema, Worker

given = json.loads(sys.stdin.readline())
schema = Schema.from_hf_config(given["config"], dtype="float32")
worker = Worker(KVCache(schema, device="cpu", **given["sizes"]))
size = worker.block_size
full, windows = given["layers"]
for line in sys.stdin:
    step = json.loads(line)
    worker.apply(step["copies"])
    read = []
    for layer, (slots, blocks) in zip((full, windows), step["arrays"]):
        keys, slots = worker.layer(layer)["k"], torch.tensor(slots)
        keys[slots // size, slots % size, 0, 0] = torch.tensor(step["tokens"]).float()
        read.append(keys[torch.tensor(blocks), :, 0, 0].flatten().int().tolist())
    print(json.dumps(read), flush=True)
"""


def test_a_scheduler_and_a_worker_in_two_processes() -> None:
    config = dict(
        LLAMA, model_type="gemma3_text", num_hidden_layers=4, head_dim=16, vocab_size=1000, sliding_window=16,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    )  # fmt: skip
    sizes: dict[str, Any] = dict(num_blocks=24, max_requests=3, block_size=8)
    scheduler = KVCache(Schema.from_hf_config(config, dtype="float32"), device="none", **sizes)
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None

    def send(data: Any) -> None:
        process.stdin.write(json.dumps(data) + "\n")
        process.stdin.flush()

    def step(sequence: Any, text: list[int]) -> None:
        """Compute the rest of ``text``, and compare what the worker reads in both kinds of layers."""
        tokens = text[sequence.length :]
        sequence.extend(len(tokens))
        batch, end = scheduler.batch([sequence], [len(tokens)]), len(text)
        views = [batch.layer(layer) for layer in (3, 0)]
        starts = [int(view.kv_start[0]) for view in views]
        arrays = [(view.slot_mapping.tolist(), view.kv_indices.tolist()) for view in views]
        send({"copies": batch.copies.to_json(), "arrays": arrays, "tokens": tokens})
        for start, read in zip(starts, json.loads(process.stdout.readline())):
            assert read[: end - start] == text[start:]
        sequence.commit(tokens)

    with process:
        send({"config": config, "sizes": sizes, "layers": [3, 0]})
        text = [*range(1, 41)]
        first = scheduler.open(text[:37], reserve=60)
        step(first, text[:20])
        step(first, text[:37])
        second = scheduler.open([*text[:36], 71, 72], reserve=60)
        assert second.length
        step(second, [*text[:36], 71, 72])
        fork = first.fork(reserve=60)
        for token in range(80, 90):
            step(fork, [*fork.tokens.tolist(), token])
            step(first, [*first.tokens.tolist(), token + 10])
        first.suspend()
        step(second, [*second.tokens.tolist(), 75])
        first.resume()
        step(first, [*first.tokens.tolist(), 99])
        process.stdin.close()
    assert process.returncode == 0
