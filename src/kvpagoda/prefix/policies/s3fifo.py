"""The S3-FIFO policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

from kvpagoda.errors import CheckFailed
from kvpagoda.prefix.id_pool import grown
from kvpagoda.prefix.lazy_heap import LazyHeap
from kvpagoda.prefix.policies.ghosts import Queue, sized
from kvpagoda.prefix.policies.protocol import Forgotten, Keys
from kvpagoda.prefix.policies.ring import Ring

_STEPS = 32  # steps of the hand before it looks for a place to jump to
_MOST = 256  # most blocks in one choice


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
        self._small_size = max(1, sized(capacity) // 10)
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
