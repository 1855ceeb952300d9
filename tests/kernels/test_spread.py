"""Runs of words are written where they belong, and nothing else is: the reference against slices."""

import numpy as np
import pytest
import torch

from kvpagoda.core.kernels.spread import spread
from kvpagoda.core.memory.writes import Writes

LENGTHS = {"short": (0, 4), "long": (900, 3000), "one": (1, 2)}


def case(random, many, lengths):
    """Targets of both dtypes, writes to places of them that do not overlap, and what the targets are to hold."""
    targets, expected, writes = [], [], Writes()
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
        if number % 4 == 3:  # from the beginning
            after[:] = before
            after[: counts[0]] = words[0]
            writes.put(f"target {number}", targets[-1], words[0])
        else:
            writes.put_runs(f"target {number}", targets[-1], starts, counts, words)
    return targets, expected, writes


def staged_of(writes, spare=0):
    host = np.zeros(writes.nbytes // 8 + spare, np.int64)
    runs = writes.pack(host)
    return torch.from_numpy(host.copy()).view(torch.int32), runs, writes.targets


def assert_spread(seed, many, lengths):
    targets, expected, writes = case(np.random.default_rng(seed), many, lengths)
    spread(*staged_of(writes, seed))
    for target, wanted in zip(targets, expected):
        assert target.view(-1).view(torch.int32).numpy().tobytes() == wanted.tobytes()


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("many", [1, 6])
def test_runs_lie_where_they_belong_and_the_rest_stays(many, lengths):
    for seed in range(5):
        assert_spread(seed, many, lengths)


def test_the_same_arrays_and_others_are_written_step_by_step():
    first, second = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    writes, numbers = Writes(), np.arange(1, 5)
    for step, (long, both) in enumerate([(3, True), (3, True), (2, True), (2, False), (4, True)]):
        for target in (first, second):
            target.zero_()
        writes.put("first", first, numbers[:long] + step)
        if both:
            writes.put("second", second, (numbers + step).view(np.int32))
        spread(*staged_of(writes))
        assert first.tolist() == [*(numbers[:long] + step).tolist(), 0, 0][:4]
        assert second.tolist() == ((numbers + step).tolist() if both else [0] * 4)
        assert writes and "first" in writes
        writes.clear()
        assert not writes and "first" not in writes


def test_without_words_nothing_is_written():
    target, zero, writes = torch.full((3,), 7, dtype=torch.int32), np.zeros(1, np.int64), Writes()
    writes.put_runs("target", target, zero, zero, [zero[:0]])
    spread(*staged_of(writes))
    assert target.tolist() == [7, 7, 7]
