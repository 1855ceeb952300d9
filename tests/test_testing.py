"""The tests for parts that others write find the faults of such parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpagoda.errors import CheckFailed
from kvpagoda.testing import DRIVER_CHECKS, PAYLOAD, Make
from kvpagoda.tiers import RecordBuffer, Status, host_driver


@pytest.mark.parametrize("check", DRIVER_CHECKS)
def test_every_check_fails_a_driver_that_lies(check: Callable[[Make], None]) -> None:
    """One that says OK to every load and reads nothing."""

    class Liar:
        def __init__(self, buffer: RecordBuffer) -> None:
            self._driver = host_driver(buffer, 16 * RecordBuffer.nbytes_for(1, PAYLOAD))

        def __getattr__(self, name: str) -> object:
            return getattr(self._driver, name)

        def load(self, keys: list[bytes], rows: list[int], deadline: float) -> list[Status]:
            return [Status.OK] * len(keys)

    with pytest.raises(CheckFailed):
        check(Liar)  # type: ignore[arg-type]
