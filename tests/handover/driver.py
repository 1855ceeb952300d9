"""Drives ranks in processes of their own through hand-overs and faults, and proves what holds after each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from kvpagoda import TicketRefused
from kvpagoda.handover import Ticket

HERE = Path(__file__).parent
TTL, SKEW = 30.0, 1.0
FAULTS = (
    "killed sender", "killed receiver", "cut", "slow", "no receipt", "damaged", "expired", "forged", "replayed",
    "wrong schema", "wrong weights", "given no receiver",
)  # fmt: skip


class Rank:
    """A worker process, started anew after a kill."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(HERE / "worker.py")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
        )
        self.send("make", 0.0, **self.settings)
        self.answer()

    def send(self, name: str, now: float, **given: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": name, "now": now, **given}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the worker {self.settings} ended: {self.process.poll()}"
        answer: dict[str, Any] = json.loads(line)
        assert "wrong" not in answer, answer["wrong"]
        return answer

    def call(self, name: str, now: float, **given: Any) -> dict[str, Any]:
        self.send(name, now, **given)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Pair:
    """The ranks of a sender and those of a receiver of one model, and a receiver of another model and of other weights."""

    def __init__(
        self,
        kind: str,
        ranks: tuple[int, int] = (1, 1),
        blocks: tuple[int, int] = (8, 8),
        transfer: str = "shared",
        seed: int = 0,
    ) -> None:
        self.rng, self.now, self.seed = np.random.default_rng(seed), 1e6, seed * 1000
        self.seen, self.rows, self.transfer, self.kind = Counter[str](), 0, transfer, kind
        self.senders = [self._rank(kind, rank, ranks[0], blocks[0], "4MiB") for rank in range(ranks[0])]
        self.receivers = [self._rank(kind, rank, ranks[1], blocks[1], "") for rank in range(ranks[1])]
        self.others: dict[str, Rank] = {}

    def _rank(self, kind: str, rank: int, ranks: int, size: int, exported: str, weights: str = "w") -> Rank:
        return Rank(
            kind=kind,
            transfer=self.transfer,
            rank=rank,
            ranks=ranks,
            block_size=size,
            exported=exported,
            weights=weights,
        )

    def close(self) -> None:
        for rank in (*self.senders, *self.receivers, *self.others.values()):
            rank.kill()

    def ticket(self) -> tuple[str, int]:
        """Let the sender compute a text and hand it over. Return the ticket, and how many tokens it has."""
        self.seed += 1
        self.now += 0.5
        length = int(self.rng.integers(1, 90))
        for rank in self.senders:
            rank.send("hand_over", self.now, seed=self.seed, length=length, ttl=TTL)
        tickets = [Ticket.from_json(rank.answer()["ticket"], b"a shared key") for rank in self.senders]
        return Ticket.joined(tickets).to_json(), length

    def receive(self, ticket: str, **given: Any) -> list[dict[str, Any]]:
        for rank in self.receivers:
            rank.send("receive", self.now, ticket=ticket, **given)
        return [rank.answer() for rank in self.receivers]

    def good(self, ticket: str, length: int) -> None:
        for answer in self.receive(ticket):
            assert answer.get("length") == length, answer
            self.rows += answer["rows"]
        self.seen["good"] += 1

    def idle(self, *, later: bool) -> None:
        """Prove that nothing is held: at once, or, ``later``, when the lease and the skew are over."""
        if later:
            self.now += TTL + SKEW + 0.01
        for rank in (*self.senders, *self.receivers):
            rank.call("idle", self.now)

    def hand_over(self) -> None:
        self.good(*self.ticket())
        self.idle(later=False)

    def fault(self, fault: str) -> None:
        """Let ``fault`` happen in a hand-over, prove that the receiver gets right bytes or a typed miss, and that nothing is
        held past the lease; then hand over once more without."""
        ticket, length = self.ticket()
        self.seen[fault] += 1
        getattr(self, "_" + fault.replace(" ", "_"))(ticket, length)
        self.idle(later=True)
        self.hand_over()

    def _typed(self, answers: list[dict[str, Any]], length: int, *errors: str) -> None:
        for answer in answers:
            assert answer.get("error") in errors or (answer.get("length") == length and "" in errors), answer
            self.seen[answer.get("error", "right bytes")] += 1

    def _killed_sender(self, ticket: str, length: int) -> None:
        victim = self.senders[int(self.rng.integers(len(self.senders)))]
        victim.kill()
        self._typed(self.receive(ticket), length, "HandoverMiss", "")
        victim.start()

    def _killed_receiver(self, ticket: str, length: int) -> None:
        victim = self.receivers[int(self.rng.integers(len(self.receivers)))]
        victim.send("receive", self.now, ticket=ticket, fault="slow")
        assert victim.answer() == {"reading": True}
        victim.kill()
        for sender in self.senders:  # the lease is kept for it until it expires
            assert "wrong" not in sender.call("idle_is_refused", self.now)
        victim.start()

    def _cut(self, ticket: str, length: int) -> None:
        self._typed(self.receive(ticket, fault="cut"), length, "HandoverMiss")
        self.good(ticket, length)  # the connection is back, and the ticket is still good

    def _slow(self, ticket: str, length: int) -> None:
        for rank in self.receivers:
            rank.send("receive", self.now, ticket=ticket, fault="slow")
            assert rank.answer() == {"reading": True}
        self.now += TTL + SKEW + 0.01
        later, other = self.ticket()  # frees the lease, and takes its place
        for rank in self.receivers:
            while True:
                rank.send("go on", self.now)
                answer = rank.answer()
                if "reading" not in answer:  # right where the new lease is short: what it did not overwrite is verified
                    self._typed([answer], length, "HandoverMiss", "")
                    break
        self.good(later, other)

    def _no_receipt(self, ticket: str, length: int) -> None:
        self._typed(self.receive(ticket, fault="no receipt"), length, "")

    def _damaged(self, ticket: str, length: int) -> None:
        for rank in self.senders:
            rank.call("damage", self.now, at=int(self.rng.integers(1000)))
        self._typed(self.receive(ticket), length, "HandoverMiss", "")

    def _expired(self, ticket: str, length: int) -> None:
        self.now += TTL + 0.01
        self._typed(self.receive(ticket), length, "HandoverMiss")

    def _forged(self, ticket: str, length: int) -> None:
        forged = dict(json.loads(ticket), expires=self.now + 1e6)
        self._typed(self.receive(json.dumps(forged)), length, "TicketRefused")
        try:
            Ticket.from_json(json.dumps(forged), b"a shared key")
        except TicketRefused:
            return
        raise AssertionError("a forged ticket was read")

    def _replayed(self, ticket: str, length: int) -> None:
        self.good(ticket, length)
        self._typed(self.receive(ticket), length, "TicketRefused")

    def _other(self, what: str, kind: str, weights: str) -> Rank:
        if what not in self.others:
            self.others[what] = self._rank(kind, 0, 1, 8, "", weights)
        return self.others[what]

    def _wrong_schema(self, ticket: str, length: int) -> None:
        other = self._other("schema", "mla" if self.kind != "mla" else "full", "w")
        self._typed([other.call("receive", self.now, ticket=ticket)], length, "TicketRefused")

    def _wrong_weights(self, ticket: str, length: int) -> None:
        other = self._other("weights", self.kind, "other")
        self._typed([other.call("receive", self.now, ticket=ticket)], length, "TicketRefused")

    def _given_no_receiver(self, ticket: str, length: int) -> None:
        """Nobody comes."""
