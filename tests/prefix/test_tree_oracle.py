"""The tree against an oracle of dictionaries: 200,000 random operations, every answer compared."""

import random
from unittest.mock import ANY

import numpy as np
import pytest
from partial_block import partial_ids
from plain_lru import LRU
from tree_oracle import Oracle, as_bytes

from kvpagoda.core.prefix import EvictionPolicy, Lease, Match, PrefixTree
from kvpagoda.errors import BadInput, NotOwned, RetryLater, StaleHandle
from raises import raises

NAMESPACES = (b"", b"tenant", b"tenant/adapter")


class Pair:
    """The tree and the oracle side by side, and the ids, states and leases that their caller owns."""

    def __init__(
        self,
        block_size: int,
        alphabet: int,
        num_groups: int,
        seed: int,
        room: int,
        policy: str | EvictionPolicy = "lru",
    ) -> None:
        self.rng = random.Random(seed)
        self.size, self.alphabet, self.groups, self.room = block_size, alphabet, num_groups, room
        self.tree, self.oracle = PrefixTree(block_size, num_groups, policy), Oracle(block_size, num_groups)
        self.free = [list(range(1, 4 * room)) for _ in range(num_groups)]
        self.free_states = list(range(100))
        self.leases: list[tuple[Lease, bytes, np.ndarray]] = []
        self.texts: list[np.ndarray] = [np.empty(0, np.int32)]
        self.stale: list[tuple[Match, bytes]] = []

    def text(self) -> np.ndarray:
        """Return a new text, int32 ``[n]``: a prefix of an earlier one and random tokens."""
        rng, old = self.rng, self.rng.choice(self.texts)
        cut = rng.randint(0, len(old)) if rng.random() < 0.8 else len(old)
        tail = [rng.randrange(self.alphabet) for _ in range(rng.randint(0, 3 * self.size))]
        text = np.concatenate((old[: min(cut, 12 * self.size)], np.array(tail, np.int32)))
        self.texts.append(text)
        if len(self.texts) > 30:
            self.texts[rng.randrange(30)] = self.texts.pop()
        return text

    def match(self) -> tuple[Match, bytes, np.ndarray]:
        """Match a new text in both and compare the answers. Returns the match, its namespace and the text."""
        namespace, text = self.rng.choice(NAMESPACES), self.text()
        limit = self.rng.choice((None, None, max(0, len(text) - 1), len(text) // 2))
        match = self.tree.match(text, namespace, limit)
        seen = as_bytes(text if limit is None else text[:limit])
        num_tokens, keys, partial = self.oracle.match(namespace, seen)
        blocks = [self.oracle.at(namespace, key) for key in keys]
        assert (match.num_tokens, match.num_blocks) == (num_tokens, len(keys))
        assert match.ids.T.tolist() == [block.ids for block in blocks]
        assert match.ids.shape == (self.groups, len(keys))
        assert tuple(partial_ids(self.tree, match)) in (partial or [(0,) * self.groups])
        states = [((i + 1) * self.size, block.state) for i, block in enumerate(blocks) if block.state is not None]
        assert match.checkpoint == (states[-1] if states else None)
        depth = self.rng.randint(0, len(keys))
        before = [one for one in states if one[0] <= depth * self.size]
        assert self.tree.last_checkpoint(match, depth) == (before[-1] if before else None)
        return match, namespace, text

    def place(self) -> tuple[Match | Lease, bytes, np.ndarray]:
        """Return a fresh match or an open lease, its namespace, and the tokens that it covers."""
        if self.leases and self.rng.random() < 0.5:
            return self.rng.choice(self.leases)
        match, namespace, text = self.match()
        return match, namespace, text[: match.num_blocks * self.size]

    def take(self, num_blocks: int) -> np.ndarray:
        """Return unused ids, int32 ``[groups, num_blocks]``; some are 0, where a group keeps nothing for a block."""
        ids = np.array([[free.pop() for _ in range(num_blocks)] for free in self.free], np.int32)
        ids = ids.reshape(self.groups, num_blocks)
        for group in range(self.groups):
            for block in range(num_blocks):
                if self.rng.random() < 0.1:
                    self.free[group].append(int(ids[group, block]))
                    ids[group, block] = 0
        return ids

    def give(self, ids: np.ndarray) -> None:
        """Take back ids that the tree no longer owns."""
        for group, row in enumerate(ids):
            self.free[group] += row[row != 0].tolist()

    def insert(self) -> None:
        at, namespace, covered = self.place()
        more = self.text()[len(covered) :] if self.rng.random() < 0.5 else self.text()
        more = more[: min(len(more) // self.size, 4) * self.size]
        ids = self.take(len(more) // self.size)
        pin = self.rng.choice((None, True, False))
        result = self.tree.insert(at, more, ids, pin=pin)
        own, duplicates, added = self.oracle.insert(namespace, as_bytes(covered), as_bytes(more), ids.T.tolist())
        assert result.ids.T.tolist() == own
        assert result.duplicates.T.tolist() == duplicates
        assert result.num_added == added
        for row, mask, free in zip(ids, result.duplicates, self.free):
            free += row[mask].tolist()
        text = np.concatenate((covered, more))
        if isinstance(at, Lease):
            assert result.lease is (None if pin is False else at)
            if pin is not False:
                self.oracle.pin(namespace, as_bytes(covered), -1)
                self.oracle.pin(namespace, as_bytes(text), 1)
                i = next(i for i, entry in enumerate(self.leases) if entry[0] is at)
                self.leases[i] = (at, namespace, text)
        elif pin:
            self.oracle.pin(namespace, as_bytes(text), 1)
            self.leases.append((result.lease, namespace, text))
        else:
            assert result.lease is None

    def pin(self) -> None:
        at, namespace, covered = self.place()
        count = self.rng.randint(0, len(covered) // self.size)
        lease = self.tree.pin(at, count)
        assert lease.num_blocks == count
        self.leases.append((lease, namespace, covered[: count * self.size]))
        self.oracle.pin(namespace, as_bytes(covered[: count * self.size]), 1)

    def unpin(self) -> None:
        if self.leases:
            lease, namespace, covered = self.leases.pop(self.rng.randrange(len(self.leases)))
            self.tree.unpin(lease)
            self.oracle.pin(namespace, as_bytes(covered), -1)
            assert not lease.is_open
            if self.rng.random() < 0.1:
                with pytest.raises(StaleHandle):
                    self.tree.unpin(lease)

    def touch(self) -> None:
        at, namespace, covered = self.place()
        self.tree.touch(at)
        self.oracle.touch(namespace, as_bytes(covered))

    def evict(self, count: int | None = None) -> None:
        """Evict ``count`` blocks (None: a few) in both and compare the answers."""
        count = self.rng.randint(0, 6) if count is None else count
        evicted = self.tree.evict(count)
        ids, states = self.oracle.evict(count)
        assert evicted.ids.T.tolist() == ids
        assert list(evicted.states) == states
        assert evicted.shortfall == count - len(ids)
        self.give(evicted.ids)
        self.free_states += states

    def checkpoint(self) -> None:
        """Set a checkpoint in both; sometimes evict or drop some."""
        at, namespace, covered = self.place()
        if len(covered) and self.free_states:
            depth = self.rng.randint(1, len(covered) // self.size)
            state, key = self.free_states[-1], as_bytes(covered[: depth * self.size])
            block = self.oracle.at(namespace, key)
            assert self.tree.set_checkpoint(at, depth * self.size, state) == (block.state is None)
            if block.state is None:
                block.state = state
                self.oracle.states[state] = (namespace, key)
                self.free_states.pop()
        if self.rng.random() < 0.3 and self.oracle.states:
            if self.rng.random() < 0.5:
                gone = self.tree.checkpoints.evict(2)
                assert gone == tuple(list(self.oracle.states)[:2])
            else:
                gone = (self.rng.choice(list(self.oracle.states)),)
                self.tree.checkpoints.drop(gone[0])
            for state in gone:
                self.oracle.at(*self.oracle.states.pop(state)).state = None
            self.free_states += gone

    def stale_match(self) -> None:
        """An old match can be pinned if all its blocks are still cached; otherwise ``pin`` raises StaleHandle."""
        match, namespace, _ = self.match()
        self.stale.append((match, namespace))
        if len(self.stale) > 5:
            match, namespace = self.stale.pop(0)
            _, keys, _ = self.oracle.match(namespace, as_bytes(match.tokens))
            same = [self.oracle.at(namespace, key).ids for key in keys][: match.num_blocks] == match.ids.T.tolist()
            if same:
                self.tree.unpin(self.tree.pin(match))
            else:
                with raises(StaleHandle, needed=ANY, available=ANY):
                    self.tree.pin(match)

    def refused(self) -> None:
        """Make calls that must raise and change nothing."""
        at, _, covered = self.place()
        with pytest.raises(BadInput):
            self.tree.pin(at, len(covered) // self.size + 1)
        if self.groups:
            owned = self.tree.owned_ids(self.groups - 1)
            if len(owned):
                ids = np.zeros((self.groups, 2), np.int32)
                ids[-1, 0] = ids[-1, 1] = self.free[-1][-1]
                text = np.full(2 * self.size, 2**31 - 1, np.int32)
                with raises(NotOwned, needed=ANY, available=ANY):
                    self.tree.insert(at, text, ids)
                ids[-1] = self.free[-1][-1], owned[0]
                with raises(NotOwned, needed=ANY, available=ANY):
                    self.tree.insert(at, text, ids)

    def clear(self) -> None:
        namespace = self.rng.choice(NAMESPACES)
        if any(space == namespace for _, space, _ in self.leases):
            with pytest.raises(RetryLater):
                self.tree.clear(namespace)
            return
        cleared = self.tree.clear(namespace)
        ids, states = self.oracle.clear(namespace)
        assert set(map(tuple, cleared.ids.T.tolist())) == ids and set(cleared.states) == states
        self.give(cleared.ids)
        self.free_states += cleared.states

    def step(self) -> None:
        """Make one random operation in both, and compare their counters."""
        kinds = (self.match, self.insert, self.touch, self.pin, self.unpin, self.evict, self.checkpoint)
        rare = (self.stale_match, self.refused, self.clear)
        operation = self.rng.choices(kinds + rare, (20, 30, 12, 8, 10, 12, 5, 2, 0.5, 0.1))[0]
        operation()
        if len(self.leases) > 12:
            self.unpin()
        surplus = self.tree.num_cached - self.room
        if surplus > 0:
            self.evict(surplus)
        assert self.tree.num_cached == self.oracle.num_cached
        assert self.tree.num_pinned == self.oracle.num_pinned
        assert self.tree.num_evictable == self.oracle.num_cached - self.oracle.num_pinned
        assert self.tree.num_leases == len(self.leases)
        assert len(self.tree.checkpoints.by_state) == len(self.oracle.states)

    def check(self) -> None:
        """Check the tree, and that every id is either free or in the tree."""
        self.tree.check()
        for group, free in enumerate(self.free):
            assert sorted(free + self.tree.owned_ids(group).tolist()) == list(range(1, 4 * self.room))


CASES = [(1, 2, 1), (1, 50_000, 2), (4, 2, 2), (4, 50_000, 1), (16, 2, 1), (16, 50_000, 3)]


@pytest.mark.parametrize(("block_size", "alphabet", "num_groups"), CASES)
def test_two_hundred_thousand_operations(block_size: int, alphabet: int, num_groups: int) -> None:
    pair = Pair(block_size, alphabet, num_groups, seed=block_size * 7 + alphabet, room=100)
    for step in range(33_400):
        pair.step()
        if step % 200 == 0:
            pair.check()
    finish(pair)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_five_million_operations(seed: int) -> None:
    for i, (block_size, alphabet, num_groups) in enumerate(CASES):
        pair = Pair(block_size, alphabet, num_groups, seed=100 * seed + i, room=(20, 100, 400)[i % 3])
        for step in range(139_000):
            pair.step()
            if step % 500 == 0:
                pair.check()
        finish(pair)


def finish(pair: Pair) -> None:
    """Unpin and evict everything: with no lease left, nothing remains."""
    while pair.leases:
        pair.unpin()
    assert pair.tree.num_pinned == 0
    pair.evict(pair.tree.num_cached)
    pair.check()
    assert pair.tree.num_cached == len(pair.tree.checkpoints.by_state) == 0
    assert not pair.tree._roots and not list(pair.tree._order.victims(1))


@pytest.mark.parametrize("policy", [None, LRU])
@pytest.mark.parametrize("num_groups", [0, 1, 2])
def test_check_after_every_operation(num_groups: int, policy: type[LRU] | None) -> None:
    """LRU by stretches of blocks (None), and by single blocks: both must agree with the oracle."""
    pair = Pair(2, 2, num_groups, seed=3, room=30, policy=policy() if policy else "lru")
    for _ in range(3000):
        pair.step()
        pair.check()
    finish(pair)
