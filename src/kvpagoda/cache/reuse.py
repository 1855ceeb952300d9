"""What users ask of cached texts: pin a text, invalidate namespaces, forget everything."""

from __future__ import annotations

import logging
from collections import deque

from kvpagoda.blocks.ids import Ids
from kvpagoda.cache.core import Core
from kvpagoda.cache.lifecycle import Lifecycle
from kvpagoda.cache.namespace import Namespace
from kvpagoda.cache.prefix_cache import MOST_PRIORITY, Pin
from kvpagoda.errors import BadInput, OutOfBlocks, RetryLater
from kvpagoda.prefix import Match
from kvpagoda.units import utf8

_log = logging.getLogger(__name__)
AnyNamespace = Namespace | str | bytes | None


class Reuse:
    """Pins and invalidation for the prefix cache of ``core``."""

    def __init__(self, core: Core, lifecycle: Lifecycle) -> None:
        self._core, self._lifecycle = core, lifecycle

    def pin(self, keys: Ids, namespace: bytes) -> Pin:
        """Pin what is cached of the text ``keys``; see ``KVCache.pin``. Raises OutOfBlocks and StaleHandle, pinning
        nothing."""
        self._core.check_open()
        return self.pin_match(self._core.prefix.tree.match(keys, namespace))

    def pin_match(self, match: Match, priority: int = MOST_PRIORITY, ended: deque[Pin] | None = None) -> Pin:
        """Pin the blocks of ``match``, which was found just now. Raises OutOfBlocks, pinning nothing."""
        core = self._core
        pin = core.guard.change(core.prefix.pin, match, priority, ended)
        try:
            if core.capacity.fits([0] * len(core.groups)):
                return pin
            text = f"cannot pin {match.num_blocks} cached blocks: running requests have reserved the memory they take"
            raise OutOfBlocks.with_hint(text, "close a sequence first", needed=match.num_blocks)
        except BaseException:
            core.guard.change(core.prefix.unpin, pin)
            raise

    def unpin(self, pin: Pin) -> None:
        """End ``pin``, if it is still held. Raises BadInput for what is not a pin."""
        if not isinstance(pin, Pin):
            raise BadInput(f"unpin takes what pin returned, got {type(pin).__name__}")
        self._core.guard.change(self._core.prefix.unpin, pin)

    def invalidate(self, namespaces: tuple[AnyNamespace, ...], weights: str | None) -> None:
        """Stop finding what was cached in ``namespaces``, or in all if none are given; see ``KVCache.invalidate``."""
        core = self._core
        epoch = None if weights is None else utf8(weights, "weights, a digest of them,")
        if weights is not None and namespaces:
            text = f"new weights are those of all namespaces, got {len(namespaces)} of them; give none"
            raise BadInput(text, needed=0, available=len(namespaces))
        self._lifecycle.settler.settle_waiting()
        requests = [*core.running.values(), *core.suspended]
        in_use = core.prefix.tree.namespaces() | {request.namespace for request in requests}
        core.guard.is_torn = True
        try:
            old = core.namespaces.renew(namespaces, in_use) if namespaces else core.namespaces.renew_all(in_use, epoch)
        except Exception:
            core.guard.is_torn = False
            raise
        core.stale = {name for name in core.stale | old if not core.namespaces.is_current(name)}
        if namespaces:
            core.events.renewed(old)
        else:
            core.events.restart()  # back to earlier weights: a namespace that was invalid may be found again
        for request in requests:
            if namespaces:
                request.publishes = request.publishes and request.namespace not in old
            elif not request.stays:
                request.enter_epoch(core.namespaces.epoch)
        for pin in core.prefix.pins_of(old):
            core.prefix.unpin(pin)
        if weights is not None:
            core.tiers.set_weights(weights)
        core.guard.is_torn = False
        self._lifecycle.ending.clear_stale()
        _log.info(
            "invalidated %s; epoch %d", f"{len(namespaces)} namespaces" if namespaces else "all", core.namespaces.epoch
        )

    def reset(self) -> None:
        """Forget everything that is cached. Raises RetryLater while a request runs or is suspended; but after an
        interrupt tore the cache, forget every request too."""
        core = self._core
        if core.guard.is_torn:
            core.clear()
            return
        if core.dropped:
            self._lifecycle.ending.close_dropped()
        if core.suspended or core.running:
            slots = sorted(core.running)
            text = f"{len(slots)} requests run, in slots {slots[:16]}, {len(core.suspended)} are suspended"
            raise RetryLater.with_hint(text, "close them first", available=slots)
        core.memory.restart()
        for pin in core.prefix.pins_of():
            core.guard.change(core.prefix.unpin, pin)
        core.capacity.forget(core.prefix.clear)
        core.capacity.tidy()
        core.media.clear()
