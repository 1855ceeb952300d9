"""Readers of published traces: plain or gzip files with one request per line. The first line tells the form.

    form        first line                                   a request
    public      {"timestamp": ms, "input_length": .., "output_length": .., "hash_ids": [..]}     the same
    grouped     {"timestamp": "s", .., "hash_ids": {"sys_prompt": [..], "history": [..], ..}}     the same (RAGPulse)
    run length  {"format": "weka-rle-v1", "block_size": ..}  {"t": s, "in": .., "out": .., "r": [first, count, ..]}
    lcp         {"format": "lcp-v1", ..}                     {"t": s, "n": .., "o": .., "p": earlier line, "l": common}
    lengths     TIMESTAMP,ContextTokens,GeneratedTokens      2023-11-16 18:17:03.9799600,4808,10

Public: ids are whole numbers or texts. ``timestamp`` is in milliseconds, or a text of seconds; a record without it
arrives together with the record before it. ``output_length`` may be absent (0). ``block_size`` is the number of tokens
that an id stands for, and ``block_tokens`` is a list with one such number for each id.

Grouped: the chain is the ids of all groups in their order. An id has a meaning only inside its group. Each id stands
for an equal share of the prompt.

Run length: a line {"conv": ..} begins a conversation. An id has a meaning only inside its conversation; the reader
makes the ids of all conversations different. "sp" says why the answer ended: "end_turn", or "tool_use".

Lcp: a prompt of ``n`` bytes begins with the first ``l`` bytes of prompt ``p``. Whole blocks of 64 bytes become ids.

Lengths: there are no ids, so nothing can be looked up; the trace has arrivals and lengths only.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import BadInput, did_you_mean
from kvpagoda.units import whole_number

Ids: TypeAlias = npt.NDArray[np.int64]
LCP_BLOCK = 64  # bytes: about 16 tokens of English or code
GROUPED_BLOCK = 512  # the most tokens that an id of the grouped form stands for
LENGTHS_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
LENGTHS_LINE = re.compile(r"[0-9]{4}-[0-9-]+[ T][0-9:.]+,[0-9]{1,9},[0-9]{1,9}")
KNOWN = "JSON lines with 'hash_ids', weka-rle-v1, lcp-v1, or csv with the header " + LENGTHS_HEADER


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a trace.

    ``arrival``: seconds since the trace began. ``input_length``, ``output_length``: tokens (bytes in the lcp form).
    ``block_ids``: int64 ``[n]``, the chain of blocks of its prompt. Equal ids after equal chains are equal blocks. It
    is empty if the trace has only lengths. ``block_tokens``: the number of tokens that an id stands for (the last id
    stands for the rest of the prompt), or int64 ``[n]``, one number for each id; None if the trace does not say. The
    caller owns the arrays. ``session``: the number of its conversation; -1 if the trace does not say. ``calls_tool``:
    whether its answer ended for another reason than the end of a turn, so that the next request of the session comes
    without a user.
    """

    arrival: float
    input_length: int
    output_length: int
    block_ids: Ids
    block_tokens: int | Ids | None = None
    session: int = -1
    calls_tool: bool = False


Source: TypeAlias = str | Path | Iterable[Request | Mapping[str, Any]]


def read_requests(source: Source) -> Iterator[Request]:
    """Yield the requests of a file of any form above, or of an iterable of Requests or public records, one at a time.

    Raises BadInput with the file and the line (or the record's number) for a record that is malformed, incomplete or of
    an unknown form, after the requests before it were yielded.
    """
    if not isinstance(source, str | Path):
        try:
            records = iter(source)
        except TypeError:
            raise BadInput(f"a trace is a path or an iterable of records, got {type(source).__name__}") from None
        yield from _numbered(records, public, "record")
        return
    path = Path(source)
    if not path.is_file():
        raise BadInput(f"no trace at {str(path)!r}; give a file: {KNOWN}")
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        raw: Any = gzip.GzipFile(fileobj=file) if packed else file
        with io.TextIOWrapper(raw, encoding="utf-8", errors="replace") as lines:
            yield from _numbered(lines, _of_lines, f"{path}, line")


