"""A router of one's own says what ``lookup`` says, whatever requests do, with messages lost and processes restarted: any order
of operations that hypothesis thinks of, and a shorter one where it finds a difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")
pytest.importorskip("zmq", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")
pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from router import Router
from traffic import Traffic

from kvpagoda.errors import BadInput, OutOfBlocks, RetryLater
from kvpagoda.events import EventStream, namespace_name

SCHEMAS = ("full", "sliding", "gemma", "qwen3_next", "mamba", "mixed")
TEXTS = st.tuples(st.integers(0, 2), st.integers(0, 40), st.lists(st.integers(0, 2), max_size=10)).map(
    lambda one: [*((np.arange(one[1]) * (one[0] + 1)) % 7).tolist(), *one[2], 9]
)
NAMESPACES = st.sampled_from((None, None, "a"))
PLACES = st.integers(0, 3)


class Machine(RuleBasedStateMachine):
    """Requests over one cache after another, and a router that hears of it through a line that loses messages."""

    schema = "full"
    num_events = num_compared = num_hits = num_replays = 0

    @initialize(seed=st.integers(0, 30))
    def make(self, seed: int) -> None:
        """``seed``: of the policy, the grid of hits and where checkpoints are kept."""
        self.traffic = Traffic(self.schema, seed)
        self.router, self.asked = Router(), [([*range(20)], None)]
        self.begin()

    def begin(self) -> None:
        """A publisher begins, which the router is not told."""
        self.stream = EventStream(self.traffic.log, keep=8)
        self.late: tuple[int, bytes] | None = None

    def count(self) -> None:
        type(self).num_events += self.stream.num_events

    # -- requests ----------------------------------------------------------------------------------------------------

    def attempt(self, call: Any) -> Any:
        """What ``call`` returns; where there is no room all requests end."""
        try:
            return call()
        except (RetryLater, OutOfBlocks, BadInput):
            self.traffic.end()

    @rule(text=TEXTS, namespace=NAMESPACES, publish=st.integers(0, 9))
    def open(self, text: list[int], namespace: Any, publish: int) -> None:
        self.asked = [*self.asked[-6:], (text, namespace)]
        traffic = self.traffic
        opened = self.attempt(lambda: traffic.cache.open(text, namespace, capacity=0, publish=publish > 0))
        if opened is not None:
            traffic.running.append(opened)

    @rule(at=PLACES, num_steps=st.integers(1, 8), answer=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def compute(self, at: int, num_steps: int, answer: list[int]) -> None:
        """Steps of a prompt, or one of an answer."""
        if not self.traffic.running:
            return
        one = self.traffic.running[at % len(self.traffic.running)]
        if one.length >= one.prompt_length:
            self.attempt(lambda: self.step(one, answer))
        for _ in range(num_steps):
            if one.is_open and (left := one.prompt_length - one.length) > 0:
                n = min(8, left, self.traffic.cache.step_limit(one))
                tokens = one._request.tokens[one.length : one.length + n].tolist()
                self.attempt(lambda tokens=tokens: self.step(one, tokens))

    @staticmethod
    def step(one: Any, tokens: list[int]) -> None:
        one.extend(len(tokens))
        one.commit(tokens)

    @rule(text=TEXTS, namespace=NAMESPACES)
    def serve(self, text: list[int], namespace: Any) -> None:
        """A request from its beginning to its end."""
        before = len(self.traffic.running)
        self.open(text, namespace, 1)
        if len(self.traffic.running) > before:
            self.compute(before, 8, [0])
        if len(self.traffic.running) > before:
            self.traffic.running.pop().close()

    @rule(at=PLACES, what=st.sampled_from(("close", "close", "fork", "set aside", "rewind")))
    def change(self, at: int, what: str) -> None:
        if not self.traffic.running:
            return
        one = self.traffic.running[at % len(self.traffic.running)]
        if what == "close":
            self.asked.append(([*one.tokens.tolist(), 1], None))
            self.traffic.running.remove(one)
            one.close()
        elif what == "fork":
            child = self.attempt(one.fork)
            self.traffic.running += [] if child is None else [child]
        elif what == "rewind":
            self.attempt(lambda: one.rewind(min(1, one.length)))
        else:
            self.attempt(lambda: (one.suspend(whole=at % 2 == 0), one.resume()))

    @rule(what=st.sampled_from(("a", None, "all", "weights")))
    def invalidate(self, what: Any) -> None:
        cache = self.traffic.cache
        {"all": cache.invalidate, "weights": lambda: cache.invalidate(weights="w")}.get(
            what, lambda: cache.invalidate(what)
        )()

    # -- the line ----------------------------------------------------------------------------------------------------

    @rule(fate=st.sampled_from(("arrives", "arrives", "lost", "late")))
    def send(self, fate: str) -> None:
        message = self.stream.drain()
        if message is None or fate == "lost":
            return
        late, self.late = self.late, message if fate == "late" else None
        for one in (message, late, late):
            if one is not None and one is not self.late:
                self.router.hear(*one)

    @rule(what=st.sampled_from(("publisher", "router", "engine")))
    def restart(self, what: str) -> None:
        if what == "router":
            self.router = Router()
            return
        self.count()
        if what == "engine":
            self.traffic.start()
        self.begin()

    @rule(losing=st.lists(st.booleans(), max_size=4))
    def compare(self, losing: list[bool]) -> None:
        """It asks for what it lacks, of which some may be lost again, until nothing is; then both say the same."""
        self.send("arrives")
        self.router.hear(*self.stream.alive())
        while (first := self.router.asks_from) is not None:
            type(self).num_replays += 1
            for message in self.stream.replay(first):
                if not losing or not losing.pop():
                    self.router.hear(*message)
        texts = [text for text, _ in self.asked] + [[*one.tokens.tolist(), 5] for one in self.traffic.running]
        spaces = [space for _, space in self.asked] + [None] * len(self.traffic.running)
        for text, space, found in zip(texts, spaces, self.traffic.cache.lookup(texts, spaces)):
            told = self.router.resumable(text, namespace_name(space, b"s"))
            assert told == (found.cached, found.resumable), (text, space, found)
            type(self).num_hits += found.resumable > 0
        type(self).num_compared += len(texts)

    def teardown(self) -> None:
        self.compare([])
        self.count()
        self.traffic.cache.check()


def follow(schema: str, num_examples: int, num_steps: int) -> type[Machine]:
    """So many runs of so many operations."""
    machine = type("Machine", (Machine,), {"schema": schema})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples, stateful_step_count=num_steps, deadline=None, derandomize=True, database=None,
            suppress_health_check=[*HealthCheck], print_blob=False,
        ),
    )  # fmt: skip
    return machine


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_router_of_ones_own_says_what_lookup_says(schema: str) -> None:
    found = follow(schema, 8, 30)
    assert found.num_events > 100 and found.num_compared > 50 and found.num_hits and found.num_replays


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS)
def test_in_many_runs_too(schema: str) -> None:
    found = follow(schema, 150, 100)
    told = (found.num_events, found.num_compared, found.num_hits, found.num_replays)
    print("{}: {:,} events, {:,} look-ups compared, {:,} of them hits, {:,} replays".format(schema, *told))
