"""What is asked: prompts of random symbols, and cases, which are lists of steps.

A symbol is a number: a token id where the server takes ids, else a letter with a space before it, which most vocabularies have
as one token. So a prompt can be cut, joined and made anew whatever the server takes, and a case is plain data that a file
keeps: ``Case.fresh`` replaces its symbols by others and leaves what its prompts have in common.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvpagoda.errors import BadInput

Symbols = tuple[int, ...]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
FIRST_ID, LAST_ID = 32, 250
"""Token ids of prompts: every vocabulary has these, and few have a special token among them."""


@dataclass(frozen=True)
class PromptPart:
    """A piece of a prompt; in a chat a message.

    Args:
        symbols: what it says.
        role: who says it, in a chat.
        answer: the number of a step before; its answer then stands here, and there are no symbols.
        image: a number, from which a picture is drawn that comes before the symbols; in a chat alone.
    """

    symbols: Symbols = ()
    role: str = "user"
    answer: int | None = None
    image: int | None = None


@dataclass(frozen=True)
class Ask:
    """A request.

    Args:
        parts: the prompt.
        kind: what is tried by it, e.g. "repeat"; empty: its answer is not judged.
        most: the most tokens of its answer.
        chat: whether it is a chat, and not a completion.
        model: another model than that of the audit.
        salt: its ``cache_salt``.
        cold: whether the server is told to leave out what is cached (``cache_prompt``).
    """

    parts: tuple[PromptPart, ...]
    kind: str = ""
    most: int = 6
    chat: bool = False
    model: str | None = None
    salt: str | None = None
    cold: bool = False

    @property
    def key(self) -> Ask:
        """What its right answer depends on: two requests with the same key have the same one."""
        return replace(self, kind="", salt=None, cold=False)

    @property
    def answers(self) -> list[int]:
        """The steps whose answers it repeats."""
        return [part.answer for part in self.parts if part.answer is not None]


@dataclass(frozen=True)
class PromptStep:
    """What is done at once.

    Args:
        do: "ask" (one after the other), "together" (all at the same moment), "abort" (the first one's connection is closed
            before it is answered; others are asked at the same moment), "churn" (other prompts fill the cache), or "wait"
            (until the user has done something).
        asks: the requests.
        churn: how much other prompts fill, in parts of the cache.
        after: when the connection is closed, in parts of the time that the request before it took; 0: at the first token.
    """

    do: str
    asks: tuple[Ask, ...] = ()
    churn: float = 0.0
    after: float = 0.0


@dataclass(frozen=True)
class Case:
    """A list of steps, the judged requests among them. ``name``: of the probe that made it."""

    name: str
    steps: tuple[PromptStep, ...] = ()

    def fresh(self, draw: Draw) -> Case:
        """Return the same case with other symbols: prompts have the same beginnings in common, and nothing with earlier ones.

        Args:
            draw: where symbols come from.
        """
        others = draw.permutation()
        moved = dict[int, int]()
        firsts = list(dict.fromkeys(ask.parts[0].symbols[0] for ask in self.asks() if ask.parts[0].symbols))
        for symbol in firsts:  # the first symbols are ones that began no prompt yet, as far as there are any
            moved[symbol] = draw.head(taken=moved.values())
        left = [symbol for symbol in others if symbol not in moved.values()]
        for symbol in others:
            if symbol not in moved:
                moved[symbol] = left.pop()
        salt = draw.salt()

        def renewed(ask: Ask) -> Ask:
            parts = tuple(
                replace(
                    part,
                    symbols=tuple(moved.get(symbol, symbol) for symbol in part.symbols),
                    image=None if part.image is None else part.image + draw.shift,
                )
                for part in ask.parts
            )
            return replace(ask, parts=parts, salt=None if ask.salt is None else ask.salt[:1] + salt)

        draw.shift += 100
        return self.each(renewed)

    def each(self, change: Any) -> Case:
        """Return the case with ``change(ask)`` in place of each request."""
        return replace(self, steps=tuple(replace(step, asks=tuple(map(change, step.asks))) for step in self.steps))

    def asks(self) -> Iterator[Ask]:
        """Yield the requests, in their order."""
        for step in self.steps:
            yield from step.asks

    def until(self, number: int) -> Case:
        """Return the case up to its request ``number``."""
        steps, seen = list[PromptStep](), 0
        for step in self.steps:
            steps.append(step)
            seen += len(step.asks)
            if seen > number:
                break
        return replace(self, steps=tuple(steps))

    def without(self, number: int) -> Case | None:
        """Return the case without step ``number``; None if later ones repeat an answer, so that numbers would change."""
        if any(ask.answers for ask in self.asks()):
            return None
        return replace(self, steps=self.steps[:number] + self.steps[number + 1 :])

    @property
    def num_requests(self) -> int:
        """How many requests it sends, without churn and twins."""
        return sum(len(step.asks) for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the case as plain data."""
        return asdict(self)

    @classmethod
    def of(cls, data: Any) -> Case:
        """Return the case that ``to_dict`` returned as ``data``. Raises BadInput."""
        try:
            return cls(data["name"], tuple(_step(step) for step in data["steps"]))
        except (KeyError, TypeError) as error:
            raise BadInput(f"not a case of an audit: {error!r}", field="case") from None


def _step(data: Any) -> PromptStep:
    asks = tuple(
        Ask(
            **{
                **ask,
                "parts": tuple(PromptPart(**{**part, "symbols": tuple(part["symbols"])}) for part in ask["parts"]),
            }
        )
        for ask in data["asks"]
    )
    return PromptStep(data["do"], asks, data["churn"], data.get("after", 0.0))


def one(*asks: Ask) -> tuple[PromptStep, ...]:
    """Return steps that ask one after the other."""
    return tuple(PromptStep("ask", (ask,)) for ask in asks)


@dataclass
class Draw:
    """Where random symbols come from.

    Args:
        seed: two draws with the same seed draw the same.
        as_ids: whether symbols are token ids, else letters.
        shift: added to the numbers of pictures, so that those of each case are new.
    """

    seed: int
    as_ids: bool = True
    shift: int = 100
    _num_heads: int = 0
    _random: random.Random = field(init=False)
    _heads: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._heads = self.permutation()

    @property
    def symbols(self) -> range:
        """All symbols."""
        return range(FIRST_ID, LAST_ID) if self.as_ids else range(len(LETTERS))

    def permutation(self) -> list[int]:
        """Return all symbols in a random order."""
        return self._random.sample(self.symbols, len(self.symbols))

    def head(self, taken: Iterable[int] = ()) -> int:
        """Return the symbol that was the first of a prompt longest ago, but none of ``taken``."""
        taken = set(taken)
        while True:
            self._num_heads += 1
            if (symbol := self._heads[self._num_heads % len(self._heads)]) not in taken:
                return symbol

    def text(self, n: int, head: bool = False) -> Symbols:
        """Return ``n`` symbols. ``head``: they begin a prompt, so that the first is one that began none yet."""
        drawn = self._random.choices(self.symbols, k=max(n, 1))
        if head:
            drawn[0] = self.head()
        return tuple(drawn)

    def salt(self) -> str:
        """Return a salt that was never used."""
        return f"{self._random.getrandbits(64):016x}"

    def number(self, first: int, last: int) -> int:
        """Return a number of ``first`` to ``last``, both included."""
        return self._random.randint(first, max(first, last))