def _numbered(
    items: Iterator[Any], parse: Callable[[Iterator[Any]], Iterator[Request]], where: str
) -> Iterator[Request]:
    """Yield from ``parse(items)``. An error is raised as BadInput with ``where`` and the number of its item, counted
    from 1."""
    number = 0

    def counted() -> Iterator[Any]:
        nonlocal number
        for number, item in enumerate(items, 1):  # noqa: B007  the errors below name the number
            yield item

    try:
        yield from parse(counted())
    except (OSError, EOFError, zlib.error) as error:  # a truncated or damaged gzip file
        raise BadInput(f"{where} {number + 1}: {error}") from None
    except (ValueError, OverflowError) as error:
        said = {name: getattr(error, name, None) for name in ("needed", "available", "hint")}
        raise BadInput(f"{where} {max(number, 1)}: {error}", **said) from None


def _of_lines(lines: Iterator[str]) -> Iterator[Request]:
    """Return the requests of a file, whose first line tells the form. Empty lines after it are ignored. Raises
    BadInput."""
    first = next(lines, "")
    if not first.strip():
        raise BadInput(f"{'the first line' if first else 'the file'} is empty; known forms: {KNOWN}")
    rest = (line for line in lines if line.strip())
    if first.strip() == LENGTHS_HEADER:
        return lengths(rest)
    if not first.startswith("{"):
        raise BadInput(f"no trace of a known form: it begins with {first.strip()[:40]!r}; known: {KNOWN}")
    header, records = _object(first), map(_object, rest)
    form = header.get("format")
    if form is None:
        return public(chain([header], records))
    if form == "weka-rle-v1":
        return run_length(records, _count(header, "block_size", least=1))
    if form == "lcp-v1":
        return common_prefix(records)
    raise BadInput(f"unknown format {form!r}; known: {KNOWN}")


