"""What every form of a trace is made of: requests, and checks of the fields of a record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import BadInput, BadLine, did_you_mean, shown
from kvpagoda.units import whole_number

Ids: TypeAlias = npt.NDArray[np.int64]
LONGEST = 1e15  # seconds; a larger number is a time in another unit


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a trace.

    Args:
        arrival: seconds since the trace began.
        input_length: tokens (bytes in the forms that hold texts).
        output_length: tokens (bytes in the forms that hold texts).
        block_ids: int64 ``[n]``, the chain of blocks of its prompt. Equal ids after equal chains are equal blocks. It
            is empty if the trace has only lengths.
        block_tokens: the number of tokens that an id stands for (the last id stands for the rest of the prompt), or
            int64 ``[n]``, one number for each id; None if the trace does not say. The caller owns the arrays.
        session: the number of its conversation; -1 if the trace does not say.
        calls_tool: whether its answer ended for another reason than the end of a turn, so that the next request of the
            session comes without a user.
    """

    arrival: float
    input_length: int
    output_length: int
    block_ids: Ids
    block_tokens: int | Ids | None = None
    session: int = -1
    calls_tool: bool = False


class RecordForm(Protocol):
    """Reads the records of one trace, in their order. A record is an object of JSON, or a row of a table."""

    def __call__(self, record: Any, /) -> list[Request]:
        """Return the requests of the next record, most often one. Raises BadLine, which names the field, or another
        ValueError; the record has then changed nothing, and the next one can be read."""


class Numbers:
    """Gives the ids of one trace as whole numbers of 64 bits: numbers stay as they are (those from 2^63 on become
    negative), texts are numbered from 0."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}
        self._low = self._high = 0
        self._had_numbers = False

    def of(self, ids: Any, name: str = "hash_ids") -> Ids:
        """Return the chain ``ids``, which the field ``name`` holds, as int64 ``[n]``. Raises BadLine."""
        if isinstance(ids, np.ndarray):
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise BadLine(
                    f"{name!r} must be one row of whole numbers, got {ids.dtype} of shape {ids.shape}", field=name
                )
            ids = ids.tolist()
        kinds = set(map(type, ids)) if isinstance(ids, list | tuple) else {object}
        if not (kinds == {str} or kinds <= {int}):
            raise BadLine(f"{name!r} must be a list of whole numbers, or of texts", field=name)
        if not ids:
            return np.empty(0, np.int64)
        if self._texts if kinds == {int} else self._had_numbers:
            raise BadLine(f"{name!r} are whole numbers in some records and texts in others", field=name)
        if kinds == {str}:
            number = self._texts.setdefault
            return np.array([number(text, len(self._texts)) for text in ids], np.int64)
        low, high = min(self._low, min(ids)), max(self._high, max(ids))
        if low < -(2**63) or high >= 2**64 or (low < 0 and high >= 2**63):
            raise BadLine(f"{name!r} must fit in 64 bits, all of them with a sign or all without", field=name)
        self._low, self._high, self._had_numbers = low, high, True
        return np.array(ids, np.uint64).view(np.int64) if high >= 2**63 else np.array(ids, np.int64)


def field(record: Mapping[str, Any], name: str) -> Any:
    """Return the field ``name`` of a record. Raises BadLine with the fields there are."""
    if name not in record:
        names, hint = tuple(map(str, record)), did_you_mean(name, map(str, record))
        listed = ", ".join(text[:40] for text in names[:20])
        text = f"no field {name!r}; the fields are {listed or 'none'}" + (f"; {hint}" if hint else "")
        raise BadLine(text, field=name, needed=name, available=names, hint=hint)
    return record[name]


def named(record: Mapping[str, Any], *names: str) -> str:
    """Return the first of ``names`` that is a field of the record, else the first."""
    return next((name for name in names if name in record), names[0])


def count(record: Mapping[str, Any], name: str, least: int = 0) -> int:
    """Return the field ``name``, a whole number from ``least`` to 2^31 - 1. Raises BadLine."""
    value = field(record, name)
    try:
        return whole_number(value, repr(name), least, below=2**31)
    except BadInput as error:
        raise BadLine(str(error), field=name, needed=value, hint=error.hint) from None


def seconds(record: Mapping[str, Any], name: str) -> float:
    """Return the field ``name``, a number or a text of one, as a float. Raises BadLine."""
    value = field(record, name)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        text = f"{name!r} must be a finite number, or a text of one, got {shown(value)}"
        raise BadLine(text, field=name, needed=value)
    if abs(number) >= LONGEST:
        raise BadLine(
            f"{name!r} must be below {LONGEST:g}, got {number:g}: is it in another unit?", field=name, needed=value
        )
    return number


def listed(record: Mapping[str, Any], name: str, of: type | tuple[type, ...] = object) -> list[Any]:
    """Return the field ``name``, a list whose items are of the types ``of``. Raises BadLine."""
    value = field(record, name)
    if not isinstance(value, list) or not all(isinstance(item, of) for item in value):
        raise BadLine(f"{name!r} must be a list of the right kind, got {shown(value)}", field=name)
    return value


def object_in(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the field ``name``, an object. Raises BadLine."""
    value = field(record, name)
    if not isinstance(value, Mapping):
        raise BadLine(f"{name!r} must be an object, got {shown(value)}", field=name)
    return value
