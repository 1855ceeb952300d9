"""Tells an event log which blocks the tiers keep, for routers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import Lock

from kvpagoda.abc import Status
from kvpagoda.events.event_log import CachedEvents, EventLog
from kvpagoda.tiers.keys import KEY_NBYTES
from kvpagoda.tiers.level import Level


class TierWatch:
    """Tells ``log`` what one tier keeps, from the threads of that tier. ``medium``: see ``CachedEvents``."""

    def __init__(self, medium: str, log: EventLog) -> None:
        self._medium, self._log, self._lock = medium, log, Lock()
        self._hashes: dict[bytes, bytes] = {}  # key of a record -> the hashes of its blocks, concatenated

    def stored(self, hashes: Mapping[bytes, bytes], statuses: list[Status]) -> None:
        """Tell which of the records with the keys of ``hashes`` are stored, as their ``statuses`` say."""
        with self._lock:
            for (key, some), status in zip(hashes.items(), statuses):
                if status is Status.OK:
                    self._hashes[key] = some
                    self._tell(some, True)

    def dropped(self, key: bytes) -> None:
        """Tell that the record ``key`` is not kept any more, if it was told that it is."""
        with self._lock:
            if (hashes := self._hashes.pop(key, None)) is not None:
                self._tell(hashes, False)

    def _tell(self, hashes: bytes, is_there: bool) -> None:
        split = tuple(hashes[at : at + KEY_NBYTES] for at in range(0, len(hashes), KEY_NBYTES))
        self._log.told(CachedEvents(self._medium, split, is_there))


def watches_of(levels: Iterable[Level], log: EventLog) -> dict[Level, TierWatch]:
    """Return an object to tell for each of ``levels`` whose driver tells what it drops: host memory and disk."""
    found: dict[Level, TierWatch] = {}
    for level in levels:
        if hasattr(level.tier.driver, "on_drop"):
            found[level] = TierWatch("CPU" if level.spec.is_private else "STORAGE", log)
            level.tier.driver.on_drop = found[level].dropped
    log.is_watching = bool(found)
    return found