def public(records: Iterable[Any]) -> Iterator[Request]:
    """Yield the requests of records of the public or the grouped form; a Request is yielded unchanged. Raises BadInput,
    which names the field."""
    arrival, numbers = 0.0, _Numbers()
    for record in records:
        if isinstance(record, Request):
            yield record
            continue
        if not isinstance(record, Mapping):
            raise BadInput(f"a request is an object with 'hash_ids', got {type(record).__name__}")
        given = _field(record, "hash_ids")
        if (time := record.get("timestamp")) is not None:
            arrival = _seconds(record, "timestamp") / (1 if isinstance(time, str) else 1000)
        if isinstance(given, Mapping):
            length = _count(record, "input_length")
            ids = numbers.of([f"{group}:{member}" for group, members in given.items() for member in _listed(members)])
            # the same weights as in kvcache-ai's simulator: rounded half up, and at most a block
            each = max(1, min(GROUPED_BLOCK, (2 * length + len(ids)) // (2 * max(1, len(ids)))))
            tokens: int | Ids | None = np.full(len(ids), each)
        else:
            ids = numbers.of(given)
            tokens = _block_tokens(record, len(ids))
        outputs = _count(record, "output_length") if "output_length" in record else 0
        yield Request(arrival, _count(record, "input_length"), outputs, ids, tokens)


class _Numbers:
    """Gives the ids of one trace as whole numbers: numbers stay as they are, texts are numbered from 0."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}
        self._had_numbers = False

    def of(self, ids: Any) -> Ids:
        """Return the chain ``ids`` as int64 ``[n]``. Raises BadInput."""
        if isinstance(ids, np.ndarray):
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise BadInput(f"'hash_ids' must be one row of whole numbers, got {ids.dtype} of shape {ids.shape}")
            ids = ids.tolist()
        kinds = set(map(type, ids)) if isinstance(ids, list | tuple) else {object}
        if kinds == {str}:
            number = self._texts.setdefault
            ids = [number(text, len(self._texts)) for text in ids]
        elif kinds <= {int}:
            self._had_numbers |= bool(ids)
        else:
            raise BadInput("'hash_ids' must be a list of whole numbers, or of texts")
        if self._had_numbers and self._texts:
            raise BadInput("'hash_ids' are whole numbers in some records and texts in others")
        if ids and not (min(ids) >= -(2**63) and max(ids) < 2**63):
            raise BadInput("'hash_ids' must fit in 64 bits with a sign")
        return np.array(ids, np.int64)


def _listed(members: Any) -> list[Any]:
    """Return the ids of a group. Raises BadInput unless they are a list of whole numbers and texts."""
    if not isinstance(members, list) or not set(map(type, members)) <= {int, str}:
        raise BadInput("each group of 'hash_ids' must be a list of whole numbers or texts")
    return members


def _block_tokens(record: Mapping[str, Any], num_ids: int) -> int | Ids | None:
    """Return the tokens per id that a record gives: one number, int64 ``[num_ids]``, or None. Raises BadInput."""
    tokens = record.get("block_tokens")
    if tokens is None:
        return None if record.get("block_size") is None else _count(record, "block_size", least=1)
    if not isinstance(tokens, list) or len(tokens) != num_ids:
        raise BadInput(f"'block_tokens' must be a list of {num_ids} whole numbers, one for each id")
    if not set(map(type, tokens)) <= {int} or any(not 1 <= value < 2**31 for value in tokens):
        raise BadInput("'block_tokens' must be whole numbers from 1 to 2^31 - 1")
    return np.array(tokens, np.int64)


def run_length(records: Iterable[dict[str, Any]], block_size: int) -> Iterator[Request]:
    """Yield the requests of the run length form, with different ids in different conversations. Raises BadInput."""
    first = fresh = session = 0  # first id of this conversation, and of the next one
    for record in records:
        if "conv" in record or "format" in record:
            first, session = fresh, session + 1
            continue
        runs, tokens = _field(record, "r"), _count(record, "in")
        if not isinstance(runs, list) or len(runs) % 2 or not set(map(type, runs)) <= {int}:
            raise BadInput("'r' must be a list of whole numbers in pairs: first id, count")
        if any(not 0 <= value < 2**31 for value in runs):
            raise BadInput("'r' holds a number below 0 or above 2^31 - 1")
        if sum(runs[1::2]) * block_size >= tokens + block_size:
            raise BadInput(f"'r' names {sum(runs[1::2])} blocks of {block_size} tokens, 'in' is {tokens}")
        spans = [np.arange(begin, begin + count) for begin, count in zip(runs[::2], runs[1::2])]
        ids = np.concatenate([np.empty(0, np.int64), *spans]) + first
        fresh = max(fresh, int(ids.max(initial=-1)) + 1)
        is_tool = record.get("sp", "end_turn") != "end_turn"
        yield Request(_seconds(record, "t"), tokens, _count(record, "out"), ids, block_size, session, is_tool)


def common_prefix(records: Iterable[dict[str, Any]]) -> Iterator[Request]:
    """Yield the requests of the lcp form: each prompt has the blocks that it shares with an earlier prompt, and new
    blocks after them. Raises BadInput."""
    prompts: list[tuple[int, Ids]] = []
    fresh = 0
    for record in records:
        length, common, parent = _count(record, "n"), _count(record, "l"), _count(record, "p", least=-1)
        earlier, ids = prompts[parent] if 0 <= parent < len(prompts) else (0, np.empty(0, np.int64))
        if parent >= len(prompts) or common > min(length, earlier):
            raise BadInput(
                f"prompt {len(prompts)} of {length} bytes cannot share {common} bytes with prompt {parent}"
                + (f" of {earlier}" if parent < len(prompts) else ", which comes later")
            )
        shared = ids[: common // LCP_BLOCK]
        num_own = length // LCP_BLOCK - len(shared)
        prompts.append((length, np.concatenate([shared, np.arange(fresh, fresh + num_own)])))
        fresh += num_own
        yield Request(_seconds(record, "t"), length, _count(record, "o"), prompts[-1][1], LCP_BLOCK)


def lengths(lines: Iterable[str]) -> Iterator[Request]:
    """Yield the requests of the lengths form; the first one arrives at time 0. Raises BadInput."""
    origin: np.datetime64 | None = None
    for line in map(str.strip, lines):
        if LENGTHS_LINE.fullmatch(line) is None:
            raise BadInput(f"expected time, tokens in, tokens out; got {line[:60]!r}")
        time, tokens_in, tokens_out = line.split(",")
        now = np.datetime64(time, "ns")
        origin = now if origin is None else origin
        arrival = float((now - origin) / np.timedelta64(1, "s"))
        yield Request(arrival, int(tokens_in), int(tokens_out), np.empty(0, np.int64))


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
        names, hint = tuple(map(str, record)), did_you_mean(name, map(str, record))
        text = f"no field {name!r}; the fields are {', '.join(names) or 'none'}" + (f"; {hint}" if hint else "")
        raise BadInput(text, needed=name, available=names, hint=hint)
    return record[name]


def _count(record: Mapping[str, Any], name: str, least: int = 0) -> int:
    return whole_number(_field(record, name), repr(name), least, below=2**31)


def _seconds(record: Mapping[str, Any], name: str) -> float:
    value = _field(record, name)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise BadInput(f"{name!r} must be a finite number, or a text of one, got {value!r}", needed=value)
    return number
