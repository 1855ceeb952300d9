"""Reads traces: which form a file has, its lines, and which of them are bad."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from kvpagoda.errors import BadInput, BadLine
from kvpagoda.replay.readers.records import RecordForm, Request
from kvpagoda.replay.readers.requests import AZURE_HEADER, BURST_HEADER, TABLES, Bailian, DynamoTrace, LookupLog, Public
from kvpagoda.replay.readers.sessions import (
    AgentTimes,
    BenchResult,
    CommonPrefix,
    Conversations,
    Prompts,
    RunLength,
)  # fmt: skip
from kvpagoda.text import json_of

HEADED: dict[str, type[RecordForm]] = {"weka-rle-v1": RunLength, "lcp-v1": CommonPrefix}
"""``format`` of a first line -> the form of the lines below it."""
BY_FIELDS: tuple[tuple[tuple[str, ...], type[RecordForm]], ...] = (
    (("schema", "event_type"), DynamoTrace),
    (("event",), DynamoTrace),
    (("chunk_hashes",), LookupLog),
    (("chat_id", "hash_ids"), Bailian),
    (("requests", "block_size"), Conversations),
    (("input_lens",), BenchResult),
    (("total_input_tokens", "request_throughput"), BenchResult),
    (("conversations",), Prompts),
    (("prompt",), Prompts),
)
"""The fields of a first record that tell its form. A record without any of them is of the public form."""
KNOWN = (
    f"JSON lines with 'hash_ids', 'chunk_hashes', 'prompt' and others, {', '.join(HEADED)}, or csv with the header "
    f"{AZURE_HEADER} or {BURST_HEADER}; docs/replay.md lists all"
)

Source: TypeAlias = str | Path | Iterable[Request | Mapping[str, Any]]
OnBad: TypeAlias = Callable[[BadLine], None]
_END: Any = object()


class Records:
    """Reads records one after another; the first one tells the form of all."""

    def __init__(self, times: AgentTimes | None = None) -> None:
        self._form: RecordForm | None = None
        self._times = times

    def __call__(self, record: Any) -> list[Request]:
        """Return the requests of the next record; a Request is returned unchanged. Raises BadLine, ValueError."""
        if isinstance(record, Request):
            return [record]
        if not isinstance(record, Mapping):
            raise BadLine(f"a request is an object with 'hash_ids', got {type(record).__name__}")
        if self._form is None:
            form = _form_of(record)
            self._form = Conversations(self._times) if form is Conversations else form()
        return self._form(record)


class Lines(Records):
    """Reads lines of text, or objects of a JSON document, one after another. Empty lines are passed over.

    Args:
        times: from when the times of the requests of agents count; None: what most agents of the trace say.
    """

    def __init__(self, times: AgentTimes | None = None) -> None:
        super().__init__(times)
        self._table: RecordForm | None = None
        self._is_first = True

    def begin(self) -> None:
        """Begin a file, whose first line may be a header; the form stays that of the files before it."""
        self._is_first = True

    def __call__(self, line: Any) -> list[Request]:
        is_first, self._is_first = self._is_first, False
        if not isinstance(line, str):
            return super().__call__(line)
        text = line.strip()
        if is_first and self._is_header(text):
            return []
        if not text:
            return []
        if self._table is not None:
            return self._table(text)
        try:
            record = _object(text)
        except BadLine:
            if isinstance(self._form, RunLength | CommonPrefix):
                self._form.missed()
            raise
        return super().__call__(record)

    def _is_header(self, text: str) -> bool:
        """Return whether a first line is the header of a table. Raises BadLine if it begins no trace."""
        if not text:
            raise BadLine(f"the first line is empty; known forms: {KNOWN}")
        if text in TABLES:
            if not isinstance(self._table, TABLES[text]):
                self._table = TABLES[text]()
            return True
        if not text.startswith("{"):
            raise BadLine(f"no trace of a known form: it begins with {text[:40]!r}; known: {KNOWN}")
        return False


def _form_of(record: Mapping[str, Any]) -> type[RecordForm]:
    """Return the form of which ``record`` is the first. Raises BadLine for an unknown ``format``."""
    if (form := record.get("format")) is not None:
        if not isinstance(form, str) or form not in HEADED:
            raise BadLine(f"unknown format {form!r}; known: {KNOWN}", field="format")
        return HEADED[form]
    return next((form for names, form in BY_FIELDS if all(name in record for name in names)), Public)


def _object(line: str) -> dict[str, Any]:
    try:
        found = json_of(line)
    except BadInput as error:
        raise BadLine(str(error)) from None
    if not isinstance(found, dict):
        raise BadLine(f"expected a JSON object, got {type(found).__name__}")
    return found


def read_requests(source: Source, *, on_bad: OnBad | None = None, times: AgentTimes | None = None) -> Iterator[Request]:
    """Yield the requests of a source, one at a time. The first line tells the form; ``docs/replay.md`` lists the forms.

    Args:
        source: a file of any known form, a folder, whose files are read in the order of their names, or an iterable of
            Requests or records.
        on_bad: called with the BadLine of a bad record, after which the next one is read; None: it is raised.
        times: from when the times of agents count; each conversation tells by itself (``Trace.read``: all together).

    Raises:
        BadLine: a record is malformed or incomplete: with the file, the line (or the record's number) and the field,
            after the requests before it were yielded.
        BadInput: there is no trace, or no record of it could be read.
    """
    counts = _Counts(on_bad)
    if not isinstance(source, str | Path):
        try:
            records = iter(source)
        except TypeError:
            text = f"a trace is a path or an iterable of records, got {type(source).__name__}"
            raise BadInput(text, needed=type(source).__name__) from None
        yield from _parsed(records, Records(times), "records", "record", counts)
    else:
        parse = Lines(times)
        for path in _files(Path(source)):
            parse.begin()
            with path.open("rb") as file:
                packed = file.read(2) == b"\x1f\x8b"
                file.seek(0)
                raw: Any = gzip.GzipFile(fileobj=file) if packed else file
                with io.TextIOWrapper(raw, encoding="utf-8-sig", errors="replace") as lines:
                    yield from _parsed(_items(lines), parse, str(path), "line", counts)
    if counts.bad is not None and not counts.good:
        text = f"no line of {counts.bad.path} could be read; the first error: {counts.bad}"
        raise BadInput(text, needed=1, available=0)


class _Counts:
    """What was read: the number of ``good`` requests, the first ``bad`` record."""

    def __init__(self, on_bad: OnBad | None) -> None:
        self.on_bad, self.good = on_bad, 0
        self.bad: BadLine | None = None


def _files(path: Path) -> list[Path]:
    """Return the file ``path``, or the files of that folder. Raises BadInput if there are none."""
    found = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    found = [file for file in found if file.is_file() and not (path.is_dir() and file.name.startswith("."))]
    if not found:
        raise BadInput(f"no trace at {str(path)!r}; give a file, or a folder of files: {KNOWN}", needed=str(path))
    return found


def _items(lines: io.TextIOWrapper) -> Iterator[Any]:
    """Yield the lines of a file; of a JSON document that is longer than a line, its object, or the items of its list.
    Raises BadLine."""
    first = next(lines, "")
    if not first:
        raise BadLine(f"the file is empty; known forms: {KNOWN}")
    if first.strip() != "{" and not first.startswith("["):
        yield first
        yield from lines
        return
    try:
        document = json_of(first + lines.read())
    except BadInput as error:
        raise BadLine(str(error)) from None
    yield from document if isinstance(document, list) else [document]


def _parsed(items: Iterator[Any], parse: RecordForm, path: str, unit: str, counts: _Counts) -> Iterator[Request]:
    """Yield the requests of ``items``. Raises BadLine with the path and the number of the item, counted from 1."""
    number = 0
    while True:
        number += 1
        try:
            item = next(items, _END)
        except (OSError, EOFError, zlib.error, BadLine) as error:  # a damaged gzip file, or a document that is no JSON
            raise BadLine(f"{path}, {unit} {number}: {error}", path=path, line=number) from None
        if item is _END:
            return
        try:
            found = parse(item)
        except (ValueError, OverflowError, RecursionError) as error:
            bad = placed(error, path, number, unit)
            if counts.on_bad is None:
                raise bad from None
            counts.bad = counts.bad or bad
            counts.on_bad(bad)
            continue
        counts.good += len(found)
        yield from found


def placed(error: Exception, path: str, number: int, unit: str = "line") -> BadLine:
    """Return the error of a form as one that says where.

    Args:
        error: what was raised.
        path: of the file.
        number: of the line.
        unit: what the number counts.
    """
    said = {name: getattr(error, name, None) for name in ("field", "needed", "available", "hint")}
    return BadLine(f"{path}, {unit} {number}: {error}", path=path, line=number, **said)
