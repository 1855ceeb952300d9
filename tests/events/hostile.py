"""Batches that no publisher sends: good ones with something in them replaced, removed, doubled, moved or cut off."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

import msgspec

from kvpagoda import KVCache
from kvpagoda.errors import BadInput
from kvpagoda.events import EventLog, EventStream, Follower

Message = tuple[int, bytes]
_NESTED: Any = []
for _ in range(99):
    _NESTED = [_NESTED]
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 4, 7, 2**20, 2**31, 2**40, 2**63, 2**64 - 1, 0.5, float("nan"), "", "x", "GPU", "CPU",
    "gpu", "ab" * 16, b"", bytes(31), bytes(32), [], [None], [0], [1, 1], [2**40], ["a"], [-1], [[["ab" * 16, 0]]],
    [[["ab" * 16, -1]]], [[["zz", 0]]], [[[]]], {}, {"a": 1}, {"block_size": 4}, _NESTED, [0] * 5000,
)  # fmt: skip
FIELDS = (
    "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "extra_keys", "group_idx", "namespace",
    "group_name", "instance", "cache", "lost", "lora_id", "cache_salt",
)  # fmt: skip


class Damage:
    """Damages messages, at random. ``names``: of blocks that there are or were, to name them in the wrong place."""

    def __init__(self, random: random.Random) -> None:
        self.random = random
        self.names: list[Any] = [1]

    def __call__(self, message: Message) -> Message:
        """``message``, damaged once or more; its number may be a near one."""
        number, payload = message
        draw = self.random
        if draw.random() < 0.1:
            return number + draw.choice((-2, -1, 1, 2)), payload
        if draw.random() < 0.2:
            return number, draw.choice((self.cut, self.flipped, self.longer))(payload)
        batch = msgspec.msgpack.decode(payload)
        self.names += [name for event in batch[1] if event["type"] == "BlockStored" for name in event["block_hashes"]][
            -9:
        ]
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            draw.choice((self.events, self.field, self.field, self.item, self.item, self.cache))(batch)
        return number, msgspec.msgpack.encode(batch)

    # -- bytes -------------------------------------------------------------------------------------------------------

    def cut(self, payload: bytes) -> bytes:
        return payload[: self.random.randrange(len(payload))]

    def flipped(self, payload: bytes) -> bytes:
        at = self.random.randrange(len(payload))
        return payload[:at] + bytes([payload[at] ^ 1 << self.random.randrange(8)]) + payload[at + 1 :]

    def longer(self, payload: bytes) -> bytes:
        at = self.random.randrange(len(payload) + 1)
        return payload[:at] + self.random.randbytes(self.random.randrange(1, 9)) + payload[at:]

    def value(self, *others: Any) -> Any:
        """Anything, or one of ``others``: a copy, for it may be damaged further."""
        return deepcopy(self.random.choice((*VALUES, *others)))

    # -- what they mean ----------------------------------------------------------------------------------------------

    def events(self, batch: Any) -> None:
        """Events are dropped, doubled, or come in another order; or the batch is no batch."""
        events, draw = batch[1], self.random
        if not isinstance(events, list) or not events or draw.random() < 0.1:
            batch[draw.randrange(3)] = self.value()
            return
        at = draw.randrange(len(events))
        match draw.randrange(5):
            case 0:
                del events[at]
            case 1:
                events.insert(draw.randrange(len(events) + 1), events[at])
            case 2:
                draw.shuffle(events)
            case 3:
                events.insert(at, self.value())
            case 4:
                batch.append(self.value())

    def one(self, batch: Any) -> dict[str, Any]:
        events = batch[1] if isinstance(batch[1], list) else []
        return self.random.choice([event for event in events if isinstance(event, dict)] or [{}])

    def field(self, batch: Any) -> None:
        """A field is removed, or has a value of another."""
        event, name = self.one(batch), self.random.choice(FIELDS)
        if self.random.random() < 0.3:
            event.pop(name, None)
        else:
            event[name] = self.value(*self.names[-3:])

    def item(self, batch: Any) -> None:
        """In a list of an event something is replaced, removed, doubled or moved."""
        event, draw = self.one(batch), self.random
        lists = [value for value in event.values() if isinstance(value, list) and value]
        if not lists:
            return
        one = draw.choice(lists)
        at = draw.randrange(len(one))
        match draw.randrange(4):
            case 0:
                one[at] = self.value(*self.names[-9:])
            case 1:
                del one[at:]
            case 2:
                one.insert(draw.randrange(len(one) + 1), one[at])
            case 3:
                draw.shuffle(one)

    def cache(self, batch: Any) -> None:
        """The description of the cache is another one."""
        told = self.one(batch).get("cache")
        if not isinstance(told, dict) or not told:
            return
        groups = told.get("groups")
        if isinstance(groups, list) and groups and self.random.random() < 0.5:
            one = self.random.choice(groups)
            if isinstance(one, list) and one:
                one[self.random.randrange(len(one))] = self.value("full", "state", "window", "chunk")
            else:
                groups.append(self.value())
        else:
            told[self.random.choice([*told])] = self.value()


class Siege:
    """A follower of ``cache`` to whom damaged messages come between the good ones."""

    def __init__(self, cache: KVCache, log: EventLog, random: random.Random, secret: bytes) -> None:
        self.cache, self.log, self.random, self.damage = cache, log, random, Damage(random)
        self.follower, self.num_refused, self.num_accepted, self.num_compared, self.num_hits = (
            Follower(secret),
            0,
            0,
            0,
            0,
        )
        self.begin()

    def begin(self) -> None:
        """Another publisher begins."""
        self.stream = EventStream(self.log, keep=self.random.choice((3, 50)))
        self.is_misled = False
        self.catch_up()

    def send(self) -> None:
        """What happened is sent; a damaged message comes before it, after it or in its place, or in place of a replay."""
        good = self.stream.drain() or self.random.choice((self.stream.alive(), self.stream.replay(-1)[0]))
        bad = self.damage(good)
        for message in self.random.choice(([bad], [bad, good], [good, bad], [bad, bad, good])):
            if message is good:
                self.hear(message)
            else:
                self.hear_damaged(message)

    def hear(self, message: Message) -> None:
        """A good message may contradict what a damaged one said; it is asked for again then."""
        try:
            self.follower.feed(*message)
        except BadInput:
            assert self.follower.wanted is not None

    def hear_damaged(self, message: Message) -> None:
        follower = self.follower
        before, waits = self.answers(), bool(follower._waiting)
        try:
            follower.feed(*message)
        except BadInput:
            self.num_refused += 1
            assert waits or self.answers() == before, "a batch that was refused has changed something"
            is_next = 0 <= message[0] >= follower._next
            assert follower.wanted is not None or not is_next, "a batch that was refused is not asked for again"
        else:
            self.num_accepted += 1
            self.is_misled = True

    def answers(self) -> tuple[int, list[Any]]:
        return self.follower.num_blocks, [self.follower.resumable(text) for text in self.texts[-3:]]

    texts: tuple[Any, ...] = ()

    def catch_up(self) -> None:
        """What is missing is asked for; where a damaged message was believed, the publisher starts again."""
        if self.is_misled:
            self.begin()
            return
        for _ in range(6):
            self.hear(self.stream.alive())
            if (wanted := self.follower.wanted) is None:
                return
            for message in self.stream.replay(wanted):
                self.hear(message)
        raise AssertionError(f"after six replays batch {self.follower.wanted} is still missing")

    def compare(self, texts: list[tuple[Any, Any, dict[int, bytes]]]) -> None:
        """``texts``: tokens, namespace and media."""
        self.catch_up()
        self.texts = tuple(text.copy() for text, _, _ in texts)
        for text, namespace, media in texts:
            found = self.cache.lookup(text, namespace, media=media)
            told = self.follower.resumable(text, namespace, media=media)
            assert told == (found.cached, found.resumable), (text, namespace, media)
            self.num_compared += 1
            self.num_hits += found.resumable > 0
