"""The exception tree. Every message carries its numbers and a next step; the numbers are attributes too.

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

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, TypeVar

E = TypeVar("E", bound="KVPagodaError")


class KVPagodaError(Exception):
    """Base of everything this library raises on purpose.

    What the message says is data too, each None where an error has no such thing: ``needed`` and ``available``, what was
    asked for and what there is (numbers in the unit of the message, or names); ``group``, the group of layers that it is
    about; ``hint``, the next step.

    >>> error = OutOfBlocks("need 12 blocks, 3 free in group 'full'", needed=12, available=3, group="full")
    >>> error.needed - error.available, error.group, error.hint
    (9, 'full', None)
    """

    def __init__(
        self,
        *message: object,
        needed: Any = None,
        available: Any = None,
        group: str | None = None,
        hint: str | None = None,
        **of_base: Any,
    ) -> None:
        super().__init__(*message, **of_base)
        self.needed, self.available, self.group, self.hint = needed, available, group, hint

    @classmethod
    def with_hint(cls: type[E], text: str, hint: str, **numbers: Any) -> E:
        """The error that says ``text`` and then ``hint``, with ``numbers`` as attributes.

        >>> str(RetryLater.with_hint("all 4 slots are in use", "close a sequence", needed=1, available=0))
        'all 4 slots are in use; close a sequence'
        """
        return cls(f"{text}; {hint}", hint=hint, **numbers)


class BadInput(KVPagodaError, ValueError):
    """An argument that can never be right. Raised before anything changed."""


class SchemaError(BadInput):
    """A model config that cannot be turned into a schema; names the field or the layer."""


class LayoutError(BadInput):
    """A layout that breaks a rule of the layout language, or two layouts that hold different content.

    ``rule`` is one word: which rule it is. The message says what breaks it, and names the rule.
    """

    def __init__(self, message: str, *, rule: str = "", **of_base: Any) -> None:
        super().__init__(message, **of_base)
        self.rule = rule

    @classmethod
    def of(cls, rule: str, message: str) -> LayoutError:
        """The error of what breaks ``rule``."""
        return cls(f"{message} (layout rule '{rule}')", rule=rule)


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

    @classmethod
    @contextmanager
    def unless(cls, package: str, text: str) -> Iterator[None]:
        """Around imports from ``package``: where it is not installed, that is this error, with ``text``."""
        try:
            yield
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != package:
                raise
            raise cls(text, name=package) from None


class ConcurrentUse(KVPagodaError, RuntimeError):
    """A call into a cache that another thread is inside of. Nothing was changed by it."""


class NeedsReset(KVPagodaError, RuntimeError):
    """A signal interrupted the few assignments of a change, so that owners of blocks are uncertain: ``reset`` or ``close``."""


class CheckFailed(KVPagodaError, AssertionError):
    """The ownership of ids does not add up; the message names the ids."""


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The question for the nearest of ``known``; None where none is near: ``cutoff``, 0 to 1, says how near."""
    nearest = get_close_matches(str(name).lower(), known, n=1, cutoff=cutoff)
    return f"did you mean {nearest[0]!r}?" if nearest else None


def unknown_name(what: str, name: object, known: Iterable[str], error: type[BadInput] = BadInput) -> BadInput:
    """The error for a ``name`` that is none of ``known``: it lists them, and asks for the nearest.

    ``needed`` is the name, ``available`` the known ones, ``hint`` the question.

    >>> str(unknown_name("policy", "lur", ("lru", "fifo")))
    "unknown policy 'lur'; known: lru, fifo; did you mean 'lru'?"
    """
    names = tuple(known)
    hint = did_you_mean(name, names)
    text = f"unknown {what} {name!r}; known: {', '.join(names)}" + (f"; {hint}" if hint else "")
    return error(text, needed=name, available=names, hint=hint)
