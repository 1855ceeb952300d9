"""Operations: pins, invalidation, reset and fences."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.sweep.operations import Steps, operation
from tests.sweep.scene import Scene


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
