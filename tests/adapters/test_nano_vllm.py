"""The block manager of nano-vllm: by itself, and under that project's own scheduler where its path is given."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from projects import bare_packages, path_of
from rows import Ints, Rows, next_token

from kvpagoda import BadInput, CheckFailed, NotOwned, OutOfBlocks, StaleHandle
from kvpagoda.adapters.nano_vllm import BlockManager
from kvpagoda.core.prefix import POLICY_NAMES
from raises import raises


@dataclass
class Text:
    """A sequence as the manager sees it."""

    token_ids: list[int]
    seq_id: int = field(default_factory=count().__next__)
    block_table: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_scheduled_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def start(manager: BlockManager, tokens: list[int]) -> Text:
    text = Text(tokens)
    found = manager.can_allocate(text)
    assert found >= 0
    manager.allocate(text, found)
    return text


def compute(manager: BlockManager, text: Text, n: int | None = None) -> None:
    text.num_scheduled_tokens = text.num_tokens - text.num_cached_tokens if n is None else n
    manager.hash_blocks(text)
    text.num_cached_tokens += text.num_scheduled_tokens


def test_the_last_block_is_always_computed() -> None:
    manager = BlockManager(8, 2)
    compute(manager, start(manager, [1, 2, 3, 4]))
    assert [manager.can_allocate(Text([1, 2, 3, 4, *more])) for more in ([], [5], [5, 6])] == [1, 2, 2]


def test_blocks_of_a_prefix_are_shared_and_evicted_only_for_others() -> None:
    manager = BlockManager(4, 2)
    first = start(manager, [1, 2, 3, 4, 5])
    compute(manager, first)
    second = start(manager, [1, 2, 3, 4, 6])
    assert second.block_table[:2] == first.block_table[:2] and second.num_cached_tokens == 4
    assert manager.can_allocate(Text([7])) == -1
    manager.deallocate(first)
    manager.deallocate(second)
    assert manager.num_free_blocks == 4 and manager.can_allocate(Text([1, 2, 3, 4, 5])) == 2
    compute(manager, start(manager, [7, 7, 8, 8, 9, 9, 0]))
    assert manager.can_allocate(Text([1, 2, 3])) == -1
    manager.check()


def test_a_block_that_two_compute_at_once_is_kept_once() -> None:
    manager = BlockManager(6, 2)
    one, two = start(manager, [1, 2, 3]), start(manager, [1, 2, 3])
    assert one.block_table[0] != two.block_table[0]
    compute(manager, one)
    compute(manager, two)
    assert one.block_table[0] == two.block_table[0] and manager.num_free_blocks == 3
    manager.deallocate(one)
    manager.deallocate(two)
    manager.check()


def test_what_has_no_room_changes_nothing() -> None:
    manager = BlockManager(2, 2)
    text = start(manager, [1, 2, 3, 4])
    compute(manager, text)
    text.token_ids.append(5)
    assert not manager.can_append(text)
    with raises(OutOfBlocks, needed=1, available=0):
        manager.may_append(text)
    waiting = Text([9])
    with pytest.raises(OutOfBlocks):
        manager.allocate(waiting, 0)
    assert waiting.block_table == [] and len(text.block_table) == 2
    manager.check()
    manager.deallocate(text)
    with raises(BadInput, needed=text.seq_id):
        manager.deallocate(text)


def test_calls_that_cannot_be_right_are_refused() -> None:
    for numbers in ((0, 2), (2, 0), (2.5, 1)):
        with pytest.raises(BadInput):
            BlockManager(*numbers)  # type: ignore[arg-type]
    manager = BlockManager(4, 2)
    text = start(manager, [1, 2, 3])
    with raises(BadInput, needed=text.seq_id, available=2):
        manager.allocate(text, 0)
    own, text.block_table = text.block_table, [2, 3]
    with pytest.raises(NotOwned):
        manager.deallocate(text)
    text.block_table = own
    compute(manager, text)
    manager.deallocate(text)
    waiting = Text([1, 2, 3])
    assert manager.can_allocate(waiting) == 1
    compute(manager, start(manager, [5] * 8))
    with raises(StaleHandle, needed=1, available=0):
        manager.allocate(waiting, 1)
    manager.check()


def test_check_sees_a_block_in_two_places() -> None:
    manager = BlockManager(4, 2)
    compute(manager, start(manager, [1, 2]))
    manager._free.release(manager._tree.owned_ids())
    with raises(CheckFailed, needed=1, available=1):
        manager.check()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_random_sequences(size: int) -> None:
    """Rows of every sequence are those of its text, whatever is shared, evicted and preempted."""
    random, num_blocks = np.random.default_rng(size), 24
    manager, memory, running = BlockManager(num_blocks, size), Rows(num_blocks * size), list[Text]()
    heads = [random.integers(0, 5, 10 * size).tolist() for _ in range(2)]
    found = 0
    for step in range(1500):
        text = running[random.integers(len(running))] if running else None
        if text is None or random.random() < 0.1:
            head = heads[random.integers(2)][: random.integers(1, 10 * size)]
            text = Text([*head, *random.integers(0, 5, random.integers(1, 4)).tolist()])
            if (cached := manager.can_allocate(text)) < 0:
                continue
            manager.allocate(text, cached)
            running.append(text)
            found += cached
            memory.prove(text.token_ids, places(text, cached * size, size), cached * size, text.seq_id)
        elif random.random() < 0.1 or not manager.can_append(text):
            running.remove(text)
            manager.deallocate(text)
            continue
        else:
            manager.may_append(text)
        end = text.num_cached_tokens + int(random.integers(1, text.num_tokens - text.num_cached_tokens + 1))
        memory.write(text.token_ids, places(text, end, size), text.num_cached_tokens, end)
        compute(manager, text, end - text.num_cached_tokens)
        memory.prove(text.token_ids, places(text, end, size), end, text.seq_id)
        if end == text.num_tokens:
            text.token_ids.append(next_token(text.token_ids, 5))
        if step % 10 == 0:
            manager.check()
            for one in running:
                memory.prove(one.token_ids, places(one, one.num_cached_tokens, size), one.num_cached_tokens, one.seq_id)
    assert found > 100


# -- under the project's own scheduler -----------------------------------------------------------------------------------


@pytest.fixture
def nano_vllm() -> Iterator[Any]:
    path = path_of("KVPAGODA_NANO_VLLM", "nanovllm/engine/scheduler.py")
    pytest.importorskip("transformers")
    pytest.importorskip("xxhash")
    with bare_packages({"nanovllm": path / "nanovllm"}):
        names = {name: importlib.import_module(f"nanovllm.engine.{name}") for name in ("scheduler", "sequence")}
        yield SimpleNamespace(**names, sampling=importlib.import_module("nanovllm.sampling_params").SamplingParams)


def places(seq: Any, end: int, size: int) -> Ints:
    """The row of each of the first ``end`` tokens, as the project's model runner maps them."""
    at = np.arange(end)
    return np.array(seq.block_table, np.int64)[at // size] * size + at % size


class Run:
    """One random workload through the project's scheduler, every row proved before it is read and after it is written."""

    def __init__(self, project: Any, seed: int, manager: type | None) -> None:
        self.random = np.random.default_rng(seed)
        self.size = int(self.random.choice([1, 2, 4, 16])) if manager else 4
        self.longest = 40 * self.size
        blocks = int(self.random.integers(45, 120))
        project.sequence.Sequence.block_size = self.size
        if manager is not None:
            project.scheduler.BlockManager = manager
        config = SimpleNamespace(
            max_num_seqs=int(self.random.integers(2, 12)), eos=-1, kvcache_block_size=self.size,
            max_num_batched_tokens=int(self.random.integers(8, 30 * self.size + 9)), num_kvcache_blocks=blocks,
        )  # fmt: skip
        self.project, self.scheduler = project, project.scheduler.Scheduler(config)
        self.rows, self.computed, self.preempted = Rows(blocks * self.size), 0, 0
        self.outputs: dict[int, list[int]] = {}
        heads = [self.random.integers(0, 9, self.longest // 2).tolist() for _ in range(3)]
        self.texts = []
        for _ in range(50):
            head = heads[self.random.integers(3)][: self.random.integers(1, self.longest // 2)]
            self.texts.append([*head, *self.random.integers(0, 9, self.random.integers(1, 12)).tolist()])

    def run(self) -> Run:
        waiting = list(enumerate(self.texts))
        numbers = {}
        while waiting or not self.scheduler.is_finished():
            for number, text in waiting[: self.random.integers(1, 4)]:
                most = int(self.random.integers(1, self.longest - len(text)))
                seq = self.project.sequence.Sequence(text, self.project.sampling(max_tokens=most, ignore_eos=True))
                numbers[seq.seq_id] = number
                self.scheduler.add(seq)
                waiting.pop(0)
            self.step()
        return self

    def step(self) -> None:
        seqs, is_prefill = self.scheduler.schedule()
        spans = [(seq, seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens) for seq in seqs]
        if not is_prefill:
            spans = [(seq, len(seq) - 1, len(seq)) for seq in seqs]
        for seq, start, end in spans:
            self.rows.prove(seq.token_ids, places(seq, start, self.size), start, seq.seq_id)
            self.rows.write(seq.token_ids, places(seq, end, self.size), start, end)
            self.computed += end - start
        for seq, _, end in spans:
            self.rows.prove(seq.token_ids, places(seq, end, self.size), end, seq.seq_id)
        self.scheduler.postprocess(seqs, [next_token(seq.token_ids, 9) for seq in seqs], is_prefill)
        for seq in seqs:
            if seq.is_finished:
                self.outputs[seq.seq_id] = seq.token_ids


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_of_its_own_scheduler(nano_vllm: Any, seed: int) -> None:
    checks = count()

    class Checked(BlockManager):
        def __init__(self, num_blocks: int, block_size: int) -> None:
            policies = [name for name in POLICY_NAMES if name not in ("priority", "ttl")]
            super().__init__(num_blocks, block_size, policies[seed % len(policies)])

        def hash_blocks(self, seq: Any) -> None:
            super().hash_blocks(seq)
            if next(checks) % 7 == 0:
                self.check()

    run = Run(nano_vllm, seed, Checked).run()
    manager = run.scheduler.block_manager
    manager.check()
    assert isinstance(manager, Checked) and len(run.outputs) == len(run.texts)
    assert manager.num_free_blocks == manager.num_blocks and not manager._running
