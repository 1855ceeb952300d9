"""Operations: pins, invalidation, reset, fences, sleep and wake."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tests.sweep.operations import Steps, operation
from tests.sweep.scene import Scene

from kvpagoda.errors import Asleep


@operation("pin")
def pin(scene: Scene) -> Any:
    scene.leave(scene.words(1, 2))
    scene.compute(scene.open(scene.words(2, 1.5)))
    call = partial(scene.cache.pin, scene.words(1, 2), "one")
    held, raised = yield call
    if raised:
        held = call()
    scene.cache.check()
    scene.cache.unpin(held)
    assert not held.is_held
    return "undone" if raised else "done"


@operation("unpin")
def unpin(scene: Scene) -> Any:
    scene.leave(scene.words(1, 2))
    scene.compute(scene.open(scene.words(2, 1.5)))
    held = scene.cache.pin(scene.words(1, 2), "one")
    _, raised = yield partial(scene.cache.unpin, held)
    outcome = "undone" if held.is_held else "done"
    assert raised or outcome == "done"
    scene.cache.unpin(held)
    assert not held.is_held
    return outcome


def invalidated(scene: Scene, *namespaces: str) -> Steps:
    """Invalidate ``namespaces`` (none: everything) while a request runs. Afterwards nothing of them may be found."""
    scene.leave(scene.words(1, 2))
    scene.cache.pin(scene.words(1, 2), "one")
    request = scene.compute(scene.open(scene.words(2, 1.5)))
    call = partial(scene.cache.invalidate, *namespaces)
    _, raised = yield call
    scene.cache.check()
    if raised:
        call()
    probe = scene.cache.open(scene.words(1, 3), "one", capacity=0)
    assert probe.cached_tokens == 0, "what was invalidated is found"
    probe.close()
    scene.texts.clear()
    scene.compute(request, len(request.text.tokens) + scene.size)
    return "undone" if raised else "done"


@operation("invalidate, one namespace")
def invalidate_one(scene: Scene) -> Any:
    return (yield from invalidated(scene, "one"))


@operation("invalidate, all")
def invalidate_all(scene: Scene) -> Any:
    return (yield from invalidated(scene))


@operation("reset")
def reset(scene: Scene) -> Any:
    for number in (1, 2):
        scene.leave(scene.words(number, 2))
    scene.cache.pin(scene.words(1, 2), "one")
    _, raised = yield scene.cache.reset
    scene.cache.check()
    if raised:
        scene.cache.reset()
    assert scene.cache.stats().cached_tokens == 0 or not scene.cache.lookup(scene.words(1, 3)).cached
    return "undone" if raised else "done"


@operation("fence, a commit and a close inside")
def fence(scene: Scene) -> Any:
    first, second = (scene.compute(scene.open(scene.words(number, 1.5))) for number in (1, 2))
    scene.remember(second)
    scene.write([first, second], [scene.size, 1])
    before, commit = first.sequence.length, scene.commit_of(first, scene.size)

    def call() -> None:
        with scene.cache.fence([first.sequence, second.sequence]):
            commit()
            second.sequence.close()

    _, raised = yield call
    outcome = "done"
    if first.sequence.length == before:
        assert raised
        commit()
        outcome = "undone"
    assert first.sequence.length == before + scene.size
    if second.sequence.is_open:
        assert raised
        second.sequence.close()
    scene.requests.remove(second)
    assert scene.running == 1, f"{scene.running} run, not 1: a slot was lost"
    first.sequence.suspend()  # raises if the sequence is still fenced
    first.sequence.resume()
    return outcome


def slept(scene: Scene, keep: Any) -> Steps:
    """Put a cache to sleep in which a request runs, a text is pinned and others are cached, and wake it."""
    for number in (1, 2, 3):
        scene.leave(scene.words(number, 2))
    pin = scene.cache.pin(scene.words(1, 2), "one")
    scene.compute(scene.open(scene.words(4, 1.5)))

    def call() -> None:
        scene.cache.sleep(keep)
        scene.cache.wake()

    _, raised = yield call
    stats = scene.cache.stats()
    if stats.is_asleep:
        with pytest.raises(Asleep):
            scene.cache.open([1])
        scene.cache.wake()
    elif not stats.sleeps:
        assert raised
        call()
    scene.cache.check()
    assert scene.cache.lookup(scene.words(1, 3), "one").cached >= 2 * scene.size, "a pinned text is lost"
    scene.cache.unpin(pin)
    return "done" if stats.sleeps else "undone"


@operation("sleep, nothing is kept")
def sleep(scene: Scene) -> Any:
    return (yield from slept(scene, "nothing"))


@operation("sleep, the tree in host memory")
def sleep_with_the_tree(scene: Scene) -> Any:
    return (yield from slept(scene, "tree"))


@operation("sleep, the tree in a tier", tier=True)
def sleep_with_a_tier(scene: Scene) -> Any:
    return (yield from slept(scene, "tree"))


@operation("wake, a request was closed")
def wake(scene: Scene) -> Any:
    scene.leave(scene.words(1, 2))
    first, second = (scene.compute(scene.open(scene.words(number, 1.5))) for number in (2, 3))
    scene.cache.sleep("tree")
    scene.remember(second)
    second.sequence.close()
    scene.requests.remove(second)
    _, raised = yield scene.cache.wake
    outcome = "undone" if scene.cache.stats().is_asleep else "done"
    assert raised or outcome == "done"
    scene.cache.wake()
    assert scene.running == 1, f"{scene.running} run, not 1: a slot was lost"
    first.sequence.suspend()  # raises if the sequence is still fenced
    first.sequence.resume()
    return outcome
