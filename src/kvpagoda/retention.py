"""WHICH positions of a text stay resumable, and how high what is new enters the order of eviction: one rule.

A *position* is a number of tokens after which a request can go on, because what windows and states need there is kept: a
checkpoint, or the tail of a window. ``RetentionRule`` is asked by ``KVCache`` (``core/cache``), by replays, whose requests a
``KVCache`` serves, and by the scheduler in vLLM (``adapters/vllm``). They differ in its parameters alone:

                        ``KVCache``                             vLLM
    unit                blocks, or the hit grid                 what a hit of all its groups is a multiple of
    coarse              1,024 tokens where states are copied    none: it ends its steps where texts are known to part
    slack               512 tokens where no states are copied   none: a whole block that was computed can be found
    keeps_prompt_end    yes                                     no: blocks enter its order when the request frees them, so
                                                                the end of the text is kept then; until it is found, since
                                                                the text that goes on there has an end of its own
    checkpoint_cost     the bytes of a checkpoint               0: its order is a queue, and nothing enters in the middle
    cold                evicted first: a group of windows       ages up to three times as fast: all groups share one pool,
                        evicts its own blocks                   and texts take what windows leave

No torch, no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ColdAging", "RetentionRule"]

_NEVER_FOUND = 0.2
"""The rank of what no request found, where a checkpoint costs something, before what it spares is counted."""
_MOST_COLD_AGING = 3.0


@dataclass(frozen=True)
class RetentionRule:
    """Which positions of a text are kept, and how high what is new ranks. Numbers of tokens unless said otherwise.

    Args:
        unit: positions are multiples of it, at least 1.
        every: a prompt keeps a position at each multiple; 0: at none.
        coarse: one more at the last multiple of it in a prompt; 0: none.
        slack: for how many tokens before the last position of a prompt windows are kept too.
        keeps_prompt_end: whether a prompt keeps its last position, from which the same prompt can be resumed with a token
            left to compute.
        checkpoint_cost: the bytes of a checkpoint, in blocks of text that take as many. 0: all that is new ranks highest.
    """

    unit: int = 1
    every: int = 0
    coarse: int = 0
    slack: int = 0
    keeps_prompt_end: bool = True
    checkpoint_cost: float = 0.0

    def positions(self, prompt: int, cached: int, *parted: int) -> list[int]:
        """Return after how many tokens a request keeps its text resumable, ascending. O(their number).

        Args:
            prompt: the tokens of its prompt.
            cached: after how many of them it starts; positions are behind that.
            *parted: where its text parts from others that are or were cached.

        Examples:
            >>> RetentionRule(unit=16, coarse=1024).positions(2100, 160, 500)
            [496, 2048, 2096]
            >>> RetentionRule(unit=16, every=600, keeps_prompt_end=False).positions(2100, 160, 0)
            [592, 1200, 1792]
        """
        last = prompt - 1
        ends = [*parted]
        if self.keeps_prompt_end:
            ends.append(last)
        if self.every:
            ends += range((cached // self.every + 1) * self.every, prompt, self.every)
        if self.coarse:
            ends.append(last // self.coarse * self.coarse)
        return sorted({at for at in (end // self.unit * self.unit for end in ends) if at > cached})

    def rank(self, gain: int, found: float) -> float:
        """Return how high something new enters the order of eviction, from 0, as what is evicted next, to 1, as what was
        used last.

        It is the computing that it spares for its bytes, as in GreedyDual-Size (Cao and Irani, USITS 1997), times how much
        its request found, since a text that was never found may never be. What is found later counts as used then.

        Args:
            gain: the blocks that a request which resumes at its end need not compute, but would if it resumed at the
                position before.
            found: the share of its prompt that the request which computes it found, 0 to 1.
        """
        if not self.checkpoint_cost:
            return 1.0
        gain = max(1, gain)
        return min(1.0, _NEVER_FOUND + found) * gain / (gain + self.checkpoint_cost)


class ColdAging:
    """How much faster what is *cold* ages, where it shares one memory with what is *warm*, blocks of texts and of positions
    that are kept. Cold are blocks of windows and states that resuming no text is known to need.

    ``factor``: 1, plain least recently used, to 3. Requests that miss texts raise it, those that miss windows lower it.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def missed(self, cold: int, warm: int) -> None:
        """Adapt to what a request did not find.

        Args:
            cold: tokens for want of windows or states.
            warm: tokens for want of the text before them.
        """
        if cold + warm:
            factor = self.factor * 2 ** ((warm - cold) / (warm + cold) / 2)
            self.factor = min(_MOST_COLD_AGING, max(1.0, factor))

    def is_warm_next(self, cold_age: int, warm_age: int) -> bool:
        """Return whether what is warm is evicted before what is cold.

        Args:
            cold_age: of what is cold.
            warm_age: of what is warm.
        """
        return warm_age > self.factor * cold_age
