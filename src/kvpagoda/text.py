"""Tables and wrapped lines of text, fitted to a width; words and numbers with commas between; what ``repr`` shows; files of
text and of JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from kvpagoda.errors import BadInput

T = TypeVar("T")


def table(
    names: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str], width: int | None = None
) -> list[str]:
    """Return the lines of a table: one for the column ``names``, more if a name has several lines, then one for each row.

    Columns in ``left`` are aligned left, the others right. If the table is wider than ``width`` (None: any width), it is
    turned: a line for each name, and as many rows beside each other as fit; the others follow after an empty line.

    >>> table(["model", "bytes"], [["a", "1,024"], ["other", "7"]], left=["model"])
    ['model  bytes', 'a      1,024', 'other      7']
    >>> table(["model", "bytes\\nof all"], [["a", "1,024"], ["other", "7"]], left=["model"], width=12)
    ['model         a', 'bytes of all  1,024', '', 'model         other', 'bytes of all  7']
    """
    body = [*rows]
    heads = [name.split("\n") for name in names]
    depth = max(map(len, heads))
    cells = [*zip(*([""] * (depth - len(head)) + head for head in heads)), *body]
    widths = [max(map(len, column)) for column in zip(*cells)]
    if width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        return _turned([name.replace("\n", " ") for name in names], body, width)
    aligned = ["<" if name in left else ">" for name in names]
    return ["  ".join(f"{cell:{side}{n}}" for cell, side, n in zip(row, aligned, widths)).rstrip() for row in cells]


def _turned(names: Sequence[str], rows: list[Sequence[str]], width: int) -> list[str]:
    lines, longest = list[str](), max(map(len, names))
    while rows:
        columns, room = [[f"{name:<{longest}}" for name in names]], width - longest
        for row in rows:
            size = max(map(len, row))
            room -= size + 2
            if room < 0 and len(columns) > 1:
                break
            columns.append([f"{cell:<{size}}" for cell in row])
        rows = rows[len(columns) - 1 :]
        lines += [*("  ".join(line).rstrip() for line in zip(*columns)), ""]
    return lines[:-1]


def wrapped(line: str, width: int | None, indent: str = "") -> list[str]:
    """Break ``line`` at spaces into pieces of at most ``width`` columns (None: no limit).

    All pieces but the first start with ``indent``.
    """
    if width is None:
        return [line]
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def in_brackets(describe: Callable[[T], str]) -> Callable[[T], str]:
    """Return a ``__repr__``: the name of the class and what ``describe`` says of the object, as ``<Sequence in slot 3: ..>``.
    If that raises, as of an object that was not made to its end, the name alone."""

    @wraps(describe)
    def represent(self: T) -> str:
        try:
            return f"<{type(self).__name__} {describe(self)}>"
        except Exception:
            return f"<{type(self).__name__}>"

    return represent


def short_number(n: int) -> str:
    """Return ``n`` in few characters, rounded down: 3 -> '3', 4096 -> '4Ki', 3 * 2**20 -> '3Mi'."""
    return str(n) if n < 1024 else f"{n // 1024}Ki" if n < 2**20 else f"{n // 2**20}Mi"


def words_of(text: str) -> list[str]:
    """Split ``text`` at commas: 'lru, opt' -> ['lru', 'opt']."""
    return [part.strip() for part in text.split(",")]


def numbers_of(text: str, option: str, unit: str = "blocks") -> tuple[int, ...]:
    """Parse numbers with commas between: '1024,8192' -> (1024, 8192). Raises BadInput, which names ``option``."""
    try:
        return tuple(map(int, words_of(text)))
    except ValueError:
        raise BadInput(f"{option} takes whole numbers of {unit} with commas between, got {text!r}") from None


def text_in(path: Path) -> str:
    """Return the text of a file. Raises BadInput for bytes that are no text in UTF-8, and OSError."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path} is no text: its byte {error.start:,} ({error.object[error.start]:#04x}) is not UTF-8"
        ) from None


def json_of(text: str, begin: str = "") -> Any:
    """Return what JSON ``text`` says. Raises BadInput, also where it is nested too deeply; the message has ``begin`` first."""
    try:
        return json.loads(text)
    except RecursionError:
        raise BadInput(f"{begin}not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise BadInput(f"{begin}not JSON: {error}") from None
