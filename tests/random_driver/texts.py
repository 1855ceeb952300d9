"""What the driver knows of each request, in plain Python, and where prompts come from."""

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
    """``namespace`` for requests that stay on ``epoch``; None: for those that do not."""
    return replace(namespace if isinstance(namespace, Namespace) else Namespace(namespace), epoch=epoch)


def epoch_of(namespace: Any) -> int | None:
    """On which epoch requests of ``namespace`` stay."""
    return namespace.epoch if isinstance(namespace, Namespace) else None


MEDIA = tuple(bytes([number]) * 16 for number in range(3))


class Request:
    """A request of the driver.

    ``tokens``: committed ones, what is left of the prompt, and a draft that was written but not committed (``num_written``
    tokens are). ``reserve``: tokens that it may hold without waiting for others, None if nothing is promised any more.
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
        self.seeds = [(0, seed)]  # (first token, seed of what was computed from there on)
        self.tokens, self.media, self.prompt_length = tokens, dict(media), len(tokens)
        self.length = self.num_written = self.started_at = 0
        self.reserve: int | None = reserve
        self.highest = 0  # tokens that a batch or a commit ever went up to
        self.fences = 0
        self.is_suspended = self.is_closed = False
        self.version = 0  # changes with every write
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
        """The marks of the first ``end`` tokens."""
        if self._marks is None or len(self._marks) != len(self.tokens):
            seeds = np.empty(len(self.tokens), np.uint64)
            for first, seed in self.seeds:
                seeds[first:] = seed
            self._marks = marks_of(seeds, self.tokens, self.media)
        return self._marks[:end]

    def enter(self, seed: int) -> None:
        """What is written from now on is written with other weights."""
        self.seeds.append((self.num_written, seed))
        self._marks = None

    def next_tokens(self, n: int, after: Tokens) -> Tokens:
        """The next ``n`` tokens: those of the prompt as long as it lasts, then ``after``."""
        known = self.tokens[self.length : min(self.prompt_length, self.length + n)]
        return np.concatenate((known, after[: n - len(known)])).astype(np.int32)

    def write(self, tokens: Tokens) -> None:
        """``tokens`` follow what is committed, and their rows are written."""
        end = self.length + len(tokens)
        rest = self.tokens[end : self.prompt_length]
        self.tokens = np.concatenate((self.text, tokens, rest)).astype(np.int32)
        self._marks, self.num_written, self.version, self.is_blank = None, end, self.version + 1, False
        self.reached(end)

    def reached(self, end: int) -> None:
        self.highest = max(self.highest, end)

    def cut(self, length: int, prompt_length: int | None = None) -> None:
        """Only ``length`` tokens are committed; the prompt ends there or at ``prompt_length``, and so do its media."""
        known = length if prompt_length is None else prompt_length
        self.tokens, self._marks = self.tokens[:known].copy(), None
        self.media = {at: digest for at, digest in self.media.items() if at < known}
        self.prompt_length, self.length, self.num_written = min(self.prompt_length, known), length, length
        self.version += 1

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "suspended" if self.is_suspended else "runs"
        return f"#{self.number} ({state}, {self.length} of {len(self.tokens)} tokens)"


class Epochs:
    """Which states of namespaces there were: what was cached before ``invalidate`` is another text than what comes after."""

    def __init__(self, weights: str) -> None:
        self._number = 0
        self.restart(weights)

    def restart(self, weights: str) -> None:
        """A new process begins, with these weights."""
        self._epochs: list[Any] = [weights]
        self._renewed: dict[Namespace, tuple[int, int]] = {}  # up to which epoch, and a number

    def renew(self, namespaces: tuple[Any, ...], weights: str | None) -> None:
        self._number += 1
        if namespaces:
            last = len(self._epochs) - 1
            self._renewed.update({on_epoch(one, None): (last, self._number) for one in namespaces})
        else:
            self._epochs.append(self._number if weights is None else weights)

    def seed(self, namespace: Any) -> int:
        """The seed of what is computed in ``namespace`` now."""
        own, stays = on_epoch(namespace, None), epoch_of(namespace)
        epoch = len(self._epochs) - 1 if stays is None else stays
        last, number = self._renewed.get(own, (-1, 0))
        return seed_of((self._epochs[epoch], number if epoch <= last else None, own))


class Documents:
    """Texts that prompts begin with and outputs follow, so that requests share, part and meet again."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        first, second = (random.integers(0, 40, length).astype(np.int32) for length in (44, 33))
        self._texts: list[tuple[Tokens, dict[int, bytes]]] = [
            (first, {}), (first, {8: MEDIA[0], 21: MEDIA[1]}), (first[:30], {8: MEDIA[1]}), (second, {}),
            (second, {5: MEDIA[0]}), (np.concatenate((first[:16], second)), {}),
        ]  # fmt: skip

    def one(self) -> tuple[Tokens, dict[int, bytes]]:
        return self._texts[int(self._random.integers(len(self._texts)))]

    def keep(self, request: Request) -> None:
        """Let later prompts begin with what a request wrote."""
        if request.length > 8:
            self.add(request.text.copy(), request.media)

    def add(self, tokens: Tokens, media: Mapping[int, bytes]) -> None:
        """Let later prompts begin with ``tokens``."""
        if not len(tokens):
            return  # a prompt that was taken back whole
        own = {at: digest for at, digest in media.items() if at < len(tokens)}
        self._texts = [*self._texts[:6], *self._texts[-2:], (tokens, own)]

    def prompt(self) -> tuple[Tokens, dict[int, bytes]]:
        """A beginning of a document, mostly with something of its own; or just the document."""
        tokens, media = self.one()
        if self._random.random() < 0.6:
            tokens = tokens[: int(self._random.integers(len(tokens) // 3, len(tokens) + 1))]
            tail = self._random.integers(0, 6, int(self._random.integers(1, 9))).astype(np.int32)
            tokens = np.concatenate((tokens, tail))
        tokens = tokens[: MAX_CONTEXT - 4]
        return tokens, {at: digest for at, digest in media.items() if at < len(tokens)}

    def after(self, length: int, n: int) -> Tokens:
        """``n`` tokens that may follow ``length`` others: often those that some document has there."""
        own = self._random.integers(0, 3, n).astype(np.int32)
        if self._random.random() < 0.6:
            there = self.one()[0][length : length + n]
            own[: len(there)] = there
        return own
