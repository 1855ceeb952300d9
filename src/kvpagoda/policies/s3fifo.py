"""The S3-FIFO policy, and its main queue: a circle whose hand can jump."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import numpy as np

from kvpagoda.arrays import grown
from kvpagoda.errors import CheckFailed
from kvpagoda.policies.heap import LazyHeap
from kvpagoda.policies.protocol import Forgotten, Keys

Queue = OrderedDict[int, None]
_STEPS = 32  # steps of the hand before it looks for a place to jump to
_MOST = 256  # most blocks in one choice
_SPACING = 2**40  # distance of two labels where there is room
_LEAST = 8  # the smallest range of labels that is spread anew, in bits


class Ring:
    """Keys in a circle with a hand. ``put`` inserts a key right behind the hand, so the hand reaches it last.

        ... last put in │ hand │ next │ ...      a key keeps its place; the hand moves

    ``place``: key -> label. Labels grow along the circle except at one seam, so for two keys it is known in O(1) which
    one the hand reaches first. Labels that are too close together are spread anew (Bender et al., "Two simplified
    algorithms for maintaining order in a list", ESA 2002): ``put`` is amortised O(log n), everything else O(1).

    >>> ring = Ring()
    >>> for key in (5, 6, 7): moved = ring.put(key)
    >>> ring.hand, list(ring)
    (5, [5, 6, 7])
    >>> ring.move_hand(6)
    >>> moved = ring.put(8)
    >>> list(ring)
    [6, 7, 5, 8]
    """

    def __init__(self) -> None:
        self.place: dict[int, int] = {}
        self.next: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self.hand = -1  #: the key at the hand; -1: the circle is empty
        self._round = 0  # how often the hand has crossed the seam

    def __len__(self) -> int:
        return len(self.place)

    def __contains__(self, key: int) -> bool:
        return key in self.place

    def __iter__(self) -> Iterator[int]:
        """Yield all keys, starting at the hand."""
        key = self.hand
        for _ in range(len(self)):
            yield key
            key = self.next[key]

    def order(self, key: int) -> tuple[int, int]:
        """Return the order of ``key``: smaller for keys that the hand reaches earlier.

        It grows only when the hand moves past ``key``, or when ``put`` returns the key.
        """
        place = self.place[key]
        return self._round + (place < self.place[self.hand]), place

    def put(self, key: int) -> list[int]:
        """Insert ``key`` behind the hand; return the other keys whose labels changed."""
        moved: list[int] = []
        if self.hand < 0:
            self.hand = self.next[key] = self._before[key] = key
            self.place[key] = 0
            return moved
        hand, last = self.hand, self._before[self.hand]
        step = self._gap(last, hand)
        if step < 2:
            moved = self._spread(last)
            step = self._gap(last, hand)
        self.place[key] = self.place[last] + max(1, step >> 5)
        self._before[key], self.next[key] = last, hand
        self.next[last] = self._before[hand] = key
        return moved

    def take(self, key: int) -> None:
        """Remove ``key``; if the hand is at it, the hand moves on."""
        before, after = self._before.pop(key), self.next.pop(key)
        if after == key:
            self.hand = -1
        else:
            if key == self.hand:
                self._round += self.place[after] < self.place[key]
                self.hand = after
            self.next[before], self._before[after] = after, before
        del self.place[key]

    def move_hand(self, key: int) -> None:
        """Move the hand on to ``key``, past the keys between; once round the circle if it is there already."""
        self._round += self.place[key] <= self.place[self.hand]
        self.hand = key

    def check(self) -> None:
        """Prove that links and labels agree. Raises CheckFailed. O(n)."""
        keys = list(self)
        places = [self.place[key] for key in keys]
        seams = sum(a >= b for a, b in pairwise(places))
        linked = all(self.next[self._before[key]] == key for key in keys)
        if len(set(keys)) != len(self.place) or seams > 1 or (seams and places[-1] >= places[0]) or not linked:
            text = f"a circle of {len(keys)} keys with {seams} seams is broken"
            raise CheckFailed(text, needed=len(self.place), available=len(keys))

    def _gap(self, key: int, after: int) -> int:
        """Return the distance of the labels of ``key`` and ``after``, the next key; a large number across the seam."""
        gap = self.place[after] - self.place[key]
        return gap if gap > 0 else 32 * _SPACING

    def _spread(self, key: int) -> list[int]:
        """Spread the keys around ``key`` over the smallest range of labels with room; return the keys that moved."""
        place, first, last, count = self.place, key, key, 1
        for bits in range(_LEAST, 1 << 30):
            low = place[key] >> bits << bits
            high = low + (1 << bits)
            while low <= place[self._before[first]] < place[first]:
                first, count = self._before[first], count + 1
            while place[last] < place[self.next[last]] < high:
                last, count = self.next[last], count + 1
            if count <= 1.5**bits:
                break
        moved = [first]
        while moved[-1] != last:
            moved.append(self.next[moved[-1]])
        for number, moved_key in enumerate(moved):
            place[moved_key] = low + (number << bits) // count
        return moved


class S3FIFO:
    """S3-FIFO (Yang et al., SOSP 2023) for a cache of ``capacity`` blocks.

    A small queue filters new blocks, a main queue holds the others, and a ghost queue remembers blocks evicted from the
    small queue.

    At the tail of the small queue (a tenth of the capacity), a block that was used more than once since it was added,
    or that is no leaf, moves to the main queue; other blocks are evicted and remembered. At the tail of the main queue,
    a block that was used goes round again with one use less (uses count to 3), and a block that is no leaf goes round
    too.

    The main queue is a circle with a hand, so going round only moves the hand. The hand jumps past blocks that are
    neither leaves nor used, such as inner blocks of long texts: ``_next`` has the others in the order of the circle. A
    choice is amortised O(log blocks). A use is O(1), or O(log blocks) for the first use since the hand passed.
    """

    def __init__(self, capacity: int) -> None:
        self._small_size = max(1, capacity // 10)
        self._ghost_size = capacity - self._small_size
        self._small: Queue = OrderedDict()
        self._main = Ring()
        self._ghost: Queue = OrderedDict()
        self._uses = np.zeros(0, np.int8)
        self._leaves: set[int] = set()
        self._next = LazyHeap(self._main.order)  # keys of the main queue that are leaves or used
        self._waking: set[int] = set()  # keys to be added to ``_next`` before it is read

    def add(self, keys: Keys, priority: int) -> None:
        self._uses = grown(self._uses, int(keys.max(initial=0)) + 1)
        numbers = keys[::-1].tolist()
        self._uses[keys] = 0
        for key in numbers:
            if key in self._ghost:
                del self._ghost[key]
                self._to_main(key)
            else:
                self._small[key] = None

    def touch(self, keys: Keys, priority: int) -> None:
        uses = self._uses[keys]
        waking = keys[uses == 0].tolist()
        self._uses[keys] = np.minimum(uses + 1, 3)
        self._waking.update(key for key in waking if key in self._main)

    def set_leaf(self, key: int, is_leaf: bool) -> None:
        if is_leaf:
            self._leaves.add(key)
            if key in self._main:
                self._waking.add(key)
        else:
            self._leaves.discard(key)

    def choose(self, chain: Callable[[int], Keys]) -> Keys:
        small, main, uses = self._small, self._main, self._uses
        is_spent = False  # whether the hand went all round main without a victim, while small is not empty
        while True:
            if len(small) >= self._small_size or not main or is_spent:
                key = next(iter(small))
                if uses[key] <= 1 and key in self._leaves:
                    over = len(small) - self._small_size + 1
                    return self._run(chain(key), small, 1, max(1, over) if main else _MOST)
                if uses[key] > 1:
                    uses[key] = 0
                del small[key]
                self._to_main(key)
                if not is_spent:
                    continue
                is_spent = bool(small)  # for each block that moved to main, the hand examines one
            if not is_spent and not self._go_on():
                main.move_hand(main.next[main.hand])
                is_spent = True
                continue
            key = main.hand
            if uses[key] > 0:
                uses[key] -= 1
                is_spent = False
            elif key in self._leaves:
                return self._run(chain(key), main, 0, _MOST)
            main.move_hand(main.next[key])

    def remove(self, keys: Keys, *, evicted: bool) -> Forgotten:
        forgotten = []
        for key in keys.tolist():
            if key in self._main:
                self._main.take(key)
                self._next.discard(key)
                self._waking.discard(key)
                forgotten.append(key)
            else:
                del self._small[key]
                if evicted:
                    self._ghost[key] = None
                else:
                    forgotten.append(key)
        while len(self._ghost) > self._ghost_size:
            forgotten.append(self._ghost.popitem(last=False)[0])
        return forgotten

    def check(self, keys: Keys, leaves: set[int]) -> None:
        if leaves != self._leaves:
            raise CheckFailed(f"S3-FIFO and the tree disagree about leaves {sorted(leaves ^ self._leaves)[:16]}")
        queued = sorted([*self._small, *self._main])
        if queued != sorted(keys.tolist()) or not self._ghost.keys().isdisjoint(queued):
            raise CheckFailed(
                f"S3-FIFO queues and tree disagree about keys {sorted({*queued} ^ {*keys.tolist()})[:16]}"
            )
        self._main.check()
        self._next.check(self._next.members & self._main.place.keys())
        lost = {key for key in self._main if key in leaves or self._uses[key]} - self._next.members - self._waking
        if lost:
            raise CheckFailed(f"the hand of S3-FIFO would jump past {sorted(lost)[:16]}")

    def _run(self, keys: Keys, queue: Iterable[int], most_uses: int, limit: int) -> Keys:
        """Return the first of ``keys`` and at most ``limit - 1`` of the keys after it, if they are next in ``queue``.

        Ends at the first key that was used more than ``most_uses`` times.
        """
        n = 0
        for key, queued in zip(keys[:limit].tolist(), queue):
            if key != queued or self._uses[key] > most_uses:
                break
            n += 1
        return keys[:n]

    def _to_main(self, key: int) -> None:
        """Put ``key`` into the main queue."""
        for moved in self._main.put(key):
            if moved in self._next.members:
                self._next.add(moved)
        if key in self._leaves or self._uses[key] > 0:
            self._waking.add(key)

    def _go_on(self) -> bool:
        """Move the hand of main to the next key that is a leaf or used. If there is none, leave it and return False."""
        main, key = self._main, self._main.hand
        for _ in range(min(_STEPS, len(main))):
            if self._uses[key] > 0 or key in self._leaves:
                if key != main.hand:
                    main.move_hand(key)
                return True
            key = main.next[key]
        if len(main) <= _STEPS:
            return False
        for key in self._waking:
            self._next.add(key)
        self._waking.clear()
        while top := self._next.first():
            if self._uses[top[2]] > 0 or top[2] in self._leaves:
                main.move_hand(top[2])
                return True
            self._next.discard(top[2])
        return False
