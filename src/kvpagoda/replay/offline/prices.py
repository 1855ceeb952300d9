"""The bound: which reuses are worth the memory that they take, if the whole trace is known?

Let a cache find ``h[j]`` tokens for request ``j``, and let ``u[j, t]`` be the bytes that these take in step ``t`` by
``demand``. What a cache holds fits: the sum of ``u[j, t]`` over the requests is at most ``room[t]``, the memory without
what the running requests hold. So for every list of prices ``p[t] >= 0``

    sum of h[j]  <=  sum of h[j] + sum of p[t] (room[t] - sum of u[j, t])
                  =  sum of p[t] room[t] + sum over j of (h[j] - sum of p[t] u[j, t])
                 <=  sum of p[t] room[t] + sum over j of (the most that a resume point is worth above its price).

The last line does not depend on the cache: any prices give a bound, and ``bound`` looks for prices that give a low one.
This is Lagrange's relaxation of the choice of reuses, as good as its linear program. For caches of objects of different
sizes that program is the bound FOO of Berger, Beckmann and Harchol-Balter, "Practical bounds on optimal caching with
variable object sizes", POMACS 2(2), 2018; here a reuse takes rows, windows and copies over different times, and a request
chooses one of several resume points.

What the best resume point of a request is worth needs the ends of its stretches alone. The deeper a token, the earlier its
last user ended, so the higher its price. Within a stretch, then, full attention costs the same for each token, a window
costs less for each further token (it leaves cheaper ones behind), and the copy of the states costs the same everywhere:
worth minus price is convex, so one of the two ends is best, and the upper end is the end of the stretch above, where a copy
costs no more.

Left out, so that the bound may lie above every cache: blocks are whole, memory is cut into sectors, a reuse may be kept by a
fraction, a copy of the states can be had wherever an earlier request passed, and nothing is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvpagoda.replay.offline.demand import TraceDemand
from kvpagoda.replay.trace import Floats

ROUNDS = 3000
"""Rounds of the search for low prices."""


@dataclass(frozen=True, eq=False)
class Bound:
    """No cache finds more than ``tokens``. ``packed``: the tokens of one choice of reuses that fits, the best that was seen:
    what the linear program leaves open lies between. ``unlimited``: the tokens that are found if everything fits.
    ``prices``: tokens for a byte in each step, float64 ``[steps]``."""

    tokens: float
    packed: float
    unlimited: float
    prices: Floats


class _Market:
    """A demand in ``room`` bytes, float64 ``[steps]``: what its reuses cost by prices, and what they take."""

    def __init__(self, demand: TraceDemand, room: Floats) -> None:
        self.demand, self.room = demand, room
        self.has_to_lie = demand.first <= demand.last
        starts = np.r_[True, demand.request[1:] != demand.request[:-1]]
        self.firsts, self.owner = np.flatnonzero(starts), np.cumsum(starts) - 1

    def worth(self, prices: Floats) -> Floats:
        """Return tokens minus price of each resume point, float64 ``[stretches]``."""
        demand, upto = self.demand, np.append(0.0, np.cumsum(prices))
        of_byte = np.where(self.has_to_lie, upto[demand.last + 1] - upto[demand.first], 0.0)
        paid = np.bincount(demand.option, demand.nbytes * of_byte[demand.part], len(demand.end))
        return np.asarray(demand.end - paid, np.float64)

    def usage(self, are_chosen: np.ndarray) -> Floats:
        """Return the bytes that the chosen resume points take in each step, float64 ``[steps]``. ``are_chosen``: bool
        ``[stretches]``."""
        demand, steps = self.demand, len(self.room) + 1
        nbytes = np.bincount(demand.part, demand.nbytes * are_chosen[demand.option], len(demand.end))[self.has_to_lie]
        begins, ends = demand.first[self.has_to_lie], demand.last[self.has_to_lie] + 1
        return np.cumsum(np.bincount(begins, nbytes, steps) - np.bincount(ends, nbytes, steps))[:-1]


def bound(
    demand: TraceDemand, room: Floats, rounds: int = ROUNDS, on_round: Callable[[int], None] | None = None
) -> Bound:
    """Return a bound on the tokens that are found with ``room`` bytes, float64 ``[steps]``, above 0.

    Prices rise where more is wanted than there is room, and fall elsewhere; the best of ``rounds`` is kept. Each takes
    O(stretches + steps). ``on_round`` is called with the number of each."""
    free = np.zeros(len(room))
    if not len(demand.end):
        return Bound(0.0, 0.0, 0.0, free)
    market = _Market(demand, room)
    prices = np.full(len(room), demand.end.sum() / room.sum() / 4)
    unlimited = float(np.maximum.reduceat(demand.end, market.firsts).sum())
    lowest, best, packed = unlimited, free, 0.0
    for number in range(rounds):
        worth = market.worth(prices)
        most = np.maximum(np.maximum.reduceat(worth, market.firsts), 0.0)
        tokens = float(prices @ room + most.sum())
        if tokens < lowest:
            lowest, best = tokens, prices
        is_best = (worth > 0) & (worth >= most[market.owner])
        used = market.usage(is_best)
        if (used <= room).all():
            packed = max(packed, float(demand.end[is_best].sum()))
        change = (0.3 / (1 + number / 50) ** 0.5) * (used / room - 1)
        prices = np.maximum(prices * np.exp(np.clip(change, -1, 1)), 1e-300)
        if on_round is not None:
            on_round(number)
    packed = max(packed, _packed(market, market.worth(best)))
    return Bound(lowest, packed, unlimited, best)


def _packed(market: _Market, worth: Floats) -> float:
    """Return the tokens of a choice that fits: resume points with the most worth first, each if there is room."""
    demand, room, tokens, served = market.demand, market.room.copy(), 0.0, set[int]()
    bounds = np.searchsorted(demand.option, np.arange(len(demand.end) + 1))
    for option in np.argsort(-worth, kind="stable").tolist():
        if demand.request[option] in served:
            continue
        parts = slice(bounds[option], bounds[option + 1])
        taken = [
            (slice(demand.first[part], demand.last[part] + 1), nbytes)
            for part, nbytes in zip(demand.part[parts].tolist(), demand.nbytes[parts].tolist())
            if market.has_to_lie[part]
        ]
        if all((room[steps] >= sum(n for other, n in taken if other.start <= steps.start)).all() for steps, _ in taken):
            for steps, nbytes in taken:
                room[steps] -= nbytes
            served.add(int(demand.request[option]))
            tokens += float(demand.end[option])
    return tokens
