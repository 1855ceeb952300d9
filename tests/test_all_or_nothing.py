"""Every public operation is atomic: an exception at its n-th internal call, for any n, leaves nothing half done.

An operation is a generator. It prepares a scene and yields the one call that is interrupted. It then receives the
result and whether the call raised, finds out through public names what the call changed, and continues. After that
every request of the scene computes more tokens, and each row that it reads is compared with its own text. What was
cached before is found again, and all slots and blocks can be used.

    undone   the call raised and had changed nothing, and a second call succeeded
    done     the call raised, or treated the failure as a miss, and did everything that it promises
    reset    a signal arrived in lines that cannot be undone; the cache reported it, and ``reset`` repaired it
    damage   anything else

``python -m pytest -s tests/test_all_or_nothing.py`` prints how many points had which outcome. ``-m "slow or not slow"``
runs all points of all kinds (an hour). ``KVPAGODA_SWEEP=FILE`` writes the counts to a JSON file too. Some cases: ``-k
"gemma and close"``. One point: ``cut("gemma", "close", "signal", 7)``.
"""

from __future__ import annotations

import json
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
from tests.sweep import handing, keeping, opening, running, stepping
from tests.sweep.interruption import Interruption, Point, any_call, at_most, failing_call, failing_functions
from tests.sweep.kinds import KINDS
from tests.sweep.operations import ONLY, OPERATIONS, WITH_TIER, Steps
from tests.sweep.scene import Scene

from kvpagoda import errors
from kvpagoda.errors import OutOfBlocks, RetryLater

ROOMS = (opening, running, keeping, stepping, handing)
"""The modules that define operations: an import of one registers its operations in ``OPERATIONS``."""
FOLDER = str(Path(__file__).parent)
QUICK_KINDS = ("full", "gemma", "qwen3_next")
QUICK_POINTS = {"signal": 3, "memory": 2, "driver": 2}
"""Way -> about how many points of each case the default run takes, evenly spread."""
READ_AHEAD = {"prefetch", "batch, layers that come in"}
"""Operations with a tier that do not wait for any call of its driver."""
SECONDS = 20.0
"""The most seconds that one point may take."""


class Cut(NamedTuple):
    """The outcome of one operation that was interrupted at one point; ``outcome`` is "over" if it has no such point."""

    outcome: str
    where: str = ""
    why: str = ""


def cut(kind: str, name: str, way: str, n: int) -> Cut:
    """Interrupt operation ``name`` of model ``kind`` at its ``n``-th point of ``way``, counted from 1."""
    with at_most(SECONDS):
        scene = Scene(kind, name in WITH_TIER)
        try:
            return _cut(scene, OPERATIONS[name](scene), WAYS[way], n)
        finally:
            scene.end()


@cache
def num_points(kind: str, name: str) -> dict[str, int]:
    """Return how many points of each way the operation has. Nothing fails here, so the operation must succeed."""
    for _ in range(2):  # the first run may import modules, whose calls count too; the second does not
        with at_most(SECONDS):
            scene = Scene(kind, name in WITH_TIER)
            scene.is_undisturbed = True
            try:
                found = _count(scene, OPERATIONS[name](scene))
            finally:
                scene.end()
        if name in _IMPORTED:
            break
        _IMPORTED.add(name)
    return found


_IMPORTED: set[str] = set()


def _count(scene: Scene, steps: Steps) -> dict[str, int]:
    """Make the call of the operation without a failure, and count its points by way."""
    call, found = next(steps), dict.fromkeys(WAYS, 0)

    def count(frame: FrameType, event: str, argument: Any) -> str:
        for way in ("signal", "memory"):
            found[way] += bool(WAYS[way].is_point(frame, event, argument))  # type: ignore[misc]
        return ""

    for driver in scene.drivers:
        driver.arm(0)
    with Interruption(0, count, KeyboardInterrupt):
        result = call()
    if scene.drivers:
        assert scene.cache.flush()
        found["driver"] = scene.drivers[0].count
    with pytest.raises(StopIteration) as end:
        steps.send((result, False))
    assert end.value.value == "done"
    scene.prove()
    return found


class Way(NamedTuple):
    """How calls are made to fail. ``is_point`` None: calls of a tier's driver fail, in the threads of the tier."""

    is_point: Point | None
    error: type[BaseException]


WAYS = {
    "signal": Way(any_call, KeyboardInterrupt),
    "memory": Way(failing_call, MemoryError),
    "driver": Way(None, MemoryError),
}


