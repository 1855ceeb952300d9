"""Sizes in bytes as people write them, two integer divisions, and the validation of whole numbers."""

from __future__ import annotations

import operator
import re
from math import inf

from kvpagoda.errors import BadInput

_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)


def ceil_div(a: int, b: int) -> int:
    """Return the smallest whole number that is at least ``a / b``."""
    return -(-a // b)


def align_up(n: int, to: int) -> int:
    """Return the smallest multiple of ``to`` that is at least ``n``."""
    return ceil_div(n, to) * to


def table_rows(n: int, width: int, table_width: int) -> int:
    """Return how many rows of ``table_width`` bytes ``n`` records of ``width`` bytes take.

    A table row holds either several whole records, or one piece of a record: no record shares a row with a piece of
    another.
    """
    return ceil_div(n, table_width // width) if 0 < width <= table_width else n * ceil_div(width, table_width)


def parse_bytes(size: int | str) -> int:
    """Convert ``"40GiB"``, ``"1.5 MB"`` or a whole number of bytes (also a numpy integer) to bytes. Raises BadInput."""
    if isinstance(size, str):
        match = _SIZE.match(size)
        if match is None:
            raise BadInput(f"cannot read {size!r} as a size; write '512MiB', '2GiB' or a number of bytes")
        number, prefix, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))
    nbytes = whole_number(size, "a size (bytes, or text such as '2GiB')", at_least=1)
    if nbytes >= 2**63:
        raise BadInput(f"a size must be below 2^63 bytes, got {nbytes:,}", needed=nbytes)
    return nbytes


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes: 1536 -> '1.5 KiB'; exact below 1 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def whole_number(
    value: object, what: str, at_least: int = 0, error: type[BadInput] = BadInput, below: float = inf
) -> int:
    """Return ``value`` as an int if it is a whole number with ``at_least <= value < below``.

    Accepts Python and numpy integers, not bool and not float: ``whole_number(np.int64(64), "max_requests")`` is 64.

    Raises ``error``; its message names ``what`` and the value.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not at_least <= number < below:
        wanted = "positive whole number" if at_least == 1 else f"whole number of at least {at_least}"
        wanted = wanted if below == inf else f"whole number from {at_least:,} to {below - 1:,}"
        raise error(f"{what} must be a {wanted}, got {value!r}", needed=value, available=at_least)
    return number
