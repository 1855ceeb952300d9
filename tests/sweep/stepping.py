"""Operations: batches and persistent batches."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from tests.sweep.operations import Steps, operation
from tests.sweep.scene import Request, Scene

from kvpagoda import Sequence


def batched(scene: Scene, requests: list[Request], counts: list[int]) -> Steps:
    """Make a batch and read the views and index arrays of all its layers. Made again, it must show the right rows."""
    for request, count in zip(requests, counts):
        request.sequence.extend(count)
    layers = scene.cache.schema.layers

    def call() -> None:
        made = scene.cache.batch([request.sequence for request in requests], counts, pad_to=3)
        for layer in layers:
            view = made.layer(layer.index)
            if layer.growth is not None:
                _ = view.block_table, view.slot_mapping, view.kv_indices

    _, raised = yield call
    call()
    return "undone" if raised else "done"


@operation("batch")
def batch(scene: Scene) -> Any:
    requests = [scene.compute(scene.open(scene.words(number, 1.5))) for number in (1, 2)]
    for request in requests:
        request.text.tokens += [13, 14]
    return (yield from batched(scene, requests, [2, 1]))


@operation("batch, states left in the step")
def batch_that_leaves_states(scene: Scene) -> Any:
    request = scene.open(scene.words(1, 2.5), capacity=0)
    outcome = yield from batched(scene, [request], [2 * scene.size])
    has_states = scene.cache.core.states is not None
    assert bool(request.sequence.step_checkpoints) == has_states or not scene.is_undisturbed
    return outcome


@operation("batch, layers that come in", tier=True)
def batch_of_layers_that_come_in(scene: Scene) -> Any:
    scene.leave(scene.words(1, 3))
    scene.forget()
    request = scene.open([*scene.words(1, 3), 5, 6], layerwise=True)
    return (yield from batched(scene, [request], [2]))


class Together(NamedTuple):
    """Requests, and the persistent batch that steps them."""

    requests: list[Request]
    run: Any

    def write(self, scene: Scene, step: Any) -> None:
        """Compare and write the rows of a ``step`` of one token for each member."""
        members = [self.of(sequence) for sequence in self.run.sequences]
        before = [member.sequence.length for member in members]
        for member, start in zip(members, before):
            member.text.tokens += [15] * (start + 1 - len(member.text.tokens))
        scene.oracle.step(step, [member.text for member in members], before, [1] * len(members))

    def of(self, sequence: Sequence) -> Request:
        return next(one for one in self.requests if one.sequence is sequence)

    def next_tokens(self) -> list[int]:
        """Return the token that each member commits next."""
        return [self.of(one).text.tokens[one.length] for one in self.run.sequences]

    def step(self, scene: Scene, count: int = 3) -> None:
        """Make ``count`` steps and compare each. The first request, or another, reaches the end of a block."""
        for _ in range(count):
            self.write(scene, self.run.extend())
            self.run.commit(self.next_tokens())

    def end(self) -> None:
        self.run.remove(*self.run.sequences)


def together(scene: Scene, left: int) -> Together:
    """Return three requests of different lengths in a persistent batch; the first one needs ``left`` more tokens to
    fill its last block."""
    lengths = [3 * scene.size - left, scene.size + 1, 2]
    requests = [scene.compute(scene.open(scene.words(n, 4)[:length])) for n, length in enumerate(lengths, 1)]
    return Together(requests, scene.cache.persistent_batch([one.sequence for one in requests], 4))


@operation("persistent batch, extend")
def persistent_extend(scene: Scene) -> Any:
    group = together(scene, left=0)
    step, raised = yield group.run.extend
    group.write(scene, group.run.extend() if raised else step)
    group.run.commit(group.next_tokens())
    group.step(scene)
    group.end()
    return "undone" if raised else "done"


@operation("persistent batch, commit")
def persistent_commit(scene: Scene) -> Any:
    group = together(scene, left=1)
    group.write(scene, group.run.extend())
    before, tokens = [one.sequence.length for one in group.requests], group.next_tokens()
    _, raised = yield partial(group.run.commit, tokens)
    grown = {one.sequence.length - length for one, length in zip(group.requests, before)}
    assert len(grown) == 1 and grown <= {0, 1}, f"members have {sorted(grown)} tokens more"
    assert raised or grown == {1}
    if grown == {0}:
        group.run.commit(tokens)
    scene.is_found_as_ever("persistent", group.requests[0])
    group.step(scene)
    group.end()
    return "undone" if grown == {0} else "done"


@operation("persistent batch, add")
def persistent_add(scene: Scene) -> Any:
    group = together(scene, left=1)
    added = scene.compute(scene.open(scene.words(9, 1.5)))
    group.requests.append(added)
    group.step(scene, 2)
    _, raised = yield partial(group.run.add, added.sequence)
    outcome = "undone" if added.sequence not in group.run.sequences else "done"
    assert raised or outcome == "done"
    if outcome == "undone":
        group.run.add(added.sequence)
    group.step(scene)
    group.end()
    return outcome


@operation("persistent batch, remove")
def persistent_remove(scene: Scene) -> Any:
    group = together(scene, left=2)
    group.write(scene, group.run.extend())
    group.run.commit(group.next_tokens())
    removed = group.requests[0]
    _, raised = yield partial(group.run.remove, removed.sequence)
    outcome = "undone" if removed.sequence in group.run.sequences else "done"
    assert raised or outcome == "done"
    if outcome == "undone":
        group.run.remove(removed.sequence)
    scene.step([removed], [1])
    group.step(scene)
    group.end()
    return outcome
