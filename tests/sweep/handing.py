"""Operations of a request that is handed over, through shared memory, and received by the same cache."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.sweep.operations import operation
from tests.sweep.running import is_suspended
from tests.sweep.scene import Scene

from kvpagoda.errors import TicketRefused
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
