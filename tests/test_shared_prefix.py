"""What the rows of a step share, in levels: attention level by level equals attention over the block tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvpagoda import Batch, KVCache, OutOfBlocks, RetryLater, Schema
from kvpagoda.core.batch.shared_prefix import SharedPrefix, sharing_tree
from kvpagoda.core.batch.step_buffers import TableSnapshot
from kvpagoda.errors import BadInput, StaleHandle
from kvpagoda.schema import Attention, Growth, Layer, Recurrent, Rows
from late_device import Apart
from raises import raises

DIM, NOTHING = 4, np.float64(-np.inf)
GROWTHS = [Growth(), Growth(window=10), Growth(window=40), Growth(chunk=16), Growth(window=24, slack=3)]


def cache_of(*growths: Growth, **arguments: Any) -> KVCache:
    layers = [Layer(i, "attention", (Attention(1, DIM, DIM, "float32", growth),)) for i, growth in enumerate(growths)]
    usual: dict[str, Any] = {"num_blocks": 400, "max_requests": 40, "block_size": 4, "device": "none"}
    return KVCache(Schema(tuple(layers), "test", vocab_size=50), **{**usual, **arguments})


def as_array(values: Any) -> np.ndarray[Any, Any]:
    return np.asarray(values)


# -- attention by table, and by levels, in numpy -------------------------------------------------------------------------


class Memory:
    """Random keys and values of each slot of a group, and a query for each new token of ``batch``."""

    def __init__(self, batch: Batch, layer: int, seed: int) -> None:
        random, self.view = np.random.default_rng(seed), batch.layer(layer)
        rows = self.view._group.plan.num_rows * batch.block_size  # type: ignore[union-attr]
        self.k, self.v = random.normal(size=(2, rows, DIM))
        self.q = random.normal(size=(len(batch.positions), DIM))
        self.batch, self.growth, self.page = batch, self.view.layer.growth, self.view.page_size

    def attend(self, query: Any, slots: Any, is_read: Any = True) -> tuple[Any, Any]:
        """Return attention of one ``query`` over ``slots``, as far as ``is_read``, and the log of the sum of exponentials."""
        scores = np.where(is_read, self.k[slots] @ query, NOTHING)
        if not len(scores) or scores.max() == NOTHING:
            return np.zeros(DIM), NOTHING
        weights = np.exp(scores - scores.max())
        return weights @ self.v[slots] / weights.sum(), scores.max() + np.log(weights.sum())

    def by_table(self) -> Any:
        """Attention of each new token over what the model reads, through ``block_table``."""
        table, results = as_array(self.view.block_table), []
        for row, position, query in zip(*map(as_array, (self.batch.step.request_ids, self.batch.positions)), self.q):
            reads = np.array([at for at in range(position + 1) if self.growth.reads(position, at)])
            results.append(self.attend(query, table[row, reads // self.page] * self.page + reads % self.page)[0])
        return np.array(results)

    def by_levels(self, shared: SharedPrefix) -> Any:
        """The same as FlashInfer computes it: level after level with one ``window_left``, and the results merged."""
        order = np.arange(len(self.q)) if shared.order is None else as_array(shared.order)
        window, q = self.growth.window, self.q[order]
        out, lse = np.zeros_like(q), np.full(len(q), NOTHING)
        for level, arrays in enumerate(zip(*shared[:4])):
            qo_indptr, indptr, indices, last = map(as_array, arrays)
            is_last = level == len(shared.qo_indptr) - 1
            assert qo_indptr[0] == 0 and qo_indptr[-1] == len(q) and len(last) == len(qo_indptr) - 1 == len(indptr) - 1
            for i, num_in_last in enumerate(last.tolist()):
                pages = indices[indptr[i] : indptr[i + 1]].astype(np.int64)
                n = (len(pages) - 1) * self.page + num_in_last if len(pages) else 0
                slots = (pages[:, None] * self.page + np.arange(self.page)).reshape(-1)[:n]
                begin, end = qo_indptr[i : i + 2].tolist()
                for token in range(
                    begin, end
                ):  # the masks of the kernel, which aligns the last query with the last key
                    key, behind = np.arange(n), n - (end - token)
                    is_read = (key <= behind) if is_last else np.ones(n, np.bool_)
                    if window is not None:
                        is_read &= key >= behind - (window - 1)
                    if self.growth.chunk is not None and is_last:  # a mask of absolute positions
                        position = as_array(self.batch.positions)[order[token]]
                        is_read &= self.growth.reads(position, position - behind + key)
                    one, its = self.attend(q[token], slots, is_read)
                    most = np.maximum(lse[token], its)
                    if most > NOTHING:  # merge_state
                        a, b = np.exp(lse[token] - most), np.exp(its - most)
                        out[token], lse[token] = (a * out[token] + b * one) / (a + b), most + np.log(a + b)
        results = np.empty_like(out)
        results[order] = out
        return results


def prove(batch: Batch, layer: int, num_levels: int, seed: int = 0) -> SharedPrefix:
    """Prove that ``num_levels`` levels give what the block table gives, and return them."""
    shared, memory = batch.shared_prefix(layer, num_levels), Memory(batch, layer, seed)
    assert [len(arrays) for arrays in shared[:4]] == [num_levels] * 4  # type: ignore[arg-type]
    assert num_pages(shared) <= len(as_array(batch.layer(layer).kv_indices))
    are_real = as_array(batch.step.request_slots) >= 0  # nobody reads what padded rows compute
    np.testing.assert_allclose(memory.by_levels(shared)[are_real], memory.by_table()[are_real], atol=1e-9)
    return shared


def num_pages(shared: SharedPrefix) -> int:
    return sum(len(indices) for indices in shared.kv_indices)


# -- random trees ---------------------------------------------------------------------------------------------------------


def traffic(cache: KVCache, random: np.random.Generator) -> list[Any]:
    """Return running sequences of some systems' prompts, users' prompts below them, and forks at all depths, shuffled."""
    systems = [random.integers(0, 50, random.integers(8, 40)).tolist() for _ in range(3)]
    running: list[Any] = []
    for _ in range(int(random.integers(10, 24))):
        try:
            if running and random.random() < 0.6:
                running.append(running[random.integers(len(running))].fork())
            else:
                text = systems[random.integers(3)] + random.integers(0, 50, random.integers(1, 30)).tolist()
                running.append(cache.open(text))
                running[-1].commit(text[running[-1].length :])
            for sequence in random.permutation(np.array(running, object))[:3].tolist():
                n = int(random.integers(1, 12))
                sequence.extend(n)
                sequence.commit(random.integers(0, 50, n))
        except (OutOfBlocks, RetryLater):
            break
    return random.permutation(np.array(running, object)).tolist()


@pytest.mark.parametrize("seed", range(12))
def test_attention_by_levels_equals_attention_by_table(seed: int) -> None:
    random = np.random.default_rng(seed)
    growths = [Growth(), *random.permutation(np.array(GROWTHS[1:], object))[:2]]
    page = int(random.choice([2, 4]))
    cache = cache_of(*growths, kernel_page=page)
    running = traffic(cache, random)
    counts = random.integers(1, 6, len(running)) if seed % 2 else np.ones(len(running), np.int64)
    for sequence, n in zip(running, counts.tolist()):
        sequence.extend(n)
    pad_to = len(running) + int(random.integers(3))
    batch = cache.batch(running, counts.tolist(), pad_to=pad_to)
    read = []
    for layer in range(len(growths)):
        read.append([num_pages(prove(batch, layer, n, seed)) for n in (1, 2, 3, 5)])
        assert read[-1] == sorted(read[-1], reverse=True)  # a level more never reads more
    assert read[0][-1] < read[0][0]  # something is shared
    one = batch.shared_prefix(0, 1)
    assert one.order is not None or as_array(one.kv_indices[0]).tolist() == as_array(batch.layer(0).kv_indices).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_levels_of_steps_that_compute_committed_tokens_again(seed: int) -> None:
    random = np.random.default_rng(seed)
    cache = cache_of(Growth(), Growth(window=24, slack=3))
    running = traffic(cache, random)
    for sequence in running:
        sequence.extend(2)
    firsts = [max(0, sequence.length - int(random.integers(3))) for sequence in running]
    batch = cache.batch(running, [one.length - first + 1 for one, first in zip(running, firsts)], firsts=firsts)
    for layer in (0, 1):
        prove(batch, layer, 3, seed)


# -- the trees that users have -----------------------------------------------------------------------------------------------


def group(cache: KVCache, prompt: list[int], n: int) -> list[Any]:
    """Return ``n`` samples of ``prompt``, each with another token behind it."""
    first = cache.open(prompt)
    first.commit(prompt[first.length :])
    samples = [first, *(first.fork() for _ in range(n - 1))]
    for i, sample in enumerate(samples):
        sample.extend(2)
        sample.commit([i])
    return samples


def test_a_group_of_16_samples_reads_its_prompt_once() -> None:
    cache = cache_of(Growth())
    batch = cache.batch(group(cache, [*range(40)], 16), [1] * 16)
    shared = prove(batch, 0, 2)
    assert [as_array(one).tolist() for one in shared.qo_indptr] == [[0, 16], [*range(17)]]
    assert [len(indices) for indices in shared.kv_indices] == [10, 16] and shared.order is None
    assert as_array(shared.kv_last_page_len[0]).tolist() == [4] and set(as_array(shared.kv_last_page_len[1])) == {2}
    deeper = prove(batch, 0, 4)
    assert [len(indices) for indices in deeper.kv_indices] == [0, 0, 10, 16]


def test_two_levels_are_those_that_read_least() -> None:
    """A short system prompt for all, long prompts of a group of samples each: with one level to share, the long ones."""
    cache = cache_of(Growth())
    system, running = [1, 2, 3, 4], list[Any]()
    for i in range(3):
        running += group(cache, system + [10 + i] * 36, 4)
    batch = cache.batch(running, [1] * 12)
    assert [len(one) for one in prove(batch, 0, 2).kv_indices] == [30, 12]
    assert [len(one) for one in prove(batch, 0, 3).kv_indices] == [1, 27, 12]
    long_system, agents = [7] * 80, list[Any]()
    for i in range(6):
        agents += group(cache, long_system + [20 + i] * 4, 2)
    batch = cache.batch(agents, [1] * 12)
    assert [len(one) for one in prove(batch, 0, 2).kv_indices] == [20, 24]


def test_rows_that_share_are_brought_together() -> None:
    cache = cache_of(Growth())
    left, right = group(cache, [5] * 12, 3), group(cache, [6] * 12, 3)
    mixed = [one for pair in zip(left, right) for one in pair]
    batch = cache.batch(mixed, [1] * 6, pad_to=8)
    shared = prove(batch, 0, 2)
    assert shared.order is not None and as_array(shared.order).tolist() == [0, 2, 4, 1, 3, 5, 6, 7]
    assert as_array(shared.qo_indptr[0]).tolist() == [0, 3, 6, 7, 8]


def test_windows_share_only_pages_that_every_token_reads_as_a_whole() -> None:
    cache = cache_of(Growth(), Growth(window=16))
    samples = group(cache, [*range(28)], 3)  # 29 tokens: the next token, at 29, reads 14 ..
    shared = prove(cache.batch(samples, [1] * 3), 1, 2)
    assert [len(one) for one in shared.kv_indices] == [0, 15]
    for step in range(2):
        for sample in samples:
            sample.extend(1)
            sample.commit([step])
    for sample in samples:
        sample.extend(1)
    shared = prove(cache.batch(samples, [1] * 3), 1, 2)  # the token at 31 reads 16 ..: pages 4, 5, 6 are shared
    assert [len(one) for one in shared.kv_indices] == [3, 3]
    for sample in samples:
        sample.extend(2)
    shared = prove(cache.batch(samples, [2] * 3), 1, 2)  # the token at 32 reads 17 ..: not the whole first page
    assert [len(one) for one in shared.kv_indices] == [0, 15]


def test_layers_without_blocks_and_other_bad_input() -> None:
    attention, state = Attention(1, DIM, DIM, "float32"), Recurrent((Rows("state", (3,), "float32"),))
    layers = Layer(0, "attention", (attention,)), Layer(1, "recurrent", (state,))
    cache = KVCache(Schema(layers, "test", vocab_size=50), "64KiB", block_size=4, max_requests=4, device="none")
    sequence = cache.open([1, 2, 3])
    batch = cache.batch([sequence], [1])
    with pytest.raises(BadInput):
        batch.shared_prefix(1)
    for number in (0, -1, 1.5, 2000):
        with pytest.raises(BadInput):
            batch.shared_prefix(0, number)  # type: ignore[arg-type]
    with raises(BadInput, needed=2, available=[0, 1]):
        batch.shared_prefix(2)
    cache.batch([sequence], [1])
    with pytest.raises(StaleHandle):
        batch.shared_prefix()


def test_arrays_are_tensors_in_host_memory_and_new_ones() -> None:
    cache = cache_of(Growth(), device="cpu", num_blocks=80)
    batch = cache.batch(group(cache, [*range(12)], 3), [1] * 3)
    shared, again = batch.shared_prefix(), batch.shared_prefix()
    for one, other in zip(shared[:4], again[:4]):
        for mine, its in zip(one, other):  # type: ignore[call-overload]
            assert isinstance(mine, torch.Tensor) and mine.dtype == torch.int32 and mine.device.type == "cpu"
            assert torch.equal(mine, its) and mine.data_ptr() != its.data_ptr()


def test_the_order_is_on_the_device_and_nothing_else() -> None:
    cache = cache_of(Growth(), device="cpu", num_blocks=80)
    cache._step_buffers.arrays = arrays = Apart()
    one, other = group(cache, [5] * 12, 2), group(cache, [6] * 12, 2)
    batch = cache.batch([one[0], other[0], one[1], other[1]], [1] * 4)
    before = len(arrays.sent)
    assert batch.shared_prefix().order.tolist() == [0, 2, 1, 3] and len(arrays.sent) == before + 1  # type: ignore[union-attr]
    assert cache.batch([*one, *other], [1] * 4).shared_prefix().order is None and len(arrays.sent) == before + 2


def test_a_deep_tree_is_cut_and_stays_exact() -> None:
    cache = cache_of(Growth(), max_requests=40)
    running = group(cache, [1, 2, 3, 4], 1)
    for i in range(36):  # each continues the one before it by a block, and parts
        running.append(running[-1].fork())
        running[-1].extend(4)
        running[-1].commit([i] * 4)
    for sequence in running:
        sequence.extend(1)
    batch = cache.batch(running, [1] * len(running))
    assert prove(batch, 0, 40).kv_indices and prove(batch, 0, 2).kv_indices


def test_a_column_that_is_equal_behind_one_that_is_not_is_not_shared() -> None:
    """As draft layers have it, where a request keeps rows of its own beside those that are cached for the same text."""
    cells = np.array([[1, 2, 3, 4, 9], [1, 5, 3, 4, 8], [0] * 5], np.int32)
    column = np.arange(2), np.zeros(2, np.int64), np.zeros(2, np.int64), np.full(2, 5)
    tree = sharing_tree(cells, TableSnapshot(column, []), np.full(2, 4), is_proven=True)
    assert tree.ends.tolist() == [[1, 1], [5, 5]]
