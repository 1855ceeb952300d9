"""The exception tree. Every message carries its numbers and a next step.

KVPagodaError
├── BadInput          (ValueError)    the call cannot be right, whatever the state of the cache
│   ├── SchemaError                   a config that cannot be read: missing, absurd or unknown
│   ├── LayoutError                   a layout that cannot be, or two that hold different content; names the rule
│   ├── NeverFits                     larger than the whole cache: waiting will not help
│   └── NotOwned                      an id freed twice, never handed out, or out of range
├── Exhausted         (RuntimeError)  right, but there is no room
│   ├── OutOfBlocks                   nothing was taken; close a sequence or raise the budget
│   └── RetryLater                    admission: not now; it fits once others have closed
├── StaleHandle       (RuntimeError)  a sequence or view used after it was closed
├── MissingExtra      (ImportError)   the name needs a package that is not installed; says which extra brings it
├── ConcurrentUse     (RuntimeError)  two threads in one cache at once
├── NeedsReset        (RuntimeError)  an interrupt came in the middle of a change of the cache
└── CheckFailed       (AssertionError) ``check()`` found ids that break the law of ownership
"""

from __future__ import annotations


class KVPagodaError(Exception):
    """Base of everything this library raises on purpose."""


class BadInput(KVPagodaError, ValueError):
    """An argument that can never be right. Raised before anything changed."""


class SchemaError(BadInput):
    """A model config that cannot be turned into a schema; names the field or the layer."""


class LayoutError(BadInput):
    """A layout that breaks a rule of the layout language, or two layouts that hold different content.

    ``rule`` is one word: which rule it is. The message says what breaks it.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(rule, message)
        self.rule = rule

    def __str__(self) -> str:
        return f"{self.args[1]} (layout rule '{self.rule}')"


class NeverFits(BadInput):
    """The request is larger than the whole cache; says what it would need."""


class NotOwned(BadInput):
    """An id that the caller does not hold: freed twice, out of range, or named twice in one call."""


class Exhausted(KVPagodaError, RuntimeError):
    """There is no room at the moment. Nothing was taken."""


class OutOfBlocks(Exhausted):
    """A group has too few free blocks; says what was asked for, what is free and the total."""


class RetryLater(Exhausted):
    """Admission verdict: fits the cache, but not beside what is running now."""


class StaleHandle(KVPagodaError, RuntimeError):
    """Use of a sequence after ``close``, or of a batch after one of its sequences was closed."""


class MissingExtra(KVPagodaError, ImportError):
    """A name of the library that needs an optional package; ``name`` is the package, the text says how to install it."""


class ConcurrentUse(KVPagodaError, RuntimeError):
    """A call into a cache that another thread is inside of. Nothing was changed by it."""


class NeedsReset(KVPagodaError, RuntimeError):
    """A signal interrupted the few assignments of a change, so that owners of blocks are uncertain: ``reset`` or ``close``."""


class CheckFailed(KVPagodaError, AssertionError):
    """The ownership of ids does not add up; the message names the ids."""
