"""Where should checkpoints lie, if it is known where later requests leave a text?

A request that leaves a text after ``d`` tokens resumes at the last checkpoint up to there. A checkpoint anywhere serves no
more than one moved down to the next place where a request leaves, so these places alone are tried. For one text the best
``n`` places are found exactly, with the recurrence of "Sparse Prefix Caching" (arXiv 2605.05219). The texts of a trace are a
tree; there a price for each checkpoint takes the place of their number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpagoda.replay.offline.demand import Texts, TraceDemand
from kvpagoda.replay.trace import Ints


def best_places(depths: Ints, counts: Ints, most: int) -> tuple[int, Ints]:
    """Return the most tokens that requests resume after with ``most`` checkpoints in one text, and the places of these,
    ascending. ``counts[i]`` requests leave the text after ``depths[i]`` tokens, ascending. O(most x depths^2).

    With ``n`` checkpoints up to a last one at depth i, the requests that leave above it resume after at most

        f[n, i] = max over k < i of f[n - 1, k] + depths[k] * (requests that leave from k on and before i),

    where k is the checkpoint before; f[1, i] = 0.

    >>> best_places(np.array([10, 20, 90]), np.array([5, 5, 1]), 2)
    (190, array([10, 90]))
    """
    before = np.cumsum(counts) - counts
    between = np.where(np.tri(len(depths), k=-1, dtype=bool), before[:, None] - before[None, :], 0)  # [i, k]
    gains = np.where(np.tri(len(depths), k=-1, dtype=bool), between * depths, -(2**62))
    values, chosen = np.zeros(len(depths), np.int64), list[Ints]()
    tails = depths * (counts.sum() - before)  # of a last checkpoint
    best, at, number = 0, -1, 0
    for n in range(min(most, len(depths))):
        if n:
            table = values[None, :] + gains
            chosen.append(table.argmax(1))
            values = np.where(np.arange(len(depths)) < n, -(2**61), table.max(1, initial=-(2**61)))
        if (values + tails).max() > best:
            at, number = int((values + tails).argmax()), n
            best = int((values + tails)[at])
    places = [] if at < 0 else [at]
    for n in range(number - 1, -1, -1):
        places.append(int(chosen[n][places[-1]]))
    return best, depths[np.array(places[::-1], np.int64)]


@dataclass(frozen=True, eq=False)
class Leaves:
    """The places where requests leave earlier texts: arrays int64 ``[n]``, a place before those below it. ``parent``: the
    place above, -1 if there is none; ``depth``: tokens; ``count``: how many requests leave there."""

    parent: Ints
    depth: Ints
    count: Ints

    @classmethod
    def of(cls, texts: Texts, demand: TraceDemand) -> Leaves:
        """Return the places where the requests of ``texts`` leave the texts of earlier ones, as ``demand`` has them."""
        is_last = np.append(demand.request[1:] != demand.request[:-1], True)[: len(demand.end)]
        leaving: dict[tuple[int, int], list[int]] = {}  # (depth, node of the last token) -> requests
        for j, depth in zip(demand.request[is_last].tolist(), demand.end[is_last].tolist()):
            node = int(texts.paths[j][(depth - 1) // texts.tokens_per_id])
            leaving.setdefault((depth, node), []).append(j)
        last: dict[int, int] = {}  # node -> the deepest place so far whose last token is in it
        parent, places = list[int](), sorted(leaving)
        for number, (depth, node) in enumerate(places):
            path = texts.paths[leaving[depth, node][0]][: (depth - 1) // texts.tokens_per_id + 1]
            parent.append(next((last[above] for above in path[::-1].tolist() if above in last), -1))
            last[node] = number
        counts = [len(leaving[place]) for place in places]
        return cls(*(np.array(column, np.int64) for column in (parent, [depth for depth, _ in places], counts)))

    def choose(self, price: float) -> tuple[float, Ints]:
        """Return the most tokens that requests resume after, less ``price`` for each checkpoint, and the places that have
        one, of equal choices a small one. O(places x places above one)."""
        n = len(self.parent)
        above = [np.zeros(1, np.int64)] * n  # the depths at which a request may resume that passes the place, 0 first
        for v in range(n):
            if (p := int(self.parent[v])) >= 0:
                above[v] = np.append(above[p], self.depth[p])
        below = [np.zeros(len(depths) + 1) for depths in above]  # by where it resumes: what the places below are worth
        is_worth: list[np.ndarray] = [np.zeros(0, bool)] * n
        total = 0.0
        for v in range(n - 1, -1, -1):
            without = self.count[v] * above[v] + below[v][:-1]
            with_one = self.count[v] * self.depth[v] + below[v][-1] - price
            is_worth[v] = with_one > without
            value = np.maximum(without, with_one)
            if (p := int(self.parent[v])) >= 0:
                below[p] += value
            else:
                total += float(value[0])
        has_one, at = (
            np.zeros(n, bool),
            np.zeros(n, np.int64),
        )  # at: where requests resume above v, an index of above[v]
        for v in range(n):
            if (p := int(self.parent[v])) >= 0:
                at[v] = len(above[p]) if has_one[p] else at[p]
            has_one[v] = is_worth[v][at[v]]
        return total, np.flatnonzero(has_one)

    def found(self, chosen: Ints) -> int:
        """Return the tokens after which requests resume with checkpoints at ``chosen``."""
        has_one, resumed = np.isin(np.arange(len(self.parent)), chosen), np.zeros(len(self.parent), np.int64)
        for v, p in enumerate(self.parent.tolist()):
            resumed[v] = self.depth[v] if has_one[v] else resumed[p] if p >= 0 else 0
        return int((resumed * self.count).sum())

    def best(self, most: int, rounds: int = 60) -> tuple[float, Ints]:
        """Return a bound on what ``most`` checkpoints in all can find, and a good choice of at most so many.

        For every price, what a choice finds is at most its worth at this price plus ``most`` times the price; the price is
        halved until the number of checkpoints is near. At the numbers of checkpoints that some price gives, both are
        the best."""
        low, high = 0.0, float((self.depth * self.count).sum() + 1)
        bound, best = high, np.empty(0, np.int64)
        for _ in range(rounds):
            price = (low + high) / 2
            worth, chosen = self.choose(price)
            bound = min(bound, worth + most * price)
            if len(chosen) > most:
                low = price
            else:
                high = price
                if self.found(chosen) > self.found(best):
                    best = chosen
        return min(bound, self.choose(0.0)[0]), best
