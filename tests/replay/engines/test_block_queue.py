"""The queue of free blocks and the pool: against a list and a dictionary, and worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvpagoda.errors import CheckFailed
from kvpagoda.replay.engines.block_queue import NO_BLOCK, BlockPool, BlockQueue
from raises import raises


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


@pytest.mark.parametrize("seed", range(3))
def test_the_queue_is_a_list(seed: int) -> None:
    rng, num = np.random.default_rng(seed), 40
    queue, line, out = BlockQueue(num), [*range(1, num + 1)], list[int]()
    for _ in range(1_000):
        kind, count = rng.integers(4), int(rng.integers(0, 9))
        if kind == 0 and count <= len(line):
            assert queue.take(count).tolist() == line[:count]
            out += line[:count]
            del line[:count]
        elif kind == 1:
            chosen = rng.permutation(line)[:count].tolist()
            queue.remove(ids(*chosen))
            line = [block for block in line if block not in chosen]
            out += chosen
        elif kind >= 2:
            chosen = rng.permutation(out)[:count].astype(int).tolist()
            out = [block for block in out if block not in chosen]
            if kind == 2:
                queue.append(ids(*chosen))
                line += chosen
            else:
                queue.prepend(ids(*chosen))
                line = chosen + line
        assert queue.order().tolist() == line and queue.num_free == len(line)
    with raises(CheckFailed, needed=41, available=len(line)):
        queue.take(num + 1)


def test_blocks_with_a_key_are_used_last_and_found_until_then() -> None:
    pool = BlockPool(4, num_keys=10)
    mine = pool.take(3)
    pool.share(mine[:2], np.array([7, 8]))
    pool.release(mine[::-1])
    assert pool.queue.order().tolist() == [3, 4, 2, 1]  # without a key first; of a text the last block first
    assert pool.find(np.array([8, 7, 6])).tolist() == [2, 1, NO_BLOCK]
    assert pool.num_idle(ids(2, 1)) == 2
    pool.hold(ids(1, NO_BLOCK))
    assert pool.num_idle(ids(2, 1)) == 1 and pool.queue.num_free == 3
    assert pool.take(3).tolist() == [3, 4, 2]
    assert pool.find(np.array([8, 7])).tolist() == [NO_BLOCK, 1]


def test_of_blocks_with_one_key_the_first_is_found_as_long_as_it_is_there() -> None:
    pool = BlockPool(3, num_keys=1)
    key = np.array([0])
    for block in pool.take(3):
        pool.share(ids(block), key)
    pool.release(ids(2))
    assert pool.find(key).tolist() == [1]
    pool.release(ids(1, 3))
    assert pool.take(1).tolist() == [2] and pool.find(key).tolist() == [1]  # the one in the middle
    assert pool.take(1).tolist() == [1] and pool.find(key).tolist() == [3]
    pool.share(ids(1), key)
    assert pool.take(1).tolist() == [3] and pool.find(key).tolist() == [1]
    pool.release(ids(1))
    assert pool.take(1).tolist() == [1] and pool.find(key).tolist() == [NO_BLOCK]


def test_all_blocks_with_one_key_are_taken_at_once() -> None:
    pool = BlockPool(4, num_keys=2)
    for block, key in zip(pool.take(4), (0, 1, 0, 0)):
        pool.share(ids(block), np.array([key]))
    pool.release(ids(1, 2, 3, 4))
    pool.take(4)
    assert pool.find(np.array([0, 1])).tolist() == [NO_BLOCK, NO_BLOCK]