def _cut(scene: Scene, steps: Steps, way: Way, n: int) -> Cut:
    """Make the call of the operation fail at its ``n``-th point, and return the outcome."""
    call, result, raised = next(steps), None, None
    points: Any = scene.drivers[0] if way.is_point is None else Interruption(n, way.is_point, way.error)
    with ExitStack() as stack:
        if way.is_point is None:
            points.arm(n)
        else:
            stack.enter_context(points)
        try:
            result = call()
        except BaseException as error:
            raised = error
            traceback.clear_frames(error.__traceback__)  # as when a caller has handled it: a fence is deleted then
    if way.is_point is None:
        scene.cache.flush()
        points.disarm()
    if not points.where:
        assert raised is None, f"without a failure it raised {raised!r}"
        return Cut("over")
    try:
        if raised is None and way.error is KeyboardInterrupt:
            assert points.is_ignored, "the signal was swallowed"
        return Cut(_became(scene, steps, way, n, result, raised), points.where)
    except Exception as error:
        frame = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(FOLDER)][-1]
        what = " ".join(str(error).split())[:160]
        return Cut(
            "damage", points.where, f"{type(error).__name__}: {what} ({Path(frame.filename).name}:{frame.lineno})"
        )


def _became(
    scene: Scene, steps: Steps, way: Way, n: int, result: Any,
    raised: BaseException | None,
) -> str:  # fmt: skip
    """Return the outcome of the operation. Raises whichever exception shows the damage, if there is damage."""
    if raised is not None:
        _is_the_injected(raised, way.error)
        try:
            scene.cache.check()
        except RuntimeError as error:
            if not isinstance(error, getattr(errors, "NeedsReset", ())):
                raise
            assert way.error is KeyboardInterrupt, "memory that runs out can always be undone"
            scene.prove_reset(closes_first=bool(n % 2))
            return "reset"
    else:
        scene.cache.check()
    try:
        steps.send((result, raised is not None))
    except StopIteration as end:
        scene.prove()
        return str(end.value)
    raise AssertionError("an operation is one call")


def _is_the_injected(error: BaseException, kind: type[BaseException]) -> None:
    """Raise AssertionError unless ``error`` is the injected error, or a typed error that the injected error caused."""
    if isinstance(error, kind) and "call " in str(error):
        return
    caused = error.__cause__ or error.__context__
    typed = isinstance(error, (OutOfBlocks, RetryLater)) and kind is MemoryError
    assert typed and isinstance(caused, kind), f"another error came out: {type(error).__name__}: {error}"


COUNTS: dict[tuple[str, str, str], Counter[str]] = {}
"""(way, operation, kind) -> how many points had each outcome."""


def sweep(kind: str, name: str, way: str, most: int | None) -> None:
    """Interrupt the operation at every point (``most`` None), or at about ``most`` points. Raises AssertionError that
    lists the damage."""
    count = num_points(kind, name)[way]
    every = 1 if most is None else max(1, -(-count // most))
    counts, damage = COUNTS.setdefault((way, name, kind), Counter()), list[str]()
    n = 1 + (hash_of(kind, name) % every)
    while (found := cut(kind, name, way, n)).outcome != "over":
        counts[found.outcome] += 1
        if found.outcome == "damage":
            damage.append(f"{n}: {found.where}: {found.why}")
        n += every
    total = counts.total()
    assert not damage, f"{len(damage)} of {total} points: damage\n" + "\n".join(damage[:12])


def hash_of(*words: str) -> int:
    """Return a hash of ``words`` that is the same in every process."""
    return sum(map(ord, "".join(words)))


def cases(way: str) -> list[Any]:
    """Return the cases of ``way``: every operation of every kind, marked slow, and some points of some kinds for the
    default run."""
    found = []
    for name in OPERATIONS:
        if way == "driver" and (name not in WITH_TIER or name in READ_AHEAD):
            continue
        for kind, what in KINDS.items():
            if ONLY[name](what):
                found.append(pytest.param(kind, name, None, id=f"{kind}-{name}-all", marks=pytest.mark.slow))
                if kind in QUICK_KINDS:
                    found.append(pytest.param(kind, name, QUICK_POINTS[way], id=f"{kind}-{name}"))
    return found


@pytest.mark.parametrize(("kind", "name", "most"), cases("signal"))
def test_a_signal_at_any_call(kind: str, name: str, most: int | None) -> None:
    sweep(kind, name, "signal", most)


@pytest.mark.parametrize(("kind", "name", "most"), cases("memory"))
def test_memory_that_runs_out(kind: str, name: str, most: int | None) -> None:
    sweep(kind, name, "memory", most)


@pytest.mark.parametrize(("kind", "name", "most"), cases("driver"))
def test_a_driver_that_fails_is_a_miss(kind: str, name: str, most: int | None) -> None:
    sweep(kind, name, "driver", most)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("full", "open, a hit"), ("full", "fork"), ("gemma", "commit, a prompt"), ("qwen3_next", "commit, a prompt")],
)
def test_a_signal_while_a_request_is_only_asked_something_needs_no_reset(kind: str, name: str) -> None:
    """What a request says of itself is asked before the first change."""
    asked = "text", "added", "lacking_from", "keys", "committed_keys", "last_keys"
    questions = {f"RequestState.{one}" for one in asked}

    def is_asked(frame: FrameType, event: str, argument: Any) -> str:
        called = any_call(frame, event, argument)
        return called if called in questions else ""

    outcomes, n = Counter[str](), 0
    while "over" not in outcomes:
        n += 1
        with at_most(SECONDS):
            scene = Scene(kind, name in WITH_TIER)
            try:
                found = _cut(scene, OPERATIONS[name](scene), Way(is_asked, KeyboardInterrupt), n)
            finally:
                scene.end()
        assert found.outcome != "reset", found
        outcomes[found.outcome] += 1
    assert n > 1


