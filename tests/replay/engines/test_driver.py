"""The order of admission, of chunks and of preemption: a manager that writes down what it is asked."""

from __future__ import annotations

import pytest

from kvpagoda.errors import BadInput, CheckFailed
from kvpagoda.replay import Trace
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.driver import Schedule, serve_with
from raises import raises


class Written:
    """A manager of ``room`` tokens that finds ``hit`` tokens, and writes its calls down."""

    finds_all = False

    def __init__(self, room: int = 1_000, hit: int = 0, chunk: int | None = None) -> None:
        self.room, self.hit, self.calls, self.ends, self.each = (
            room,
            hit,
            list[tuple[object, ...]](),
            dict[int, int](),
            chunk,
        )

    def step_starts(self) -> None:
        self.calls.append(("step",))

    def find(self, request: int, known: int) -> int:
        return min(self.hit, known - 1)

    def chunk(self, request: int, begin: int, end: int, known: int) -> int:
        return end if self.each is None else min(end, begin + self.each)

    def start(self, request: int, end: int, known: int) -> bool:
        return self._set("start", request, end, known)

    def grow(self, request: int, end: int, known: int) -> bool:
        return self._set("grow", request, end, known)

    def stop(self, request: int, is_complete: bool) -> None:
        del self.ends[request]
        self.calls.append(("end" if is_complete else "preempt", request))

    def _set(self, name: str, request: int, end: int, known: int) -> bool:
        before = self.ends.pop(request, 0)
        if sum(self.ends.values()) + end > self.room:
            if before:
                self.ends[request] = before
            return False
        self.ends[request] = end
        self.calls.append((name, request, end, known))
        return True


def chains(*lengths: tuple[int, int]) -> Chains:
    records = [
        {"timestamp": 0, "input_length": prompt, "output_length": output, "hash_ids": [i]}
        for i, (prompt, output) in enumerate(lengths)
    ]
    return Chains(Trace.read(records), 4)


def test_one_at_a_time_computes_a_prompt_then_all_of_its_output_but_the_last_token() -> None:
    manager = Written()
    served = serve_with(manager, chains((9, 5), (7, 1)), Schedule())
    assert manager.calls == [
        ("step",), ("start", 0, 9, 9),
        ("step",), ("grow", 0, 13, 13), ("end", 0),
        ("step",), ("start", 1, 7, 7), ("end", 1),
    ]  # fmt: skip
    assert served.steps == 3 and served.hits.tolist() == [0, 0]


def test_two_at_once_in_chunks() -> None:
    manager = Written(hit=2)
    served = serve_with(manager, chains((9, 5), (7, 1), (2, 1)), Schedule(2, 4))
    assert manager.calls == [
        ("step",), ("start", 0, 6, 9), ("start", 1, 6, 7),
        ("step",), ("grow", 0, 9, 9), ("grow", 1, 7, 7), ("end", 1),
        ("step",), ("grow", 0, 13, 13), ("start", 2, 2, 2), ("end", 0), ("end", 2),
    ]  # fmt: skip
    assert served.hits.tolist() == [2, 2, 1]


def test_a_shared_budget_is_spent_on_running_requests_first_and_on_one_token_of_an_output() -> None:
    manager = Written()
    serve_with(manager, chains((6, 3), (5, 1)), Schedule(2, 8, shared=True))
    assert manager.calls == [
        ("step",), ("start", 0, 6, 6), ("start", 1, 2, 5),
        ("step",), ("grow", 0, 7, 7), ("grow", 1, 5, 5), ("end", 1),
        ("step",), ("grow", 0, 8, 8), ("end", 0),
    ]  # fmt: skip


def test_a_request_preempted_in_its_output_knows_the_token_that_it_was_to_read_next() -> None:
    manager = Written(room=13)
    serve_with(manager, chains((6, 4), (6, 4)), Schedule(2, shared=True))
    assert manager.calls[:5] == [("step",), ("start", 0, 6, 6), ("start", 1, 6, 6), ("step",), ("grow", 0, 7, 7)]
    assert manager.calls[5:9] == [("preempt", 1), ("step",), ("grow", 0, 8, 8), ("step",)]
    assert ("start", 1, 7, 7) in manager.calls


def test_the_youngest_is_preempted_and_starts_again_before_others_with_what_it_knew() -> None:
    manager = Written(room=20)
    served = serve_with(manager, chains((8, 9), (8, 5), (3, 1)), Schedule(3, 4))
    assert manager.calls == [
        ("step",), ("start", 0, 4, 8), ("start", 1, 4, 8), ("start", 2, 3, 3), ("end", 2),
        ("step",), ("grow", 0, 8, 8), ("grow", 1, 8, 8),
        ("step",), ("grow", 0, 12, 12), ("preempt", 1),
        ("step",), ("grow", 0, 16, 16), ("start", 1, 4, 12), ("end", 0),
        ("step",), ("grow", 1, 8, 12), ("step",), ("grow", 1, 12, 12), ("end", 1),
    ]  # fmt: skip
    assert served.preempted == 1 and served.never_fit == 0


def test_what_never_fits_is_left_out_and_found_nothing() -> None:
    served = serve_with(Written(room=8), chains((9, 1), (8, 1)), Schedule())
    assert served.never_fit == 1 and served.steps == 1


def test_what_fits_in_part_is_left_out_when_it_came_no_further_alone() -> None:
    """Its first chunk fits, and a later one does not, whoever runs beside it. It is tried twice: the first time it may begin
    again with what it left in the cache."""
    manager = Written(room=8)
    served = serve_with(manager, chains((12, 1), (6, 1)), Schedule(2, 4))
    assert (served.never_fit, served.hits.tolist()) == (1, [0, 0]) and manager.calls[-1] == ("end", 1)
    assert manager.calls.count(("preempt", 0)) == 2 and ("start", 1, 4, 6) in manager.calls


def test_a_manager_that_stands_still_is_found_out() -> None:
    manager = Written()
    manager.chunk = lambda request, begin, end, known: begin if begin else end  # type: ignore[method-assign]
    with raises(CheckFailed, needed=2, available=1):
        serve_with(manager, chains((8, 3)), Schedule())


@pytest.mark.parametrize("wrong", [{"at_once": 0}, {"step_tokens": 0}])
def test_arguments(wrong: dict[str, int]) -> None:
    with raises(BadInput, field=next(iter(wrong)), needed=0, available=1):
        Schedule(**wrong)
