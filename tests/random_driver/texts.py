"""The driver's record of each request, in plain Python, and the source of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpagoda import Namespace

from .caches import MAX_CONTEXT
from .fingerprints import Marks, marks_of, seed_of

Tokens = npt.NDArray[np.int32]
NAMESPACES = (None, "a", b"a", Namespace(salt="a", adapter="b"))


def on_epoch(namespace: Any, epoch: int | None) -> Namespace:
    """Return ``namespace`` for requests that stay on ``epoch`` (None: for requests that do not stay on one)."""
    return replace(namespace if isinstance(namespace, Namespace) else Namespace(namespace), epoch=epoch)


def epoch_of(namespace: Any) -> int | None:
    """Return the epoch that requests of ``namespace`` stay on, or None."""
    return namespace.epoch if isinstance(namespace, Namespace) else None


MEDIA = tuple(bytes([number]) * 16 for number in range(3))


class Request:
    """The driver's record of one request.

    ``tokens``: the committed ones, then a draft that was written but not committed, then the rest of the prompt. The
    first ``num_written`` of them are written. ``reserve``: tokens that the request may hold without waiting for others;
    None if nothing is reserved any more.
    """

    def __init__(
        self,
        number: int,
        handle: Any,
        seed: int,
        namespace: Any,
        tokens: Tokens,
        media: Mapping[int, bytes],
        reserve: int,
    ) -> None:
        self.number, self.handle, self.namespace = number, handle, namespace
        self.seeds = [(0, seed)]  # (first token, seed of the tokens that were computed from there on)
        self.has_changed = False  # its weights or the meaning of its namespace did, if only before it had tokens
        self.tokens, self.media, self.prompt_length = tokens, dict(media), len(tokens)
        self.length = self.num_written = self.started_at = 0
        self.reserve: int | None = reserve
        self.highest = 0  # the most tokens that a batch or a commit ever covered
        self.fences = 0
        self.is_suspended = self.is_closed = False
        self.version = 0  # changes with every write
        self.left: set[int] = set()  # positions at which its newest step left states
        self.is_blank = True  # nothing was ever written to its states
        self._marks: Marks | None = None

    @property
    def is_running(self) -> bool:
        return not (self.is_closed or self.is_suspended)

    @property
    def text(self) -> Tokens:
        """The committed tokens."""
        return self.tokens[: self.length]

    def marks(self, end: int) -> Marks:
        """Return the marks of the first ``end`` tokens, uint64 ``[end]``."""
        if self._marks is None or len(self._marks) != len(self.tokens):
            seeds = np.empty(len(self.tokens), np.uint64)
            for first, seed in self.seeds:
                seeds[first:] = seed
            self._marks = marks_of(seeds, self.tokens, self.media)
        return self._marks[:end]

    def enter(self, seed: int) -> None:
        """Use ``seed`` for the tokens that are written from now on, because weights or the namespace changed."""
        self.seeds.append((self.num_written, seed))
        self.has_changed = True
        self._marks = None

    def forget_behind(self, length: int) -> None:
        """Its rows behind the first ``length`` tokens are gone: those that are written there next are of the newest seed."""
        newest = self.seeds[-1][1]
        seeds = [(first, seed) for first, seed in self.seeds if first < length] or [(0, newest)]
        self.seeds = seeds if seeds[-1][1] == newest else [*seeds, (length, newest)]
        self._marks = None

    def next_tokens(self, n: int, after: Tokens) -> Tokens:
        """Return the next ``n`` tokens: those of the prompt as long as it lasts, then those of ``after``."""
        known = self.tokens[self.length : min(self.prompt_length, self.length + n)]
        return np.concatenate((known, after[: n - len(known)])).astype(np.int32)

    def write(self, tokens: Tokens) -> None:
        """Record that ``tokens`` follow the committed ones and that their rows are written."""
        self.forget_behind(self.length)  # what was written there before is written again
        end = self.length + len(tokens)
        rest = self.tokens[end : self.prompt_length]
        self.tokens = np.concatenate((self.text, tokens, rest)).astype(np.int32)
        self._marks, self.num_written, self.version, self.is_blank = None, end, self.version + 1, False
        self.reached(end)

    def reached(self, end: int) -> None:
        self.highest = max(self.highest, end)

    def cut(self, length: int, prompt_length: int | None = None) -> None:
        """Keep ``length`` committed tokens. The prompt and its media end there, or at ``prompt_length`` if given."""
        known = length if prompt_length is None else prompt_length
        self.tokens, self._marks = self.tokens[:known].copy(), None
        self.media = {at: digest for at, digest in self.media.items() if at < known}
        self.prompt_length, self.length, self.num_written = min(self.prompt_length, known), length, length
        self.forget_behind(length)
        self.version += 1

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "suspended" if self.is_suspended else "runs"
        return f"#{self.number} ({state}, {self.length} of {len(self.tokens)} tokens)"


class Epochs:
    """The history of weights and namespaces: equal tokens before and after an ``invalidate`` are different texts."""

    def __init__(self, weights: str) -> None:
        self._number = 0
        self.restart(weights)

    def restart(self, weights: str) -> None:
        """Forget the history, as a new process with these weights does."""
        self._epochs: list[Any] = [weights]
        self._renewed: dict[Namespace, tuple[int, int]] = {}  # -> (the last epoch that it applies to, its number)

    def renew(self, namespaces: tuple[Any, ...], weights: str | None) -> None:
        """Record an ``invalidate`` of ``namespaces`` (none: of everything, with new ``weights``)."""
        self._number += 1
        if namespaces:
            last = len(self._epochs) - 1
            self._renewed.update({on_epoch(one, None): (last, self._number) for one in namespaces})
        else:
            self._epochs.append(self._number if weights is None else weights)

    def seed(self, namespace: Any) -> int:
        """Return the seed of the tokens that are computed in ``namespace`` now."""
        own, stays = on_epoch(namespace, None), epoch_of(namespace)
        epoch = len(self._epochs) - 1 if stays is None else stays
        last, number = self._renewed.get(own, (-1, 0))
        return seed_of((self._epochs[epoch], number if epoch <= last else None, own))


class Documents:
    """Texts that prompts begin with and outputs follow, so that requests share prefixes, diverge and meet again."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        first, second = (random.integers(0, 40, length).astype(np.int32) for length in (44, 33))
        self._texts: list[tuple[Tokens, dict[int, bytes]]] = [
            (first, {}), (first, {8: MEDIA[0], 21: MEDIA[1]}), (first[:30], {8: MEDIA[1]}), (second, {}),
            (second, {5: MEDIA[0]}), (np.concatenate((first[:16], second)), {}),
        ]  # fmt: skip

    def one(self) -> tuple[Tokens, dict[int, bytes]]:
        """Return one of the texts and its media."""
        return self._texts[int(self._random.integers(len(self._texts)))]

    def keep(self, request: Request) -> None:
        """Let later prompts begin with the text of ``request``."""
        if request.length > 8:
            self.add(request.text.copy(), request.media)

    def add(self, tokens: Tokens, media: Mapping[int, bytes]) -> None:
        """Let later prompts begin with ``tokens``."""
        if not len(tokens):
            return  # a prompt that was rewound to its beginning
        own = {at: digest for at, digest in media.items() if at < len(tokens)}
        self._texts = [*self._texts[:6], *self._texts[-2:], (tokens, own)]

    def prompt(self) -> tuple[Tokens, dict[int, bytes]]:
        """Return a prompt and its media: mostly a prefix of a document with a random tail, else a whole document."""
        tokens, media = self.one()
        if self._random.random() < 0.6:
            tokens = tokens[: int(self._random.integers(len(tokens) // 3, len(tokens) + 1))]
            tail = self._random.integers(0, 6, int(self._random.integers(1, 9))).astype(np.int32)
            tokens = np.concatenate((tokens, tail))
        tokens = tokens[: MAX_CONTEXT - 4]
        return tokens, {at: digest for at, digest in media.items() if at < len(tokens)}

    def after(self, length: int, n: int) -> Tokens:
        """Return ``n`` tokens that may follow ``length`` others: often those of some document at that position."""
        own = self._random.integers(0, 3, n).astype(np.int32)
        if self._random.random() < 0.6:
            known = self.one()[0][length : length + n]
            own[: len(known)] = known
        return own