def test_the_list_of_calls_that_can_fail_names_functions() -> None:
    assert len(failing_functions()) >= 8


def test_a_lost_slot_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation of two calls is interrupted in the second, and claims that nothing was done."""

    def two_calls(scene: Scene) -> Steps:
        yield lambda: (scene.opening(scene.words(1))(), scene.cache.stats())
        return "undone"

    monkeypatch.setitem(OPERATIONS, "two calls", two_calls)
    last = num_signals("full", two_calls)
    found = cut("full", "two calls", "signal", last)
    assert found.outcome == "damage" and "a slot was lost" in found.why
    assert cut("full", "two calls", "signal", last + 1).outcome == "over"


def num_signals(kind: str, operation: Callable[[Scene], Steps]) -> int:
    """Return how many points for signals the first call of ``operation`` has."""
    call = next(operation(scene := Scene(kind, has_tier=False)))
    with Interruption(0, any_call, KeyboardInterrupt) as points:
        call()
    scene.end()
    return points.count


def test_a_wrong_row_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoils_a_row(scene: Scene) -> Steps:
        request = scene.compute(scene.open(scene.words(1, 1.5)))
        _, raised = yield partial(request.sequence.extend, scene.size)
        view = scene.cache.batch([request.sequence], [1]).layer(0)
        view["k"][int(view.block_table[0, 0]), 1] += 1.0
        return "undone" if raised else "done"

    monkeypatch.setitem(OPERATIONS, "spoils a row", spoils_a_row)
    found = cut("full", "spoils a row", "signal", 1)
    assert found.outcome == "damage" and "rows [1] of request 0 are others" in found.why


@pytest.fixture(scope="module", autouse=True)
def _report() -> Iterator[None]:
    """Print how many points had which outcome, and write the counts to the file that ``KVPAGODA_SWEEP`` names."""
    yield
    if not COUNTS:
        return
    print()
    for way in WAYS:
        print(table(way))
    path = os.environ.get("KVPAGODA_SWEEP")
    if path:
        rows = [dict(zip(("way", "operation", "kind"), key), **counts) for key, counts in COUNTS.items()]
        with open(path, "w") as file:
            json.dump(rows, file, indent=1)


def table(way: str) -> str:
    """Return a table: for each operation its points of all kinds, their outcomes, and the damage of each kind."""
    lines = [f"{way:36}{'points':>8}{'undone':>8}{'done':>8}{'reset':>8}{'damage':>8}   damage of points, by kind"]
    for name in OPERATIONS:
        mine = {kind: counts for (by, of, kind), counts in COUNTS.items() if by == way and of == name}
        if mine:
            total = sum(mine.values(), Counter[str]())
            numbers = [total.total(), *(total[outcome] for outcome in ("undone", "done", "reset", "damage"))]
            kinds = "  ".join(f"{kind} {counts['damage']}/{counts.total()}" for kind, counts in mine.items())
            lines.append(f"{name:36}{''.join(f'{number:8}' for number in numbers)}   {kinds}")
    return "\n".join(lines)
