"""Tells an event log which blocks the tiers keep, for routers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from kvpagoda.events.event_log import CachedEvents, EventLog
from kvpagoda.tiers.keys import KEY_NBYTES
from kvpagoda.tiers.level import Level
from kvpagoda.tiers.slots import SlotDriver


class TierWatch:
    """Tells ``log`` what one tier keeps, from the threads of that tier. ``medium``: see ``CachedEvents``."""

    def __init__(self, medium: str, log: EventLog, driver: SlotDriver) -> None:
        self._medium, self._log, self._driver = medium, log, driver
        self._hashes: dict[bytes, bytes] = {}  # key of a record -> the hashes of its blocks, concatenated
        driver.on_drop = self._dropped

    def stored(self, hashes: Mapping[bytes, bytes]) -> None:
        """Tell which of the records with the keys of ``hashes`` the driver keeps: others may have been dropped again."""
        for key in hashes:
            self._driver.while_kept(key, partial(self._kept, key, hashes[key]))

    # -- under the driver's lock, so that what is kept and what is dropped are told in their order ------------------------

    def _kept(self, key: bytes, hashes: bytes) -> None:
        self._hashes[key] = hashes
        self._tell(hashes, True)

    def _dropped(self, key: bytes) -> None:
        if (hashes := self._hashes.pop(key, None)) is not None:
            self._tell(hashes, False)

    def _tell(self, hashes: bytes, is_there: bool) -> None:
        split = tuple(hashes[at : at + KEY_NBYTES] for at in range(0, len(hashes), KEY_NBYTES))
        self._log.told(CachedEvents(self._medium, split, is_there))


def watches_of(levels: Iterable[Level], log: EventLog) -> dict[Level, TierWatch]:
    """Return an object to tell for each of ``levels`` whose driver tells what it drops: host memory and disk."""
    found: dict[Level, TierWatch] = {}
    for level in levels:
        if isinstance(level.tier.driver, SlotDriver):
            found[level] = TierWatch("CPU" if level.spec.is_private else "STORAGE", log, level.tier.driver)
    log.is_watching = bool(found)
    return found
