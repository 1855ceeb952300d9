"""When a driver is left alone, and when it is asked again."""

from __future__ import annotations


class Breaker:
    """Opens after ``limit`` faults in a row; then a call goes through ``pause`` seconds after the last, until one succeeds.

    Times are given by the caller, who also sees to it that one thread asks at a time.
    """

    def __init__(self, limit: int, pause: float) -> None:
        self._limit, self._pause = limit, pause
        self._faults, self._next_try = 0, 0.0

    @property
    def is_open(self) -> bool:
        """Whether calls are refused, but for one now and then."""
        return self._faults >= self._limit

    def allows(self, now: float) -> bool:
        """Whether a call may go to the driver ``now``."""
        if not self.is_open:
            return True
        if now < self._next_try:
            return False
        self._next_try = now + self._pause
        return True

    def record(self, is_fault: bool, now: float) -> None:
        """A call came back, or did not in time."""
        self._faults = self._faults + 1 if is_fault else 0
        if self.is_open:
            self._next_try = now + self._pause

    def retry_now(self) -> None:
        """A call that was given up succeeded at last: the next one may try."""
        self._next_try = 0.0
