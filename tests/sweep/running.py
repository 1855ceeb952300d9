"""Operations of a running request: extend, commit, fork, rewind, suspend, resume and close."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.sweep.operations import Steps, operation
from tests.sweep.scene import Request, Scene

from kvpagoda.errors import StaleHandle


@operation("extend")
def extend(scene: Scene) -> Any:
    request = scene.compute(scene.open(scene.words(1, 1.5)))
    scene.compute(scene.open(scene.words(2, 1.5)))
    _, raised = yield partial(request.sequence.extend, 2 * scene.size)
    request.sequence.extend(2 * scene.size)
    return "undone" if raised else "done"


@operation("extend, eviction", only=lambda kind: kind.evicts)
def extend_with_eviction(scene: Scene) -> Any:
    request = scene.compute(scene.open(scene.words(1, 1.5)))
    scene.fill()
    evicted, n = scene.num_evicted(), 3 * scene.size
    _, raised = yield partial(request.sequence.extend, n)
    assert not scene.is_undisturbed or scene.num_evicted() > evicted, "nothing was evicted"
    request.sequence.extend(n)
    return "undone" if raised else "done"


@operation("extend, a sector changes hands", only=lambda kind: "budget" in kind.size and kind.evicts)
def extend_with_a_sector_that_changes_hands(scene: Scene) -> Any:
    request, other = (scene.compute(scene.open(scene.words(number, 1.5))) for number in (1, 2))
    scene.fill()
    scene.close(other)
    before, n = [group.total for group in scene.cache.stats().groups], 3 * scene.size
    _, raised = yield partial(request.sequence.extend, n)
    after = [group.total for group in scene.cache.stats().groups]
    assert not scene.is_undisturbed or any(now < then for now, then in zip(after, before)), f"{before}, then {after}"
    request.sequence.extend(n)
    return "undone" if raised else "done"


def committed(scene: Scene, what: str, request: Request, count: int) -> Steps:
    """Commit ``count`` tokens of ``request``. ``what``: the name under which the length of later hits is compared."""
    scene.write([request], [count])
    before, call = request.sequence.length, scene.commit_of(request, count)
    _, raised = yield call
    outcome = "done"
    if request.sequence.length == before:
        assert raised, "nothing was committed"
        call()
        outcome = "undone"
    grown = request.sequence.length - before
    assert grown == count, f"{grown} of {count} tokens are committed"
    scene.is_found_as_ever(what, request)
    return outcome


@operation("commit, a prompt")
def commit_a_prompt(scene: Scene) -> Any:
    scene.compute(scene.open(scene.words(2, 1.5)))
    return (yield from committed(scene, "prompt", scene.open(scene.words(1, 2)), 2 * scene.size))


@operation("commit, a block and a window")
def commit_a_block(scene: Scene) -> Any:
    request = scene.compute(scene.open(scene.words(1, 3)), 3 * scene.size)
    request.text.tokens += [11] * (scene.size - 1)
    scene.compute(request)
    request.text.tokens.append(12)
    return (yield from committed(scene, "block", request, 1))


def begins(scene: Scene, tokens: list[int]) -> None:
    """Compute a text that begins with ``tokens``, a block and a half: it resumes after the block, if that was kept."""
    scene.close(scene.compute(scene.open([*tokens[: scene.size + 1], *range(700, 700 + 2 * scene.size)])))


def left_in_the_step(scene: Scene) -> Request:
    """Return a request of three blocks whose step has written two, and has left its state after one."""
    request = scene.open(scene.words(1, 3))
    scene.write([request], [2 * scene.size])
    assert request.sequence.step_checkpoints == (scene.size,)
    return request


@operation("commit, states left in the step", only=lambda kind: kind.has_states)
def commit_of_states_left_in_the_step(scene: Scene) -> Any:
    request = left_in_the_step(scene)
    call = scene.commit_of(request, 2 * scene.size, [scene.size])
    _, raised = yield call
    outcome = "done"
    if not request.sequence.length:
        assert raised, "nothing was committed"
        call()
        outcome = "undone"
    assert request.sequence.length == 2 * scene.size
    scene.is_found_as_ever("left in the step", request, scene.size + 1)
    scene.is_found_as_ever("left in the step, all of it", request)
    assert not request.sequence.step_checkpoints and scene.cache.stats().passed_boundaries == 0
    begins(scene, request.text.tokens)
    return outcome


@operation("batch again, states left in the step", only=lambda kind: kind.has_states)
def batch_again_of_states_left_in_the_step(scene: Scene) -> Any:
    """A batch that raises leaves the step before it as it was: its states become checkpoints."""
    request, n = left_in_the_step(scene), 2 * scene.size
    state = request.text.state
    _, raised = yield partial(scene.cache.batch, [request.sequence], [n])
    assert request.sequence.step_checkpoints == (scene.size,)
    if not raised:
        request.text.state = None  # as before the step: it is computed again
        batch = scene.cache.batch([request.sequence], [n])
        for layer in range(len(scene.cache.schema.layers)):
            scene.oracle.blank(batch, layer)
        scene.oracle.step(batch, [request.text], [0], [n])
    assert request.text.state == state
    scene.commit_of(request, n, [scene.size])()
    scene.is_found_as_ever("batch again", request, scene.size + 1)
    begins(scene, request.text.tokens)
    return "undone" if raised else "done"


@operation("commit, what another has", tier=True)
def commit_a_duplicate(scene: Scene) -> Any:
    text = scene.words(1, 2)
    first, second = scene.open(text), scene.open(text)
    scene.compute(first)
    return (yield from committed(scene, "duplicate", second, 2 * scene.size))


@operation("fork")
def fork(scene: Scene) -> Any:
    parent = scene.compute(scene.open(scene.words(1, 2.5)))
    running = scene.running
    call = partial(parent.sequence.fork, reserve=6 * scene.size)
    child, raised = yield call
    if raised:
        assert scene.running == running, f"{scene.running} run, not {running}: a slot was lost"
        child = call()
    scene.forked(child, parent)
    return "undone" if raised else "done"


def rewound(scene: Scene, n: int) -> Steps:
    """Rewind ``n`` tokens of a request, and compute other tokens there."""
    request = scene.compute(scene.open(scene.words(1, 2)))
    scene.step([request], [1])
    scene.remember(request)
    before = request.sequence.length
    call = partial(request.sequence.rewind, n)
    _, raised = yield call
    outcome = "done"
    if request.sequence.length == before:
        assert raised, "nothing was taken back"
        call()
        outcome = "undone"
    assert request.sequence.length == before - n
    del request.text.tokens[before - n :]
    request.text.tokens += [850, 851, 852, 853]  # other tokens follow
    scene.compute(request)
    return outcome


@operation("rewind, a token", only=lambda kind: kind.rewinds)
def rewind_a_token(scene: Scene) -> Any:
    return (yield from rewound(scene, 1))


@operation("rewind, into a shared block", only=lambda kind: kind.rewinds)
def rewind_into_a_shared_block(scene: Scene) -> Any:
    return (yield from rewound(scene, 3))


def suspended(scene: Scene, whole: bool) -> Steps:
    """Suspend a request while another one runs, and resume it."""
    request = scene.compute(scene.open(scene.words(1, 2.5)))
    scene.compute(scene.open(scene.words(2, 1.5)))
    call = partial(request.sequence.suspend, whole)
    _, raised = yield call
    outcome = "done"
    if not is_suspended(scene, request):
        assert raised, "nothing was suspended"
        call()
        outcome = "undone"
    assert scene.running == 1, f"{scene.running} run, not 1"
    scene.cache.check()
    request.sequence.resume()
    scene.took_up(request)
    return outcome


def is_suspended(scene: Scene, request: Request) -> bool:
    """Return whether ``request`` is suspended: its calls raise StaleHandle then."""
    try:
        request.sequence.extend(0)
    except StaleHandle:
        return True
    return False


@operation("suspend, whole")
def suspend_whole(scene: Scene) -> Any:
    return (yield from suspended(scene, True))


@operation("suspend, in part")
def suspend_in_part(scene: Scene) -> Any:
    return (yield from suspended(scene, False))


def resumed(scene: Scene, whole: bool, evicts: bool = False) -> Steps:
    """Resume a suspended request; ``evicts``: after other requests have evicted its blocks."""
    request = scene.compute(scene.open(scene.words(1, 2.5)))
    scene.compute(scene.open(scene.words(2, 1.5)))
    length = request.sequence.length
    request.sequence.suspend(whole)
    if evicts:
        for number in range(500, 525):
            scene.pass_by(number)
    _, raised = yield request.sequence.resume
    outcome = "done"
    assert not (evicts and scene.is_undisturbed) or request.sequence.length < length, "nothing was lost"
    if is_suspended(scene, request):
        assert raised, "it did not go on"
        assert scene.running == 1, f"{scene.running} run, not 1: a slot was lost"
        request.sequence.resume()
        outcome = "undone"
    scene.took_up(request)
    return outcome


@operation("resume, whole")
def resume_whole(scene: Scene) -> Any:
    return (yield from resumed(scene, True))


@operation("resume, in part")
def resume_in_part(scene: Scene) -> Any:
    return (yield from resumed(scene, False))


@operation("resume, eviction", only=lambda kind: kind.shares)
def resume_with_eviction(scene: Scene) -> Any:
    return (yield from resumed(scene, False, evicts=True))


@operation("close")
def close(scene: Scene) -> Any:
    request = scene.compute(scene.open(scene.words(1, 2.5)))
    scene.compute(scene.open(scene.words(2, 1.5)))
    scene.remember(request)
    _, raised = yield request.sequence.close
    outcome = "done"
    if request.sequence.is_open:
        assert raised, "it is open still"
        request.sequence.close()
        outcome = "undone"
    scene.requests.remove(request)
    return outcome


@operation("close, suspended")
def close_what_is_suspended(scene: Scene) -> Any:
    request = scene.compute(scene.open(scene.words(1, 2.5)))
    request.sequence.suspend()
    scene.remember(request)
    _, raised = yield request.sequence.close
    outcome = "done"
    if request.sequence.is_open:
        assert raised, "it is open still"
        request.sequence.close()
        outcome = "undone"
    scene.requests.remove(request)
    return outcome
