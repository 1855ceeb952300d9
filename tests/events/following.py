"""A cache with a follower behind a line that loses, doubles and swaps messages; both are asked the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvpagoda import KVCache
from kvpagoda.events import Encoding, EventLog, EventStream, Follower

Message = tuple[int, bytes]
ENCODINGS = tuple(Encoding(form, names) for form in ("map", "array") for names in ("int", "bytes"))


class Line:
    """What the stream of ``cache`` says, as far as it arrives. ``loss``: the share of messages that do not. ``encoding``: of
    the first publisher; each next one has the next of ``ENCODINGS``, which the follower is not told either."""

    def __init__(
        self, cache: KVCache, log: EventLog, random: Any, loss: float = 0.0, keep: int = 10_000, encoding: int = 0
    ) -> None:
        self.encoding = encoding
        self.random, self.loss, self.keep = random, loss, keep
        self.num_compared = self.num_hits = self.num_cut = self.num_events = self.num_replays = 0
        self.num_restarts = 0
        self.follower = Follower()
        self.follow(cache, log)

    def follow(self, cache: KVCache, log: EventLog) -> None:
        """Another publisher begins; the follower is not told."""
        encoding = ENCODINGS[self.encoding % len(ENCODINGS)]
        self.cache, self.stream = cache, EventStream(log, keep=self.keep, encoding=encoding)
        self.encoding += 1
        self.held: Message | None = None

    def restart_publisher(self) -> None:
        """Another process publishes what the same cache does."""
        self.num_events += self.stream.num_events
        self.follow(self.cache, self.stream._log)

    def restart_follower(self) -> None:
        """A router begins that knows nothing."""
        self.follower = Follower()

    def send(self) -> None:
        """What happened is sent; it may be lost, come twice, or after the next message."""
        message = self.stream.drain()
        if message is None or self.random.random() < self.loss:
            return
        late, self.held = self.held, None
        if self.loss and self.random.random() < 0.2:
            self.held = message
        else:
            self.follower.feed(*message)
        if late is not None:
            self.follower.feed(*late)
            self.follower.feed(*late)

    def catch_up(self) -> None:
        """A sign of life tells what is missing, and it is asked for until nothing is; also of these messages some are lost."""
        self.send()
        if self.held is not None:
            self.follower.feed(*self.held)
            self.held = None
        self.follower.feed(*self.stream.alive())
        while self.follower.wanted is not None:
            self.num_replays += 1
            for message in self.stream.replay(self.follower.wanted):
                if self.random.random() >= self.loss:
                    self.follower.feed(*message)
            self.follower.feed(*self.stream.alive())

    def compare(self, tokens: Any, namespace: Any = None, media: Mapping[int, bytes] | None = None) -> None:
        """The follower says of a text what the cache says."""
        found = self.cache.lookup(tokens, namespace, media=media)
        told = self.follower.resumable(tokens, namespace, media=media)
        self.num_compared += 1
        self.num_hits += found.resumable > 0
        self.num_cut += found.resumable < found.cached // self.cache.block_size * self.cache.block_size
        said = f"of {np.asarray(tokens).tolist()} in {namespace!r} with {media}: {told}, the cache {found}"
        assert (told.cached, told.resumable) == (found.cached, found.resumable), said

    def check(self) -> None:
        """Both sides of the line agree on every block, its groups and its use."""
        ours, theirs = self.stream.index, self.follower._index
        assert theirs is not None and ours.blocks.keys() == theirs.blocks.keys()
        for name, block in ours.blocks.items():
            other = theirs.blocks[name]
            assert (block.groups, block.is_usable, block.depth) == (other.groups, other.is_usable, other.depth)
