"""A circuit breaker: when calls to a failing driver are refused, and when it is tried again."""

from __future__ import annotations

_MOST_PAUSES = 32


class Breaker:
    """A circuit breaker that opens after ``limit`` faults in a row and closes at the first success.

    While it is open, calls are refused and the driver is probed: first ``pause`` seconds after the last fault, then at
    intervals that double up to 32 times ``pause``. The caller passes the times, of ``time.monotonic``, and holds a
    lock.
    """

    def __init__(self, limit: int, pause: float) -> None:
        self._limit, self._least_pause, self._pause = limit, pause, pause
        self._faults = 0
        self.next_probe = 0.0  #: time at which the next probe is due while the breaker is open

    @property
    def is_open(self) -> bool:
        """Whether calls are refused."""
        return self._faults >= self._limit

    def takes_probe(self, now: float) -> bool:
        """Return whether a probe is due ``now``; if so, the caller makes it, and the next probe is due later."""
        if not self.is_open or now < self.next_probe:
            return False
        self._pause = min(2 * self._pause, _MOST_PAUSES * self._least_pause)
        self.next_probe = now + self._pause
        return True

    def record(self, is_fault: bool, now: float) -> bool:
        """Record whether a call or probe failed or was late; return whether this opened or closed the breaker."""
        was_open = self.is_open
        if is_fault:
            self._faults += 1
            self.next_probe = now + self._pause
        else:
            self._faults, self._pause = 0, self._least_pause
        return self.is_open != was_open

    def retry_now(self) -> None:
        """Make the next probe due at once: a call that was late has succeeded in the end."""
        self.next_probe = 0.0
