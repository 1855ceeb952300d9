"""Operations of a request that is handed over, through shared memory, and received by the same cache."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.sweep.operations import operation
from tests.sweep.running import is_suspended
from tests.sweep.scene import Scene

from kvpagoda.errors import RetryLater, TicketRefused
from kvpagoda.handover import SharedMemory


@operation("hand over")
def hand_over(scene: Scene) -> Any:
    request = scene.compute(scene.open(scene.words(1, 2.5)))
    scene.compute(scene.open(scene.words(2, 1.5)))
    transfer = SharedMemory("1MiB")
    sender = scene.cache.sender(transfer)
    ticket, raised = yield partial(request.sequence.hand_over, 60.0)
    outcome = "done"
    if raised and not is_suspended(scene, request):
        assert sender.num_leases == 0 and sender._exported.free_nbytes == (1 << 20) - (1 << 18)
        ticket, outcome = request.sequence.hand_over(60.0), "undone"
    assert sender.num_leases == 1 and scene.running == 2, "a lease holds its slot"
    scene.cache.check()
    if isinstance(ticket, BaseException) or ticket is None:
        scene.requests.remove(request)
    else:
        sender.take_back(ticket)
    sender.close()
    transfer.close()
    return outcome


@operation("receive")
def receive(scene: Scene) -> Any:
    request = scene.compute(scene.open(scene.words(1, 2.5)))
    scene.compute(scene.open(scene.words(2, 1.5)))
    transfer = SharedMemory("1MiB")
    sender = scene.cache.sender(transfer)
    ticket = request.sequence.hand_over(60.0, goes_on=True)
    scene.close(request)
    before = scene.running
    call = partial(scene.cache.receive, ticket, transfer, "one", reserve=len(request.text.tokens) + 3 * scene.size)
    sequence, raised = yield call
    outcome = "done"
    if raised:
        try:
            sequence, outcome = call(), "undone"
        except TicketRefused:  # it was taken, and nobody has its handle
            sequence = None
    if sequence is not None:
        assert scene.running == before + 1
        scene.forked(sequence, request)
    sender.close()
    transfer.close()
    return outcome


@operation("leases expire")
def expire(scene: Scene) -> Any:
    request = scene.compute(scene.open(scene.words(1, 2.5)))
    now, transfer = [0.0], SharedMemory("1MiB")
    sender = scene.cache.sender(transfer, clock=lambda: now[0])
    request.sequence.hand_over(1.0)
    scene.requests.remove(request)
    now[0] = 100.0
    _, raised = yield sender.expire
    outcome = "undone" if raised and sender.num_leases else "done"
    sender.expire()
    assert sender.num_leases == 0 and scene.running == 0
    assert sender._exported.free_nbytes == (1 << 20) - (1 << 18) or raised
    sender.close()
    transfer.close()
    return outcome


# -- layer by layer --------------------------------------------------------------------------------------------------------


class Promised:
    """A request of which one block is computed, and a ticket for all of its prompt."""

    def __init__(self, scene: Scene, *, goes_on: bool = True, has_ticket: bool = True) -> None:
        self.scene, self.request = scene, scene.open(scene.words(1, 2.5))
        scene.compute(scene.open(scene.words(2, 1.5)))
        scene.compute(self.request, scene.size)
        self.transfer = SharedMemory("1MiB")
        self.sender, self.goes_on = scene.cache.sender(self.transfer), goes_on
        self.upto = len(self.request.text.tokens)
        self.ticket = self.promise() if has_ticket else None

    def promise(self) -> Any:
        return self.request.sequence.hand_over(60.0, upto=self.upto, goes_on=self.goes_on)

    def receive(self) -> Any:
        """Receive the ticket; None as long as layers are to come."""
        reserve = self.upto + 3 * self.scene.size
        try:
            return self.scene.cache.receive(self.ticket, self.transfer, "one", reserve=reserve)
        except RetryLater:
            return None

    def finish(self, outcome: str) -> str:
        """Compute the rest of the prompt, layer by layer, and let another request go on with it."""
        scene, request = self.scene, self.request
        if request.sequence.is_open:
            assert self.receive() is None, "it is not complete"
            while request.sequence.length < self.upto:
                scene.step([request], [min(scene.size, self.upto - request.sequence.length)])
                self.sender.layer_done(self.ticket, 0)
        self.sender.complete(self.ticket)
        assert request.sequence.is_open == self.goes_on
        if not self.goes_on:
            scene.remember(request)
            scene.requests.remove(request)
        return self.take(self.receive(), outcome)

    def take(self, sequence: Any, outcome: str) -> str:
        """Add ``sequence``, which was received, to the requests of the scene."""
        assert sequence is not None and sequence.length == self.upto
        self.scene.forked(sequence, self.request)
        self.sender.expire()
        assert self.sender.num_leases == 0 and self.sender._exported.free_nbytes == (1 << 20) - (1 << 18)
        self.end()
        return outcome

    def end(self) -> None:
        self.sender.close()
        self.transfer.close()


@operation("promise")
def promise(scene: Scene) -> Any:
    promised = Promised(scene, has_ticket=False)
    promised.ticket, raised = yield promised.promise
    if raised:
        for name in promised.sender._leases:  # what nobody has a ticket for expires
            promised.sender._leases[name].until = 0.0
        promised.sender.expire()
        promised.ticket = promised.promise()
    return promised.finish("undone" if raised else "done")


@operation("layer done")
def layer_done(scene: Scene) -> Any:
    promised = Promised(scene)
    scene.compute(promised.request, 2 * scene.size)
    _, raised = yield partial(promised.sender.layer_done, promised.ticket, None, 2 * scene.size)
    if raised:
        promised.sender.layer_done(promised.ticket)
    return promised.finish("undone" if raised else "done")


@operation("complete")
def complete(scene: Scene) -> Any:
    promised = Promised(scene, goes_on=False)
    scene.compute(promised.request)
    _, raised = yield partial(promised.sender.complete, promised.ticket)
    return promised.finish("undone" if raised else "done")


@operation("receive early")
def receive_early(scene: Scene) -> Any:
    promised = Promised(scene)
    promised.sender.layer_done(promised.ticket)
    before = scene.running
    _, raised = yield promised.receive
    assert scene.running == before
    return promised.finish("undone" if raised else "done")


@operation("receive, layer by layer")
def receive_layers(scene: Scene) -> Any:
    promised = Promised(scene)
    scene.compute(promised.request)
    promised.sender.complete(promised.ticket)
    before = scene.running
    sequence, raised = yield promised.receive
    if not raised:
        return promised.take(sequence, "done")
    try:
        return promised.take(promised.receive(), "undone")
    except TicketRefused:  # it was taken, and nobody has its handle
        assert scene.running == before
        promised.end()
        return "done"
