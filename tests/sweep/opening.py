"""Operations: open a request with a miss, a hit, eviction, tiers, or layer by layer; and prefetch for it."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.sweep.operations import Steps, operation
from tests.sweep.scene import Scene


def opened(scene: Scene, tokens: list[int], least: int = 0, evicts: bool = False, **settings: Any) -> Steps:
    """Open ``tokens``, of which at least ``least`` are cached, while two requests run. ``evicts``: memory is full."""
    for number in (300, 301):
        scene.compute(scene.open(scene.words(number, 1.5)))
    if evicts:
        scene.fill()
    running, evicted = 2, scene.num_evicted()
    call = scene.opening(tokens, **settings)
    sequence, raised = yield call
    outcome = "done"
    assert not (evicts and scene.is_undisturbed) or scene.num_evicted() > evicted, "nothing was evicted"
    if raised:
        assert scene.running == running, f"{scene.running} run, not {running}: a slot was lost"
        sequence, outcome = call(), "undone"
    request = scene.take(sequence, tokens)
    cached = sequence.cached_tokens
    assert not scene.is_undisturbed or cached >= least, f"{cached} tokens were cached, not {least}"
    scene.compute(request)
    return outcome


@operation("open, a miss")
def open_a_miss(scene: Scene) -> Any:
    return (yield from opened(scene, scene.words(1), capacity=scene.size))


@operation("open, a hit")
def open_a_hit(scene: Scene) -> Any:
    scene.leave(scene.words(1, 2))
    return (yield from opened(scene, scene.words(1, 3), least=scene.size, capacity=2 * scene.size + 1))


@operation("open, positions from the caller")
def open_with_breakpoints(scene: Scene) -> Any:
    scene.leave(scene.words(1, 2))
    text = scene.words(1, 3)
    asked = [scene.size // 2, scene.size, 2 * scene.size, 3 * scene.size, 4 * scene.size]
    return (yield from opened(scene, text, least=scene.size, capacity=2 * scene.size + 1, checkpoints=asked))


@operation("open, a part of a block", only=lambda kind: kind.partial)
def open_a_part_of_a_block(scene: Scene) -> Any:
    scene.leave(scene.words(1, 2))
    text = [*scene.words(1, 2)[: scene.size + 2], 700, 701, 702]
    return (yield from opened(scene, text, least=scene.size + 2))


@operation("open, eviction", only=lambda kind: kind.evicts)
def open_with_eviction(scene: Scene) -> Any:
    return (yield from opened(scene, scene.words(1, 4.5), evicts=True, capacity=4 * scene.size))


@operation("open, a tier", tier=True)
def open_from_a_tier(scene: Scene) -> Any:
    scene.leave(scene.words(1, 3))
    scene.forget()
    return (yield from opened(scene, [*scene.words(1, 3), 5], scene.size))


@operation("open, a tier and eviction", tier=True, only=lambda kind: kind.evicts)
def open_from_a_tier_with_eviction(scene: Scene) -> Any:
    scene.leave(scene.words(1, 4))
    scene.forget()
    return (yield from opened(scene, [*scene.words(1, 4), 5], scene.size, evicts=True, capacity=6 * scene.size))


@operation("open, layer-wise", tier=True)
def open_layer_wise(scene: Scene) -> Any:
    scene.leave(scene.words(1, 3))
    scene.forget()
    return (yield from opened(scene, [*scene.words(1, 3), 5], scene.size, layerwise=True))


@operation("open, prefetched", tier=True)
def open_prefetched(scene: Scene) -> Any:
    text = [*scene.words(1, 3), 5]
    scene.leave(scene.words(1, 3))
    scene.forget()
    ahead = scene.cache.prefetch(text, "one")
    scene.stack.callback(ahead.close)
    sequence, raised = yield scene.opening(text, prefetch=ahead)
    outcome = "undone" if raised else "done"
    if raised:
        assert scene.running == 0, "a slot was lost"
        sequence = scene.opening(text, prefetch=ahead)()
    assert not scene.is_undisturbed or sequence.cached_tokens >= scene.size
    scene.compute(scene.take(sequence, text))
    return outcome


@operation("prefetch", tier=True)
def prefetch(scene: Scene) -> Any:
    text = [*scene.words(1, 3), 5]
    scene.leave(scene.words(1, 3))
    scene.forget()
    call = partial(scene.cache.prefetch, text, "one")
    ahead, raised = yield call
    outcome = "undone" if raised else "done"
    if raised:
        ahead = call()
    scene.compute(scene.open(text, prefetch=ahead))
    return outcome
