"""Drives ranks in processes through hand-overs layer by layer, while the prompt is computed, and faults in the middle."""

from __future__ import annotations

import json

from tests.handover.driver import SKEW, TTL, Pair

from kvpagoda.handover import Ticket

FAULTS = (
    "killed sender", "killed receiver", "cut", "slow", "no receipt", "damaged", "expired", "forged", "replayed", "preempted",
    "aborted", "given up",
)  # fmt: skip


class LayerPair(Pair):
    """A ``Pair`` whose sender promises a text, computes it layer by layer, and completes it."""

    def ticket(self) -> tuple[str, int]:
        """Let the sender promise a text of which it has computed a part, or nothing."""
        self.seed += 1
        self.now += 0.5
        length, chunk = int(self.rng.integers(1, 90)), int(self.rng.integers(3, 20))
        at = int(self.rng.integers(0, length)) if self.rng.random() < 0.3 else 0
        for rank in self.senders:
            rank.send("begin", self.now, seed=self.seed, length=length, ttl=TTL, at=at, chunk=chunk)
        tickets = [Ticket.from_json(rank.answer()["ticket"], b"a shared key") for rank in self.senders]
        return Ticket.joined(tickets).to_json(), length

    def some_layers(self, ticket: str, *, most: int = 12) -> None:
        """Compute some of the layers, and let the receivers read what is there, at random."""
        for _ in range(int(self.rng.integers(1, most))):
            count = int(self.rng.integers(1, 5))
            is_all = [rank.call("layers", self.now, count=count)["all"] for rank in self.senders]
            if self.rng.random() < 0.5:
                self.early(ticket)
            if all(is_all):
                break

    def early(self, ticket: str) -> None:
        """Prove that nobody takes what is not complete."""
        for answer in self.receive(ticket):
            assert answer.get("error") == "RetryLater", answer
            self.seen["early"] += 1

    def complete(self) -> None:
        for rank in self.senders:
            rank.send("complete", self.now)
        for rank in self.senders:
            assert "error" not in rank.answer()

    def hand_over(self) -> None:
        ticket, length = self.ticket()
        self.some_layers(ticket)
        self.complete()
        self.good(ticket, length)
        self.idle(later=False)

    def fault(self, fault: str) -> None:
        """Let ``fault`` happen in the middle, or at the end; then hand over once more without."""
        ticket, length = self.ticket()
        self.seen[fault] += 1
        self.some_layers(ticket, most=6)
        getattr(self, "_" + fault.replace(" ", "_"))(ticket, length)
        self.idle(later=True)
        self.hand_over()

    def stopped(self, ticket: str, length: int, how: str) -> None:
        """Let the sender end the prefill; what arrived of it is not taken, now or later."""
        for rank in self.senders:
            rank.call("stop", self.now, how=how)
        for _ in range(2):
            self._typed(self.receive(ticket), length, "HandoverMiss")

    def _killed_sender(self, ticket: str, length: int) -> None:
        victim = int(self.rng.integers(len(self.senders)))
        self.senders[victim].kill()
        self._typed(self.receive(ticket), length, "HandoverMiss", "RetryLater")
        for number, rank in enumerate(self.senders):
            if number == victim:
                rank.start()
            else:
                rank.call("stop", self.now, how="aborted")
        self._typed(self.receive(ticket), length, "HandoverMiss")

    def _killed_receiver(self, ticket: str, length: int) -> None:
        victim = self.receivers[int(self.rng.integers(len(self.receivers)))]
        victim.send("receive", self.now, ticket=ticket, fault="slow")
        assert victim.answer() == {"reading": True}
        victim.kill()
        victim.start()
        self.complete()
        self.good(ticket, length)  # the new process reads all of it

    def _cut(self, ticket: str, length: int) -> None:
        self._typed(self.receive(ticket, fault="cut"), length, "HandoverMiss")
        self.some_layers(ticket)  # the connection is back, and the ticket is still good
        self.complete()
        self.good(ticket, length)

    def _slow(self, ticket: str, length: int) -> None:
        """A read lasts until the prefill is aborted, and another request has its place."""
        for rank in self.receivers:
            rank.send("receive", self.now, ticket=ticket, fault="slow")
            assert rank.answer() == {"reading": True}
        for sender in self.senders:
            sender.call("stop", self.now, how="aborted")
        later, other = self.ticket()
        self.complete()
        for rank in self.receivers:
            while True:
                rank.send("go on", self.now)
                answer = rank.answer()
                if "reading" not in answer:  # what was read of the front may say that more is to come
                    self._typed([answer], length, "HandoverMiss", "RetryLater")
                    break
        self._typed(self.receive(ticket), length, "HandoverMiss")
        self.good(later, other)

    def _no_receipt(self, ticket: str, length: int) -> None:
        self.complete()
        self._typed(self.receive(ticket, fault="no receipt"), length, "")

    def _damaged(self, ticket: str, length: int) -> None:
        for rank in self.senders:
            rank.call("damage", self.now, at=int(self.rng.integers(1000)), first=128)
        self._typed(self.receive(ticket), length, "RetryLater", "HandoverMiss")
        self.complete()
        self._typed(self.receive(ticket), length, "HandoverMiss", "")

    def _expired(self, ticket: str, length: int) -> None:
        self.now += TTL + 0.01
        self._typed(self.receive(ticket), length, "HandoverMiss")
        self.now += SKEW
        for rank in self.senders:
            assert rank.call("layers", self.now, count=1).get("error", "StaleHandle") == "StaleHandle"
            rank.call("stop", self.now, how="aborted")

    def _forged(self, ticket: str, length: int) -> None:
        """By whom has no key: a longer life, and a promise of fewer tokens."""
        for changed in ({"expires": self.now + 1e6}, {"length": 1}, {"by_layer": False}):
            forged = json.dumps(dict(json.loads(ticket), **changed))
            self._typed(self.receive(forged), length, "TicketRefused")
        self.complete()
        self.good(ticket, length)

    def _replayed(self, ticket: str, length: int) -> None:
        self.complete()
        self.good(ticket, length)
        self._typed(self.receive(ticket), length, "TicketRefused")

    def _preempted(self, ticket: str, length: int) -> None:
        self.stopped(ticket, length, "preempted")

    def _aborted(self, ticket: str, length: int) -> None:
        self.stopped(ticket, length, "aborted")

    def _given_up(self, ticket: str, length: int) -> None:
        self.stopped(ticket, length, "given up")
