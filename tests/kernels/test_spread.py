"""Runs of words are written where they belong, and nothing else is: the reference against slices."""

import numpy as np
import pytest
import torch

from kvpagoda.kernels.spread import spread
from kvpagoda.memory.writes import Write, pack, packed_nbytes

LENGTHS = {"short": (0, 4), "long": (900, 3000), "one": (1, 2)}


def case(random, many, lengths):
    """Targets of both dtypes, writes to places of them that do not overlap, and what the targets are to hold."""
    targets, expected, writes = [], [], []
    for number in range(many):
        wide = number % 3 == 1
        counts = random.integers(*LENGTHS[lengths], int(random.integers(1, 5))) * (2 if wide else 1)
        gaps = random.integers(0, 3, len(counts)) * (2 if wide else 1)
        starts = np.cumsum(counts + gaps) - counts
        order = random.permutation(len(counts))
        starts, counts = starts[order], counts[order]
        size = int((starts + counts).max()) + 4
        before = random.integers(-(1 << 31), 1 << 31, size // 2 * 2).astype(np.int32)
        after, words = before.copy(), []
        for start, count in zip(starts, counts):
            run = random.integers(-(1 << 31), 1 << 31, count)
            after[start : start + count] = run
            words.append(run if number % 2 else run.astype(np.int32))  # int64 arrays are narrowed
        target = torch.from_numpy(before.view(np.int64) if wide else before)
        targets.append(target.view(2, -1) if target.numel() % 2 == 0 else target)
        expected.append(after)
        writes.append(Write(targets[-1], starts, counts, words))
    return targets, expected, writes


def staged_of(targets, writes):
    nbytes = packed_nbytes(writes)
    host = np.zeros(nbytes // 8 * 8 + 64, np.uint8)
    runs = pack(writes, [target.data_ptr() for target in targets], host)
    assert not host[nbytes:].any()
    return torch.from_numpy(host.copy()).view(torch.int32), runs


def assert_spread(seed, many, lengths):
    targets, expected, writes = case(np.random.default_rng(seed), many, lengths)
    staged, runs = staged_of(targets, writes)
    spread(staged, runs, targets)
    for target, wanted in zip(targets, expected):
        assert target.view(-1).view(torch.int32).numpy().tobytes() == wanted.tobytes()


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("many", [1, 6])
def test_runs_lie_where_they_belong_and_the_rest_stays(many, lengths):
    for seed in range(5):
        assert_spread(seed, many, lengths)


def test_without_words_nothing_is_written():
    target, zero = torch.full((3,), 7, dtype=torch.int32), np.zeros(1, np.int64)
    staged, runs = staged_of([target], [Write(target, zero, zero, [zero[:0]])])
    spread(staged, runs, [target])
    assert target.tolist() == [7, 7, 7]


def test_a_number_that_no_word_holds_as_a_float_is_refused():
    target = torch.zeros(1, dtype=torch.int32)
    write = Write(target, np.zeros(1, np.int64), np.ones(1, np.int64), [np.array([0.5])])
    with pytest.raises(TypeError, match="same_kind"):
        staged_of([target], [write])
