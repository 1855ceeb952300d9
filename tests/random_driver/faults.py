"""How an operation of the driver ends, other than well."""

from __future__ import annotations


class Refused(Exception):
    """A call raised what it may raise, and changed nothing: the operation ends here."""


class Fault(AssertionError):
    """The cache did what it must not do."""


class WrongBytes(AssertionError):
    """A batch shows something that is not what was written for that text."""
