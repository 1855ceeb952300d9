"""The exception tree. Every message carries its numbers and a next step; the numbers are attributes too.

KVPagodaError
├── BadInput          (ValueError)    the call is wrong, whatever the state of the cache
│   ├── SchemaError                   a config that cannot be read: missing, absurd or unknown
│   ├── LayoutError                   an impossible layout, or two layouts that hold different content; names the rule
│   ├── NeverFits                     larger than the whole cache: waiting will not help
│   ├── BadLine                       a line of a trace that cannot be read: names the file, the line and the field
│   ├── NotOwned                      an id freed twice, never handed out, or out of range
│   └── TicketRefused                 a ticket that is forged, used, or for another model or other weights
├── Exhausted         (RuntimeError)  the call is correct, but there is no room
│   ├── OutOfBlocks                   nothing was taken; close a sequence or raise the budget
│   └── RetryLater                    admission: not now; the request fits once others have closed
├── StaleHandle       (RuntimeError)  a sequence or view used after it was closed
├── Asleep            (RuntimeError)  the cache gave its memory back; wake it first
├── HandoverMiss      (RuntimeError)  what a ticket names is gone, or cannot be had: compute the request instead
├── MissingExtra      (ImportError)   the name needs a package that is not installed; says which extra installs it
├── ConcurrentUse     (RuntimeError)  two threads called one cache at the same time
├── NeedsReset        (RuntimeError)  an interrupt arrived in the middle of a change of the cache, or a worker missed a batch
└── CheckFailed       (AssertionError) ``check()`` found ids that break the law of ownership
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from difflib import get_close_matches
from reprlib import Repr
from typing import Any, TypeVar

E = TypeVar("E", bound="KVPagodaError")
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 16


class KVPagodaError(Exception):
    """Base class of everything this library raises on purpose.

    The numbers of the message are attributes too, each None where the error has no such value.

    Args:
        *message: the text.
        needed: what the call asked for: a number in the unit of the message, or a name.
        available: what exists, likewise.
        field: which argument, or which field of a config or a file, as the message names it.
        group: the name of the group of layers concerned.
        hint: the next step.
        **of_base: of a second base class.

    Examples:
        >>> error = OutOfBlocks("need 12 blocks, 3 free in group 'full'", needed=12, available=3, group="full")
        >>> error.needed - error.available, error.group, error.hint
        (9, 'full', None)
    """

    def __init__(
        self,
        *message: object,
        needed: Any = None,
        available: Any = None,
        field: str | None = None,
        group: str | None = None,
        hint: str | None = None,
        **of_base: Any,
    ) -> None:
        super().__init__(*message, **of_base)
        self.needed, self.available, self.field, self.group, self.hint = needed, available, field, group, hint

    @classmethod
    def with_hint(cls: type[E], text: str, hint: str, **numbers: Any) -> E:
        """Return the error whose message is ``text`` followed by ``hint``.

        Args:
            text: what is wrong.
            hint: the next step.
            **numbers: the other attributes.

        Examples:
            >>> str(RetryLater.with_hint("all 4 slots are in use", "close a sequence", needed=1, available=0))
            'all 4 slots are in use; close a sequence'
        """
        return cls(f"{text}; {hint}", hint=hint, **numbers)

    def within(self: E, where: str) -> E:
        """Return this error, with its attributes, but ``where`` before its message.

        Args:
            where: in which config or file.

        Examples:
            >>> str(BadInput("head_dim is 0", needed=0).within("llama config"))
            'llama config: head_dim is 0'
        """
        told = copy(self)
        told.args = (f"{where}: {self}",)
        return told


class BadInput(KVPagodaError, ValueError):
    """An argument that can never be correct. Raised before anything has changed."""


class SchemaError(BadInput):
    """A model config that cannot be turned into a schema; names the field or the layer."""


class LayoutError(BadInput):
    """A layout that breaks a rule of the layout language, or two layouts that hold different content.

    Args:
        message: says what breaks the rule, and names it.
        rule: the name of the broken rule, one word.
        **of_base: see ``KVPagodaError``.
    """

    def __init__(self, message: str, *, rule: str = "", **of_base: Any) -> None:
        super().__init__(message, **of_base)
        self.rule = rule

    @classmethod
    def of(cls, rule: str, message: str, **numbers: Any) -> LayoutError:
        """Return the error for something that breaks ``rule``.

        Args:
            rule: the name of the broken rule.
            message: what breaks it.
            **numbers: the attributes of ``KVPagodaError``.
        """
        return cls(f"{message} (layout rule '{rule}')", rule=rule, **numbers)


class NeverFits(BadInput):
    """The request is larger than the whole cache; the message says how much it needs."""


class BadLine(BadInput):
    """A line of a trace that cannot be read. Its message begins with the file and the line.

    Args:
        message: the text.
        path: the file, "records" for an iterable; None: not known.
        line: the number of the line or record, from 1; None: not known.
        **of_base: see ``KVPagodaError``; ``field`` is the name of the field that is wrong.
    """

    def __init__(self, message: str, *, path: str | None = None, line: int | None = None, **of_base: Any) -> None:
        super().__init__(message, **of_base)
        self.path, self.line = path, line


class NotOwned(BadInput):
    """An id that the caller does not own: freed twice, out of range, or named twice in one call."""


class TicketRefused(BadInput):
    """A ticket that this receiver will never take: malformed, forged, used before, or of another model or weights."""


class HandoverMiss(KVPagodaError, RuntimeError):
    """The bytes that a ticket names cannot be had any more, or not intact: its lease ended, the sender or the link failed.

    Nothing has changed. Open the request instead, which computes what is not cached.
    """


class Exhausted(KVPagodaError, RuntimeError):
    """There is no room at the moment. Nothing was taken."""


class OutOfBlocks(Exhausted):
    """A group has too few free blocks; the message gives the number requested, the number free and the total."""


class RetryLater(Exhausted):
    """Admission result: the request fits the cache, but not beside the requests that are running now."""


class StaleHandle(KVPagodaError, RuntimeError):
    """Use of a sequence after ``close``, of a batch after one of its sequences was closed, or of copies that a worker has
    applied."""


class Asleep(KVPagodaError, RuntimeError):
    """A call that needs the memory of a cache, between its ``sleep`` and its ``wake``. This call changed nothing."""


class MissingExtra(KVPagodaError, ImportError):
    """A name of the library needs an optional package. ``name`` is the package; the message says how to install it."""

    @classmethod
    @contextmanager
    def unless(cls, package: str, text: str) -> Iterator[None]:
        """Context for imports from ``package``: raise this error if it is not installed, or lacks what is imported.

        Args:
            package: its name.
            text: the message.
        """
        try:
            yield
        except ImportError as error:
            if (error.name or "").partition(".")[0] != package or isinstance(error, cls):
                raise
            if isinstance(error, ModuleNotFoundError) and error.name == package:
                raise cls(text, name=package) from None
            raise cls(f"{text} ({error})", name=package) from error


class ConcurrentUse(KVPagodaError, RuntimeError):
    """A call into a cache while another thread is inside a call. This call changed nothing."""


class NeedsReset(KVPagodaError, RuntimeError):
    """A signal interrupted the assignments that commit a change, so the owners of blocks are uncertain.

    Call ``reset`` or ``close``. Or the copies of a batch did not come to the ``Worker`` that has the memory, so that its rows
    are not those of the scheduler: close the scheduler's requests, and call its ``reset``.
    """


class CheckFailed(KVPagodaError, AssertionError):
    """``check()`` found that the ownership of ids is inconsistent; the message names the ids."""


def shown(value: object) -> str:
    """Return ``value``, whatever a caller passed, as an error message shows it: as ``repr`` does, but short.

    >>> shown("lur"), shown([*range(99)])[-14:], shown(10**9999)
    ("'lur'", ', 14, 15, ...]', 'a value of type int')
    """
    try:
        return _SHORT.repr(value)
    except Exception:  # of a number with too many digits, or of an object of the caller
        return f"a value of type {type(value).__name__}"


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the question "did you mean ...?" for the name in ``known`` nearest to ``name``; None if none is near.

    ``cutoff``: the similarity required, 0 to 1.
    """
    nearest = get_close_matches(name.lower(), known, n=1, cutoff=cutoff) if isinstance(name, str) else []
    return f"did you mean {nearest[0]!r}?" if nearest else None


def unknown_name(what: str, name: object, known: Iterable[str], error: type[BadInput] = BadInput) -> BadInput:
    """Return the error for a ``name`` that is not in ``known``: it lists the known names and suggests the nearest.

    ``what``: the kind of name, for the message. Attributes: ``needed`` is the name, ``available`` the known names,
    ``hint`` the suggestion.

    >>> str(unknown_name("policy", "lur", ("lru", "fifo")))
    "unknown policy 'lur'; known: lru, fifo; did you mean 'lru'?"
    """
    names = tuple(known)
    hint = did_you_mean(name, names)
    text = f"unknown {what} {shown(name)}; known: {', '.join(names)}" + (f"; {hint}" if hint else "")
    return error(text, needed=name, available=names, hint=hint)
