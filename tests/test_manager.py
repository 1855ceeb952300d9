"""The lifecycle of requests over every layer kind: admission, room for tokens, and one owner for every block."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from kvpagoda import Limits, Retention
from kvpagoda.arrays import Ids
from kvpagoda.core.cache.sequence import Sequence
from kvpagoda.core.kv_cache import KVCache
from kvpagoda.errors import (
    BadInput,
    CheckFailed,
    Exhausted,
    NeverFits,
    OutOfBlocks,
    RetryLater,
    SchemaError,
    StaleHandle,
)
from kvpagoda.schema import (
    Attention,
    Compressed,
    Growth,
    IndexKeys,
    Latent,
    Layer,
    LayerKind,
    Recurrent,
    Rows,
    Schema,
    Shared,
)
from raises import raises


def schema_of(*kinds: LayerKind | tuple[LayerKind, ...], **limits: int) -> Schema:
    layers = [kind if isinstance(kind, tuple) else (kind,) for kind in kinds]
    return Schema(tuple(Layer(i, type(k[0]).__name__, k) for i, k in enumerate(layers)), "test", **limits)


FULL = Attention(2, 4, 4, "float32")
WINDOW = Attention(1, 4, 4, "float32", Growth(window=10))
CHUNK = Attention(1, 4, 4, "float32", Growth(chunk=12))
STATE = Recurrent((Rows("conv", (6, 3), "float32"), Rows("recurrent", (2, 4, 4), "float32")))
MIXED = schema_of(FULL, WINDOW, (FULL, STATE), CHUNK, Shared(0), vocab_size=1000)
SCHEMAS = {
    "full": schema_of(FULL),
    "window": schema_of(WINDOW),
    "mixed": MIXED,
    "latent": schema_of(Latent(8, 4, "float32", indexer=IndexKeys(4))),
    "compressed": schema_of(Compressed(16, 8, "float32", 4, IndexKeys(8)), Compressed(16, 8, "float32", 8)),
    "state": schema_of(STATE),
}

SHARING = {
    "mixed": MIXED,
    "full and state": schema_of(FULL, Recurrent((Rows("recurrent", (9, 8, 4), "float32"),))),
    "windows": schema_of(WINDOW, WINDOW, WINDOW, CHUNK),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_open_extend_commit_close_frees_everything(name: str) -> None:
    cache = KVCache(SCHEMAS[name], num_blocks=12, max_requests=2, device="cpu")
    with cache.open(range(20)) as sequence:
        assert sequence.cached_tokens == 0 and sequence.capacity >= 20
        sequence.commit(range(20))
        sequence.extend(5)
        sequence.commit(range(5))
        assert sequence.length == 25 and sequence.tokens.tolist() == [*range(20), *range(5)]
        cache.check()
    cache.check()
    assert cache.stats().running == 0 and cache.stats().computed_tokens == 25
    assert all(group.free + group.evictable == group.total and not group.outstanding for group in cache.stats().groups)


def test_the_plan_says_what_the_arenas_take() -> None:
    cache = KVCache(MIXED, "64KiB", max_requests=3, device="cpu")
    assert cache.core.memory.nbytes == cache.plan.nbytes <= 64 * 1024
    split = KVCache(MIXED, "64KiB", max_requests=3, device="cpu", order="layer")
    assert split.core.memory.nbytes == split.plan.nbytes <= 64 * 1024
    assert not split.plan.num_sectors and cache.plan.num_sectors


def test_arguments_may_be_positional() -> None:
    full = SCHEMAS["full"]
    by_place = KVCache(full, "64KiB", "none", 3, 8, "fifo", (), "bfloat16")
    by_name = KVCache(
        full, budget="64KiB", device="none", max_requests=3, block_size=8, policy="fifo", tiers=(), dtype="bfloat16"
    )
    assert by_place.plan == by_name.plan != KVCache(full, "64KiB", "none", 3, 8).plan
    assert by_place.device is None


def test_a_window_group_frees_what_slid_out() -> None:
    cache = KVCache(
        SCHEMAS["window"], num_blocks=4, max_requests=2, block_size=4, device="cpu", limits=Limits(step_tokens=1)
    )
    sequence = cache.open([1], reserve=100)
    for i in range(100):
        sequence.extend(1)
        sequence.commit([1 if i == 0 else i % 7])
        cache.check()
        assert cache.stats().groups[0].held <= 4
    first_read = 100 - 10 + 1
    ledger = cache.core.groups[0]
    assert (
        ledger.first[sequence.slot] == first_read // 4
        and not ledger.table.cells[sequence.slot, : first_read // 4].any()
    )


def test_out_of_blocks_changes_nothing() -> None:
    cache = KVCache(MIXED, num_blocks=3, max_requests=2, block_size=8, device="cpu")
    first, second = cache.open(range(8)), cache.open(range(8))
    before = [ledger.table.cells.copy() for ledger in cache.core.groups]
    with raises(OutOfBlocks, needed=2, available=1, group="full"):
        first.extend(24)
    assert all(np.array_equal(old, ledger.table.cells) for old, ledger in zip(before, cache.core.groups))
    first.extend(16)
    with raises(OutOfBlocks, needed=123, available=0, group="full"):
        first.extend(1000)
    with raises(BadInput, field="the number of tokens to extend by", needed=-1, available=0):
        first.extend(-1)
    second.close()
    first.extend(24)
    cache.check()


def test_a_request_grows_no_further_than_the_model_takes() -> None:
    cache = KVCache(replace(SCHEMAS["full"], max_positions=10), num_blocks=9, block_size=4, device="none")
    sequence = cache.open(range(8))
    with raises(NeverFits, needed=12, available=10):
        sequence.extend(12)
    sequence.extend(10)
    cache.check()


def test_retry_later_and_never_fits() -> None:
    cache = KVCache(SCHEMAS["full"], num_blocks=4, max_requests=2, block_size=4, device="cpu")
    with raises(NeverFits, needed=17, available=16):
        cache.open(range(17))
    holder = cache.open(range(4), reserve=12)
    with raises(RetryLater, needed=2, available=1, group="full"):
        cache.open(range(8))
    other = cache.open(range(4))
    with raises(RetryLater, needed=1, available=0):
        cache.open([1])
    with pytest.raises(OutOfBlocks):
        other.extend(8)
    holder.extend(12)  # the reserved blocks are available
    cache.check()


def test_a_window_group_too_small_for_the_prompt_at_once_says_so() -> None:
    cache = KVCache(
        SCHEMAS["window"], num_blocks=100, max_requests=1, block_size=4, device="cpu", limits=Limits(step_tokens=4)
    )
    with raises(NeverFits, needed=50, available=9, group="window(10)"):
        cache.open(range(200))
    sequence = cache.open(range(200), capacity=4)
    for start in range(0, 200, 4):
        sequence.extend(4)
        sequence.commit(range(start, start + 4))
    assert sequence.length == 200


def test_reset_forgets_what_was_kept_and_only_when_nothing_runs() -> None:
    cache = KVCache(MIXED, num_blocks=40, max_requests=4, block_size=4, device="cpu")
    for _ in range(2):
        with cache.open(range(9), capacity=0) as sequence:
            for end in (8, 9)[sequence.length // 8 :]:
                sequence.extend(end - sequence.length)
                sequence.commit(range(sequence.length, end))
            with raises(RetryLater, available=[0]):
                cache.reset()
    assert cache.stats().cached_tokens == 8
    cache.reset()
    cache.check()
    assert all(group.free == group.total for group in cache.stats().groups) and cache.open(range(9)).cached_tokens == 0


def test_a_twelve_token_prompt_uses_one_block_per_group() -> None:
    cache = KVCache(MIXED, num_blocks=9, max_requests=4, device="cpu")
    cache.open(range(12))
    assert [group.held for group in cache.stats().groups] == [1, 1, 1, 1]


def test_stale_handles_raise() -> None:
    cache = KVCache(SCHEMAS["full"], num_blocks=4, max_requests=2, device="cpu")
    sequence = cache.open([1, 2])
    batch = cache.batch([sequence], [2])
    with pytest.raises(BadInput):
        cache.batch([sequence], [99])
    batch.layer(0)  # a call that raised changed nothing
    cache.batch([sequence], [2])
    with raises(StaleHandle, needed="batch", available="over"):
        batch.layer(0)
    batch = cache.batch([sequence], [2])
    sequence.close()
    calls = sequence.close, lambda: sequence.extend(1), lambda: sequence.commit([1]), lambda: batch.layer(0)
    for call in (*calls, lambda: cache.step_limit(sequence), lambda: cache.step_limit([sequence])):
        with pytest.raises(StaleHandle):
            call()
    cache.close()
    with pytest.raises(StaleHandle):
        cache.open([1])


def test_an_exception_inside_with_closes_the_request() -> None:
    cache = KVCache(MIXED, num_blocks=8, max_requests=2, device="cpu")
    with pytest.raises(ZeroDivisionError), cache.open(range(9)):
        raise ZeroDivisionError
    cache.check()
    assert cache.stats().running == 0


@pytest.mark.parametrize(
    ("tokens", "needed", "available"),
    [
        ([], 1, 0),
        ([-1], -1, 999),
        ([1000], 1000, 999),
        ([1.5], np.dtype(float), [1]),
        ([[1]], np.dtype(int), [1, 1]),
        (["a"], np.dtype("<U1"), [1]),
        ([2**40], 2**40, 999),
    ],
)
def test_bad_tokens_are_refused_before_anything_changed(tokens: object, needed: object, available: object) -> None:
    cache = KVCache(MIXED, num_blocks=8, max_requests=2, device="cpu")
    with raises(BadInput, needed=needed, available=available):
        cache.open(tokens)
    cache.check()
    assert cache.stats().opened == 0


def test_a_closed_cache_answers_nothing() -> None:
    cache = KVCache(MIXED, num_blocks=8, max_requests=2, device="cpu")
    cache.close()
    for call in (cache.open, cache.lookup, cache.pin, cache.prefetch):
        with raises(StaleHandle, needed="cache", available="closed"):
            call([1, 2])
    cache.close()


def test_bad_sizes_are_refused() -> None:
    with raises(NeverFits, needed=10240, available=2048):
        KVCache(MIXED, "2KiB", max_requests=1)
    with raises(BadInput, needed="lots"):
        KVCache(MIXED, "lots")
    with raises(BadInput, field="max_requests", needed=0, available=1):
        KVCache(MIXED, "1MiB", max_requests=0)
    with raises(BadInput, field="a size (bytes, or text such as '2GiB')", needed=2**80, available=2**63 - 1):
        KVCache(MIXED, 2**80)
    for huge in ({"num_blocks": 2**40}, {"budget": "1MiB", "max_requests": 2**40}):
        with raises(BadInput, needed=2**40, available=2**31 - 1):
            KVCache(MIXED, **huge)
    with raises(Exhausted, needed=1099511627776000):
        KVCache(SCHEMAS["full"], "1000TiB", device="cpu", block_size=2**18)
    with raises(BadInput, needed=5286113594880, available=2**31 - 1):
        KVCache(MIXED, "1000TiB", device="cpu")
    for name, wrong in (("tiers", 5), ("tiers", [5]), ("kernels", 5), ("events", 5)):
        with raises(BadInput, field=ANY, needed="int" if name == "events" else 5):
            KVCache(MIXED, "1MiB", **{name: wrong})
    with raises(BadInput, field="block_size", needed=12, available=8):
        KVCache(SCHEMAS["compressed"], "1MiB", block_size=12)
    with raises(BadInput, needed=1, available=2):
        KVCache(MIXED, "1MiB", num_blocks=3)
    with raises(SchemaError, needed="float33", available=ANY):
        KVCache(MIXED, "1MiB", dtype="float33")
    for device in ("cuda:99", "gpu", 99):
        with raises(BadInput, needed=device, available=("cpu", "cuda", "cuda:0", "none")):
            KVCache(MIXED, "1MiB", device=device)
    with raises(BadInput, field="schema", needed="dict"):
        KVCache({"model_type": "llama"}, "1MiB")


def test_commit_checks_room_and_the_prompt() -> None:
    cache = KVCache(SCHEMAS["full"], num_blocks=4, max_requests=2, block_size=4, device="cpu")
    sequence = cache.open([5, 6, 7])
    with raises(BadInput, needed=5, available=4):
        sequence.commit([5, 6, 7, 8, 9])
    with raises(BadInput, needed=9, available=6):
        sequence.commit([5, 9])
    assert sequence.length == 0
    sequence.commit([5, 6])
    sequence.commit([7, 1])
    assert sequence.tokens.tolist() == [5, 6, 7, 1]


def test_index_arrays_in_both_dialects() -> None:
    schema = schema_of(FULL, Attention(1, 4, 4, "float32", Growth(window=5)), STATE)
    cache = KVCache(schema, num_blocks=20, max_requests=4, block_size=4, device="cpu")
    a, b = cache.open(range(11)), cache.open(range(3))
    a.commit(range(11))
    b.commit(range(2))
    a.extend(1)
    batch = cache.batch([a, b], [1, 1], pad_to=3)
    table_a, table_b = (cache.core.groups[0].table.cells[s.slot] for s in (a, b))
    full, window = batch.layer(0), batch.layer(1)
    assert full.cache_seqlens.tolist() == [12, 3, 0] and batch.positions.tolist() == [11, 2, 0]
    assert full.slot_mapping.tolist() == [table_a[2] * 4 + 3, table_b[0] * 4 + 2, 0]
    assert full.block_table[0, :3].tolist() == table_a[:3].tolist() and full.block_table[2, 0] == 0
    assert full.kv_indptr.tolist() == [0, 3, 4, 4] and full.kv_last_page_len.tolist() == [4, 3, 0]
    assert full.kv_indices.tolist() == [*table_a[:3], table_b[0]]
    states = batch.state_indices.tolist()
    assert states[2] == 0 and len({*states}) == 3  # padded rows use the padding block, which no request has
    assert batch.step.request_slots.tolist() == [a.slot, b.slot, -1]
    # the token at 11 reads 7..11: the first block (0..3) has slid out, the second starts at 4
    assert window.kv_indptr.tolist() == [0, 2, 3, 3] and window.kv_start.tolist() == [4, 0, 0]
    assert window.block_table[0, 0] == 0
    assert window.kv_indices.tolist() == [*window.block_table[0, 1:3].tolist(), int(window.block_table[1, 0])]
    with raises(BadInput, needed="layer 2 (Recurrent)"):
        _ = batch.layer(2).block_table
    with raises(BadInput, needed=7, available=[0, 1, 2]):
        batch.layer(7)
    with raises(BadInput, needed=2, available=1):
        cache.batch([a, a], [1, 1])
    with raises(BadInput, needed=2, available=1):
        cache.batch([a, b], [1, 1], pad_to=1)
    with raises(BadInput, needed=5, available=4):
        cache.batch([b], [3])
    with raises(BadInput, field="new_tokens of a sequence", available=1):
        cache.batch([a, b], None)
    with raises(BadInput, needed="NoneType"):
        cache.batch(None, [1])
    assert cache.batch(a, 1).positions.tolist() == [11]


def test_step_buffers_keep_their_addresses() -> None:
    cache = KVCache(MIXED, num_blocks=30, max_requests=8, device="cpu")
    sequences = [cache.open(range(5 + i)) for i in range(8)]
    seen = set()
    for n in (1, 8, 3):
        view = cache.batch(sequences[:n], [1] * n, pad_to=8).layer(0)
        names = ("block_table", "cache_seqlens", "slot_mapping", "kv_indptr", "kv_last_page_len")
        tensors = [getattr(view, name) for name in names]
        seen.add(tuple((t.data_ptr(), t.shape, t.stride()) for t in tensors))
    assert len(seen) == 1


def test_check_names_what_is_wrong() -> None:
    cache = KVCache(SCHEMAS["full"], num_blocks=6, max_requests=2, block_size=4, device="cpu")
    a, b = cache.open(range(4)), cache.open(range(4))
    ledger = cache.core.groups[0]
    mine, theirs = int(ledger.table.cells[a.slot, 0]), int(ledger.table.cells[b.slot, 0])
    ledger.table.cells[a.slot, 0] = theirs
    with raises(CheckFailed, available=[1, 2], group="group 'full'"):
        cache.check()
    ledger.table.cells[a.slot, 0] = mine
    cache.check()
    ledger.outstanding += 1
    with raises(CheckFailed, needed=0, available=1, group="group 'full'"):
        cache.check()


def test_freed_memory_is_poisoned_and_states_are_reset() -> None:
    cache = KVCache(MIXED, num_blocks=8, max_requests=1, device="cpu", poison=True)
    sequence = cache.open(range(20))
    view = cache.batch([sequence], [20]).layer(2)
    row = int(view.state_indices[0])
    assert torch.equal(view["recurrent"][row], torch.zeros(1, 2, 4, 4))
    view["k"].fill_(1.0)
    block = int(view.block_table[0, 0])
    view["recurrent"][row] = 7.0
    sequence.close()
    assert view["k"][block].isnan().all() and view["recurrent"][row].isnan().all()
    with cache.open([1]) as again:
        view = cache.batch([again], [1]).layer(2)
        assert not view["recurrent"][view.state_indices[0]].any()


class CopyFailed(RetryLater, BadInput):
    """The error of a copy that fails in the middle."""


@pytest.mark.parametrize("name", ["full", "window", "mixed", "state"])
def test_an_error_while_copying_leaves_everything_owned_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_copies = 0

    def copy(group: int, sources: Ids, targets: Ids, rows: int | None = None) -> None:
        nonlocal num_copies
        num_copies += 1
        if num_copies % 3 == 0:
            raise CopyFailed(f"copy {num_copies}")

    cache = KVCache(
        SCHEMAS[name], num_blocks=24, max_requests=6, block_size=4, device="none", limits=Limits(step_tokens=9),
        retention=Retention(checkpoint_every=2),
    )  # fmt: skip
    monkeypatch.setattr(cache.core.memory, "copy", copy)
    traffic(cache, 1500, seed=7, engine=None)
    assert num_copies > 40


def row_values(tokens: np.ndarray, namespace: int) -> np.ndarray:
    """Return what the row at each position must hold, float32 ``[n]``: a function of all tokens up to it, so that the
    rows of no other text are the same."""
    mixed = np.cumsum((tokens.astype(np.int64) + 1) * (np.arange(len(tokens)) % 97 + 3))
    return ((mixed % 65_521) + 70_000 * namespace).astype(np.float32)


class FakeEngine:
    """An engine that writes rows which are a function of (namespace, tokens, layer, position), and compares all rows
    that attention would read. States hold the value of the last token."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.spaces: dict[int, int] = {}

    def step(self, sequences: list[Sequence], new: list[np.ndarray]) -> None:
        """Make a step in which ``sequences[i]`` computes the tokens ``new[i]``."""
        counts = [len(tokens) for tokens in new]
        batch = self.cache.batch(sequences, counts)
        values = [
            row_values(np.concatenate((s.tokens, tokens)), self.spaces[id(s)]) for s, tokens in zip(sequences, new)
        ]
        fresh = torch.from_numpy(np.concatenate([v[len(v) - n :] for v, n in zip(values, counts)]))
        for layer in self.cache.schema.layers:
            if layer.owner != layer.index:
                continue
            view = batch.layer(layer.index)
            if layer.growth is not None:
                size = view.block_size
                field = layer.block_rows()[0].name
                mapping = view.slot_mapping.long()
                view[field][mapping // size, mapping % size] = (fresh + 0.25 * layer.index)[:, None, None]
                for row, sequence in enumerate(sequences):
                    self._compare(view, layer, field, row, sequence, values[row])
            for name in (rows.name for rows in layer.state_rows()):
                for s, v, state_row in zip(sequences, values, view.state_indices.tolist()):
                    state = view[name][state_row]
                    assert (state == (float(v[s.length - 1]) if s.length else 0.0)).all()
                    state[:] = float(v[-1])

    def _compare(self, view: Any, layer: Layer, field: str, row: int, sequence: Sequence, values: np.ndarray) -> None:
        assert layer.growth is not None
        positions = torch.arange(layer.growth.first_needed(sequence.length), len(values))
        blocks = view.block_table[row, positions // self.cache.block_size].long()
        found = view[field][blocks, positions % self.cache.block_size, 0, 0]
        assert torch.equal(found, torch.from_numpy(values[positions.numpy()]) + 0.25 * layer.index)


def text(rng: np.random.Generator, heads: list[np.ndarray]) -> np.ndarray:
    """Return a random prompt, int64 ``[n]``: a prefix of one of ``heads``, and 1 to 11 random tokens."""
    head = heads[int(rng.integers(len(heads)))]
    return np.concatenate((head[: int(rng.integers(0, len(head) + 1))], rng.integers(0, 50, int(rng.integers(1, 12)))))


def traffic(cache: KVCache, steps: int, seed: int, engine: FakeEngine | None, check_every: int = 1) -> int:
    """Make random opens, steps, forks, rewinds and closes over texts that share prefixes, with ``check`` after every
    ``check_every`` of them. Returns the number of operations.
    """
    rng = np.random.default_rng(seed)
    heads = [rng.integers(0, 50, n) for n in (5, 16, 17, 33, 40)]
    running: list[Sequence] = []
    operations = 0
    for number in range(steps):
        kind = rng.random()
        if kind < 0.25:
            prompt, space = text(rng, heads), int(rng.integers(2))
            try:
                sequence = cache.open(
                    prompt, f"tenant {space}", capacity=0, reserve=len(prompt) + int(rng.integers(0, 20))
                )
            except (RetryLater, NeverFits):
                pass
            else:
                running.append(sequence)
                if engine is not None:
                    engine.spaces[id(sequence)] = space
        elif kind < 0.37 and running:
            running.pop(int(rng.integers(len(running)))).close()
        elif kind < 0.45 and running:
            parent = running[int(rng.integers(len(running)))]
            with contextlib.suppress(RetryLater, NeverFits):
                running.append(parent.fork(reserve=parent.length + int(rng.integers(0, 20))))
                if engine is not None:
                    engine.spaces[id(running[-1])] = engine.spaces[id(parent)]
        elif kind < 0.5 and running:
            sequence = running[int(rng.integers(len(running)))]
            with contextlib.suppress(BadInput, OutOfBlocks):
                sequence.rewind(int(rng.integers(0, min(sequence.length, 9) + 1)))
        elif running:
            ready, new = [], []
            for sequence in [s for s in running if rng.random() < 0.7] or running[:1]:
                left = sequence.prompt_length - sequence.length
                n = int(rng.integers(1, min(left, 9) + 1)) if left > 0 else 1
                n = min(n, cache.step_limit(sequence) or n)
                try:
                    sequence.extend(n)
                except (OutOfBlocks, BadInput):
                    continue
                known = sequence._request.tokens[sequence.length : min(sequence.length + n, sequence.prompt_length)]
                ready.append(sequence)
                new.append(np.concatenate((known, rng.integers(0, 50, n - len(known)))).astype(np.int32))
            if ready:
                if engine is not None:
                    engine.step(ready, new)
                for sequence, tokens in zip(ready, new):
                    with contextlib.suppress(CopyFailed):
                        sequence.commit(tokens)
            operations += 2 * len(ready)
        operations += 1
        if number % check_every == 0:
            cache.check()
    for sequence in running:
        sequence.close()
    cache.check()
    assert all(group.free + group.evictable == group.total and not group.outstanding for group in cache.stats().groups)
    return operations


@pytest.mark.parametrize("name", ["full", "window", "mixed", "state", "latent"])
@pytest.mark.parametrize(
    ("checkpoints", "check_every", "steps"),
    [(8, 8, 1000), (0, 8, 3000), (8, 8, 3000), *(pytest.param(n, 1, 3000, marks=pytest.mark.slow) for n in (0, 2, 8))],
)
def test_rows_read_back_are_the_rows_written(name: str, checkpoints: int, check_every: int, steps: int) -> None:
    """Rows are compared in every step. ``check`` takes most of the time, so only ``-m slow`` runs it after each."""
    cache = KVCache(
        SCHEMAS[name], num_blocks=40, max_requests=6, block_size=4, device="cpu", poison=True,
        limits=Limits(step_tokens=9, max_context=160), retention=Retention(checkpoints=checkpoints, checkpoint_every=2),
    )  # fmt: skip
    operations = traffic(cache, steps, seed=3, engine=FakeEngine(cache), check_every=check_every)
    assert operations > 2.2 * steps  # the 15 slow cases make more than 100,000 in all
    assert checkpoints < 8 or cache.stats().cached_tokens > 20


@pytest.mark.parametrize(
    ("name", "budget", "least", "seed", "steps"),
    [
        ("mixed", 24_000, 5, 4, 500),
        ("mixed", 24_000, 5, 4, 1500),
        ("full and state", 24_000, 5, 4, 1500),
        ("windows", 7_000, 0, 3, 1500),
    ],
)
def test_rows_stay_right_when_groups_share_one_budget_and_blocks_move(
    name: str, budget: int, least: int, seed: int, steps: int
) -> None:
    cache = KVCache(
        SHARING[name], budget, max_requests=6, block_size=4, device="cpu", poison=True, limits=Limits(step_tokens=9),
        retention=Retention(checkpoints=8, checkpoint_every=2),
    )  # fmt: skip
    traffic(cache, steps, seed=seed, engine=FakeEngine(cache))
    assert cache.core.capacity.num_moves >= least and cache.stats().cached_tokens > 5


def test_fork_copies_what_is_written_to_and_shares_the_rest() -> None:
    cache = KVCache(MIXED, num_blocks=40, max_requests=4, block_size=4, device="cpu")
    parent = cache.open(range(10))
    view = cache.batch([parent], [10]).layer(2)
    view["k"][view.slot_mapping.long() // 4, view.slot_mapping.long() % 4] = 1.0
    view["recurrent"][view.state_indices[0]] = 5.0
    parent.commit(range(10))
    child = parent.fork(reserve=20)
    mine, theirs = (cache.core.groups[-1].table.cells[one.slot, 0] for one in (parent, child))
    assert child.tokens.tolist() == list(range(10)) and child.cached_tokens == 10
    table = cache.core.groups[0].table.cells
    assert (
        table[child.slot, :2].tolist() == table[parent.slot, :2].tolist()
        and table[child.slot, 2] != table[parent.slot, 2]
    )
    assert (view["k"][table[child.slot, 2], :2] == 1).all() and (view["recurrent"][theirs] == 5).all()
    view["recurrent"][theirs] = 6.0
    assert (view["recurrent"][mine] == 5).all()
    cache.check()
    parent.close()
    child.extend(2)
    child.commit([7, 7])
    cache.check()


def test_rewind_removes_tokens_or_says_which_layer_cannot() -> None:
    cache = KVCache(SCHEMAS["full"], num_blocks=8, max_requests=2, block_size=4, device="cpu")
    sequence = cache.open(range(10), reserve=20)
    sequence.commit(range(10))
    assert cache.lookup(range(10)).cached == 8  # a lookup publishes completed blocks
    before = cache.core.groups[0].table.cells[sequence.slot].copy()
    sequence.rewind(1)
    assert sequence.length == 9 and cache.core.groups[0].table.cells[sequence.slot].tolist() == before.tolist()
    sequence.rewind(3)  # into a block that is shared by now: a copy takes its place
    assert sequence.length == 6 and sequence._request.lease.num_blocks == 1
    assert cache.core.groups[0].table.cells[sequence.slot, 1] != before[1]
    sequence.extend(3)
    sequence.commit([50, 51, 52])
    assert sequence.tokens.tolist() == [0, 1, 2, 3, 4, 5, 50, 51, 52]
    cache.check()
    with raises(BadInput, needed=10, available=9):
        sequence.rewind(10)
    state = KVCache(SCHEMAS["state"], num_blocks=8, max_requests=2, device="cpu").open(range(5))
    state.commit(range(5))
    with raises(BadInput, needed=1, available=0):
        state.rewind(1)
    window = KVCache(SCHEMAS["window"], num_blocks=60, max_requests=2, block_size=4, device="cpu").open(range(40))
    window.commit(range(40))
    with raises(BadInput, needed=31, available=28, group="window(10)"):
        window.rewind(9)
    window.rewind(1)


@pytest.mark.parametrize("steps", [1500, 6000])
def test_random_traffic_over_compressed_layers_keeps_one_owner_for_every_block(steps: int) -> None:
    cache = KVCache(
        SCHEMAS["compressed"],
        num_blocks=12,
        max_requests=5,
        block_size=8,
        device="cpu",
        limits=Limits(step_tokens=9, max_context=80),
    )
    assert traffic(cache, steps, seed=5, engine=None) > 1.8 * steps
