"""Traces as they are published, told apart by what they hold: plain or gzip, one request a line.

    form        first line                                   a request
    public      {"timestamp": ms, "input_length": .., "output_length": .., "hash_ids": [..]}     the same
    run length  {"format": "weka-rle-v1", "block_size": ..}  {"t": s, "in": .., "out": .., "r": [first, count, ..]}
    lcp         {"format": "lcp-v1", ..}                     {"t": s, "n": .., "o": .., "p": earlier line, "l": common}
    lengths     TIMESTAMP,ContextTokens,GeneratedTokens      2023-11-16 18:17:03.9799600,4808,10

Run length: a line {"conv": ..} begins a conversation, and ids mean something inside it only; here they are made
different from those of all others. Lcp: a prompt of ``n`` bytes begins with the first ``l`` bytes of prompt ``p``; whole
blocks of 64 bytes become ids. Lengths: no ids, so there is nothing to look up, only arrivals to study.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import BadInput
from kvpagoda.replay.request import Request

Ids: TypeAlias = npt.NDArray[np.int64]
Source: TypeAlias = "str | Path | Iterable[Request | Mapping[str, Any]]"
LCP_BLOCK = 64  # bytes: about 16 tokens of English or code
LENGTHS_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
LENGTHS_LINE = re.compile(r"[0-9]{4}-[0-9-]+[ T][0-9:.]+,[0-9]{1,9},[0-9]{1,9}")
KNOWN = "JSON lines with 'hash_ids', weka-rle-v1, lcp-v1, or csv with the header " + LENGTHS_HEADER


def read_requests(source: Source) -> Iterator[Request]:
    """The requests of a file of any form above, or of an iterable of Requests or public records, one at a time.

    Raises BadInput with the file and the line (or the record's number) for what is malformed, missing or unknown; the
    requests before it have been handed out by then.
    """
    if not isinstance(source, str | Path):
        try:
            records = iter(source)
        except TypeError:
            raise BadInput(f"a trace is a path or an iterable of records, got {type(source).__name__}") from None
        yield from _parsed(records, lambda r: r if isinstance(r, Request) else public_request(r), "record")
        return
    path = Path(source)
    if not path.is_file():
        raise BadInput(f"no trace at {str(path)!r}; give a file: {KNOWN}")
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        raw: Any = gzip.GzipFile(fileobj=file) if packed else file
        lines = io.TextIOWrapper(raw, encoding="utf-8", errors="replace")
        yield from _parsed(_from_first_line(lines), None, f"{path}, line")


def _from_first_line(lines: Iterable[str]) -> Iterator[Any]:
    """First the function that parses a line of this form, then the lines themselves."""
    rest = iter(lines)
    first = next(rest, "")
    if not first.strip():
        raise BadInput(f"{'the first line' if first else 'the file'} is empty; known forms: {KNOWN}")
    yield _form(first)
    yield first
    yield from rest


def _form(first: str) -> Callable[[str], Request | None]:
    """What parses the lines of a file that begins with this one, this one included."""
    if first.strip() == LENGTHS_HEADER:
        return Lengths()
    if not first.startswith("{"):
        raise BadInput(f"no trace of a known form: it begins {first.strip()[:40]!r}; known: {KNOWN}")
    header = _object(first)
    form = header.get("format")
    if form is None:
        return _public_line
    if form == "weka-rle-v1":
        return RunLength(_count(header, "block_size", least=1))
    if form == "lcp-v1":
        return CommonPrefix()
    raise BadInput(f"unknown format {form!r}; known: {KNOWN}")


def _parsed(records: Iterator[Any], parse: Callable[[Any], Request | None] | None, where: str) -> Iterator[Request]:
    """Parse each record; whatever is wrong with one is told with its number. An empty line says nothing."""
    number = 0
    try:
        if parse is None:
            parse = next(records)
            assert parse is not None
        for number, record in enumerate(records, 1):  # noqa: B007  the errors below name it
            request = parse(record) if not isinstance(record, str) or record.strip() else None
            if request is not None:
                yield request
    except (OSError, EOFError, zlib.error) as error:  # a gzip that is cut off or damaged
        raise BadInput(f"{where} {number + 1}: {error}") from None
    except (ValueError, OverflowError) as error:
        raise BadInput(f"{where} {max(number, 1)}: {error}") from None


def public_request(record: Any) -> Request:
    """A record of the public form -> Request. ``timestamp`` is in milliseconds. Raises BadInput naming the field."""
    if not isinstance(record, Mapping):
        raise BadInput(f"a request is an object with 'hash_ids', got {type(record).__name__}")
    ids = _field(record, "hash_ids")
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise BadInput(f"'hash_ids' must be one row of whole numbers, got {ids.dtype} of shape {ids.shape}")
    elif not isinstance(ids, list | tuple) or not set(map(type, ids)) <= {int}:
        raise BadInput("'hash_ids' must be a list of whole numbers")
    elif ids and not (min(ids) >= -(2**63) and max(ids) < 2**63):
        raise BadInput("'hash_ids' must fit in 64 bits with a sign")
    return Request(
        _seconds(record, "timestamp") / 1000, _count(record, "input_length"), _count(record, "output_length"),
        np.array(ids, np.int64),
    )  # fmt: skip


def _public_line(line: str) -> Request:
    return public_request(_object(line))


class RunLength:
    """Lines of the run length form. Ids of different conversations are made different."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._first = self._next = 0

    def __call__(self, line: str) -> Request | None:
        record = _object(line)
        if "conv" in record or "format" in record:
            self._first = self._next
            return None
        runs, tokens = _field(record, "r"), _count(record, "in")
        if not isinstance(runs, list) or len(runs) % 2 or not set(map(type, runs)) <= {int}:
            raise BadInput("'r' must be a list of whole numbers in pairs: first id, count")
        if any(not 0 <= value < 2**31 for value in runs):
            raise BadInput("'r' holds a number below 0 or above 2^31 - 1")
        if sum(runs[1::2]) * self.block_size >= tokens + self.block_size:
            raise BadInput(f"'r' names {sum(runs[1::2])} blocks of {self.block_size} tokens, 'in' is {tokens}")
        spans = [np.arange(first, first + count) for first, count in zip(runs[::2], runs[1::2])]
        ids = np.concatenate([np.empty(0, np.int64), *spans]) + self._first
        self._next = max(self._next, int(ids.max(initial=-1)) + 1)
        return Request(_seconds(record, "t"), tokens, _count(record, "out"), ids)


class CommonPrefix:
    """Lines of the lcp form: each prompt as the blocks it shares with an earlier one, and fresh ones."""

    def __init__(self) -> None:
        self._prompts: list[tuple[int, Ids]] = []
        self._next = 0

    def __call__(self, line: str) -> Request | None:
        record = _object(line)
        if "format" in record:
            return None
        length, common, parent = _count(record, "n"), _count(record, "l"), _count(record, "p", least=-1)
        earlier, ids = self._prompts[parent] if 0 <= parent < len(self._prompts) else (0, np.empty(0, np.int64))
        if parent >= len(self._prompts) or common > min(length, earlier):
            raise BadInput(
                f"prompt {len(self._prompts)} of {length} bytes cannot share {common} bytes with prompt {parent}"
                + (f" of {earlier}" if parent < len(self._prompts) else ", which comes later")
            )
        shared = ids[: common // LCP_BLOCK]
        fresh = np.arange(self._next, self._next + length // LCP_BLOCK - len(shared))
        self._next += len(fresh)
        self._prompts.append((length, np.concatenate([shared, fresh])))
        return Request(_seconds(record, "t"), length, _count(record, "o"), self._prompts[-1][1])


class Lengths:
    """Lines of the lengths form; the first one's time is 0."""

    def __init__(self) -> None:
        self._began: np.datetime64 | None = None

    def __call__(self, line: str) -> Request | None:
        parts = line.strip().split(",")
        if parts[0] == "TIMESTAMP":
            return None
        if LENGTHS_LINE.fullmatch(line.strip()) is None:
            raise BadInput(f"expected time, tokens in, tokens out; got {line.strip()[:60]!r}")
        time = np.datetime64(parts[0], "ns")
        self._began = time if self._began is None else self._began
        arrival = float((time - self._began) / np.timedelta64(1, "s"))
        return Request(arrival, int(parts[1]), int(parts[2]), np.empty(0, np.int64))


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise BadInput(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInput(f"expected a JSON object, got {type(found).__name__}")
    return found


def _field(record: Mapping[str, Any], name: str) -> Any:
    if name not in record:
        raise BadInput(f"no field {name!r}; there are {', '.join(map(str, record)) or 'none'}")
    return record[name]


def _count(record: Mapping[str, Any], name: str, least: int = 0) -> int:
    value = _field(record, name)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value < 2**31:
        raise BadInput(f"{name!r} must be a whole number from {least} to 2^31 - 1, got {value!r}")
    return int(value)


def _seconds(record: Mapping[str, Any], name: str) -> float:
    value = _field(record, name)
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not math.isfinite(value):
        raise BadInput(f"{name!r} must be a finite number, got {value!r}")
    return float(value)
