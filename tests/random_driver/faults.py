"""The exceptions that end an operation of the driver."""

from __future__ import annotations


class Refused(Exception):
    """The operation ends here, and that is no fault: a call raised an expected error and changed nothing, or no request
    suits."""


class Fault(AssertionError):
    """The cache did something that it must not do."""


class WrongBytes(AssertionError):
    """A batch shows bytes that were not written for that text."""
