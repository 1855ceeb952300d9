"""S3-FIFO: its hand, which jumps, chooses the victims of the model's hand, which walks; its ring keeps its order."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_model import model_replay, tree_replay
from test_policies import chains, named

from kvpagoda.errors import CheckFailed
from kvpagoda.policies import s3fifo
from kvpagoda.policies.s3fifo import Ring
from raises import raises


@settings(max_examples=200, deadline=None, derandomize=True)
@given(requests=chains, capacity=st.integers(1, 14), steps=st.integers(0, 2))
def test_a_hand_that_jumps_chooses_the_victims_of_one_that_walks(requests, capacity: int, steps: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3fifo, "_STEPS", steps)
        hits, evicted = model_replay(requests, capacity, "s3fifo")
        got, ids, tree = tree_replay([np.array(one, np.int32) for one in requests], capacity, "s3fifo")
        tree.check()
    assert (got, named(requests, capacity, ids)) == (hits, evicted)


def test_victims_of_texts_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most blocks of main are inside texts, where the hand must jump, and places in the ring are renumbered often."""
    monkeypatch.setattr(s3fifo, "_SPACING", 64)
    rng, requests, jumps = np.random.default_rng(3), [], 0
    chats = [list(rng.integers(0, 50, 2)) for _ in range(12)]
    for _ in range(700):
        chat = chats[rng.integers(len(chats))]
        chat += rng.integers(0, 50, rng.integers(1, 4)).tolist()
        if len(chat) > 60:
            del chat[2:]
        requests.append([int(one) for one in chat])
    first = s3fifo.LazyHeap.first

    def counted(heap: s3fifo.LazyHeap) -> tuple[int, int, int] | None:
        nonlocal jumps
        jumps += 1
        return first(heap)

    monkeypatch.setattr(s3fifo.LazyHeap, "first", counted)
    hits, evicted = model_replay(requests, 150, "s3fifo")
    got, ids, tree = tree_replay([np.array(one, np.int32) for one in requests], 150, "s3fifo")
    tree.check()
    assert (got, named(requests, 150, ids)) == (hits, evicted)
    assert len(evicted) > 500 and jumps > 100


@pytest.mark.parametrize("step", [1, 40, 2**40])
def test_a_circle_is_a_list_that_is_turned(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3fifo, "_SPACING", step)
    rng, circle, turned, fresh, moved = random.Random(step), Ring(), [], 0, 0
    for _ in range(6000):
        action = rng.random()
        if action < 0.55 or not turned:
            moved += len(circle.put(fresh))
            turned.append(fresh)
            fresh += 1
        elif action < 0.8:
            at = rng.choice((1, 1, 2, rng.randrange(len(turned)))) % len(turned)
            if at:
                circle.move_hand(turned[at])
                turned = turned[at:] + turned[:at]
        else:
            circle.take(turned.pop(rng.choice((0, rng.randrange(len(turned))))))
        if len(turned) < 40 or rng.random() < 0.02:
            circle.check()
            assert list(circle) == turned and len(circle) == len(turned)
            assert sorted(turned, key=circle.order) == turned
    assert (moved > 1000) == (step < 100)


def test_check_notices_a_broken_circle() -> None:
    circle = Ring()
    for key in range(5):
        circle.put(key)
    circle.check()
    circle.place[2] = 0
    with raises(CheckFailed, needed=5, available=5):
        circle.check()
