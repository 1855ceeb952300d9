"""Forms in which each line is a request: with the ids of its blocks, or, in a table with commas, with lengths alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvpagoda.errors import BadLine, shown
from kvpagoda.replay.readers.records import (
    Ids,
    Numbers,
    RecordForm,
    Request,
    count,
    field,
    listed,
    named,
    object_in,
    seconds,
)

GROUPED_BLOCK = 512  # the most tokens that an id of the grouped form stands for
BAILIAN_BLOCK = 16  # tokens that an id of Bailian's traces stands for
TRACE_SCHEMA = "dynamo.request.trace.v1"
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
_AZURE_LINE = re.compile(r"[0-9]{4}-[0-9-]+[ T][0-9:.]+,[0-9]{1,9},[0-9]{1,9}")
_NAMES = BURST_HEADER.split(",")


class SessionNumbers(dict[str | int, int]):
    """Numbers the sessions of a trace from 0 by their names."""

    def number(self, record: Mapping[str, Any], name: str) -> int:
        """Return the number of the session that the field ``name`` names; -1 without the field. Raises BadLine."""
        value = record.get(name)
        if value is None:
            return -1
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise BadLine(f"{name!r} must be a text or a whole number, got {shown(value)}", field=name)
        return self.setdefault(value, len(self))


class Public:
    """Mooncake's form, which kvcache-simulator and vLLM's timed_trace read too: {"timestamp": ms, "input_length": ..,
    "output_length": .., "hash_ids": [..]}. Ids are whole numbers or texts. ``timestamp`` may be a text of seconds; a
    record without it arrives together with the record before it.

    Dynamo's: the names ``input_tokens``, ``output_tokens`` and ``created_time`` mean the same; ``session_id`` names the
    session. A record with ``delay`` or ``delay_ms`` (and ``tool_wait_ms``) in place of a timestamp arrives that many
    milliseconds after the record before it in its session: when that one was answered is not known.

    RAGPulse's: ``hash_ids`` is an object of lists, {"sys_prompt": [..], "history": [..], ..}. The chain is the ids of all
    groups in their order. An id has a meaning only inside its group. Each id stands for an equal share of the prompt.
    """

    def __init__(self) -> None:
        self._numbers, self._sessions = Numbers(), SessionNumbers()
        self._arrivals = {-1: 0.0}  # session -> when its last request arrived; -1: the last of all

    def __call__(self, record: Mapping[str, Any]) -> list[Request]:
        given = field(record, "hash_ids")
        is_grouped = isinstance(given, Mapping)
        ids = self._numbers.of(_grouped(given) if is_grouped else given)
        length = count(record, named(record, "input_length", "input_tokens"))
        outputs = named(record, "output_length", "output_tokens")
        num_outputs = count(record, outputs) if outputs in record else 0
        # the same weights as in kvcache-ai's simulator: rounded half up, and at most a block
        each = max(1, min(GROUPED_BLOCK, (2 * length + len(ids)) // (2 * max(1, len(ids)))))
        tokens = np.full(len(ids), each) if is_grouped else _block_tokens(record, len(ids))
        session = self._sessions.number(record, "session_id")
        arrival = self._arrives(record, session)
        self._arrivals[session] = self._arrivals[-1] = arrival
        return [Request(arrival, length, num_outputs, ids, tokens, session)]

    def _arrives(self, record: Mapping[str, Any], session: int) -> float:
        name = named(record, "timestamp", "created_time")
        if (time := record.get(name)) is not None:
            return seconds(record, name) / (1 if isinstance(time, str) else 1000)
        name = named(record, "delay", "delay_ms")
        if session < 0 or record.get(name) is None:
            return self._arrivals[-1]
        waits = seconds(record, name) + (seconds(record, "tool_wait_ms") if "tool_wait_ms" in record else 0.0)
        return self._arrivals.get(session, self._arrivals[-1]) + waits / 1000


def _grouped(groups: Mapping[str, Any]) -> list[str]:
    """Return the ids of all groups, each with the name of its group. Raises BadLine unless each group is a list of whole
    numbers and texts."""
    for members in groups.values():
        if not isinstance(members, list) or not set(map(type, members)) <= {int, str}:
            raise BadLine("each group of 'hash_ids' must be a list of whole numbers or texts", field="hash_ids")
    return [f"{group}:{member}" for group, members in groups.items() for member in members]


def _block_tokens(record: Mapping[str, Any], num_ids: int) -> int | Ids | None:
    """Return the tokens per id that a record gives: one number, int64 ``[num_ids]``, or None. Raises BadLine."""
    tokens, name = record.get("block_tokens"), "block_tokens"
    if tokens is None:
        return None if record.get("block_size") is None else count(record, "block_size", least=1)
    if not isinstance(tokens, list) or len(tokens) != num_ids:
        raise BadLine(f"'block_tokens' must be a list of {num_ids} whole numbers, one for each id", field=name)
    if not set(map(type, tokens)) <= {int} or any(not 1 <= value < 2**31 for value in tokens):
        raise BadLine("'block_tokens' must be whole numbers from 1 to 2^31 - 1", field=name)
    return np.array(tokens, np.int64)


class Bailian:
    """The form of Alibaba's Qwen-Bailian traces: {"chat_id": .., "parent_chat_id": .., "timestamp": s, "input_length": ..,
    "output_length": .., "type": .., "turn": .., "hash_ids": [..]}, 16 tokens for each id. ``parent_chat_id`` is -1 for
    the first turn; a request belongs to the session of its parent."""

    def __init__(self) -> None:
        self._numbers = Numbers()
        self._sessions: dict[int, int] = {}  # chat -> session
        self._num_sessions = 0

    def __call__(self, record: Mapping[str, Any]) -> list[Request]:
        chat, parent = count(record, "chat_id"), count(record, "parent_chat_id", least=-1)
        size = count(record, "block_size", least=1) if "block_size" in record else BAILIAN_BLOCK
        length, outputs = count(record, "input_length"), count(record, "output_length")
        arrival, ids = seconds(record, "timestamp"), self._numbers.of(field(record, "hash_ids"))
        session = self._sessions.get(parent, self._num_sessions)
        self._num_sessions = max(self._num_sessions, session + 1)
        self._sessions[chat] = session
        return [Request(arrival, length, outputs, ids, size, session)]


class LookupLog:
    """The log that LMCache's server writes with --lookup-hash-log-dir: {"timestamp": Unix seconds, "request_id": ..,
    "model_name": .., "chunk_size": .., "seq_len": .., "chunk_hashes": ["0x..", ..], ..}. Only whole chunks have a hash.
    The chunks of one model are not those of another. Answers are not logged."""

    def __init__(self) -> None:
        self._numbers = Numbers()
        self._origin: float | None = None

    def __call__(self, record: Mapping[str, Any]) -> list[Request]:
        size, length, now = count(record, "chunk_size", least=1), count(record, "seq_len"), seconds(record, "timestamp")
        hashes, model = listed(record, "chunk_hashes", str), record.get("model_name", "")
        if len(hashes) * size > length:
            text = f"'chunk_hashes' names {len(hashes)} chunks of {size} tokens, 'seq_len' is {length}"
            raise BadLine(text, field="chunk_hashes")
        ids = self._numbers.of([f"{model}:{text}" for text in hashes], "chunk_hashes")
        self._origin = now if self._origin is None else self._origin
        return [Request(now - self._origin, length, 0, ids, size)]


class DynamoTrace:
    """The request trace that Dynamo writes with DYN_REQUEST_TRACE, lines of schema "dynamo.request.trace.v1", alone or
    as the ``event`` of an envelope. A request is a line of type "request_end" whose ``request`` has ``replay`` with
    ``trace_block_size``, ``input_length`` and ``input_sequence_hashes``; other types are passed over."""

    def __init__(self) -> None:
        self._numbers, self._sessions = Numbers(), SessionNumbers()
        self._origin: float | None = None

    def __call__(self, record: Mapping[str, Any]) -> list[Request]:
        event = object_in(record, "event") if "event" in record and "schema" not in record else record
        if event.get("schema") != TRACE_SCHEMA:
            raise BadLine(f"'schema' must be {TRACE_SCHEMA!r}, got {shown(event.get('schema'))}", field="schema")
        if field(event, "event_type") != "request_end":
            return []
        request = object_in(event, "request")
        blocks = object_in(request, "replay")
        size, length = count(blocks, "trace_block_size", least=1), count(blocks, "input_length")
        now, outputs = seconds(request, "request_received_ms") / 1000, count(request, "output_tokens")
        context = object_in(event, "agent_context") if event.get("agent_context") is not None else {}
        session = self._sessions.number(context, "session_id")
        ended = request.get("finish_reason_metadata")
        ids = self._numbers.of(field(blocks, "input_sequence_hashes"), "input_sequence_hashes")
        if len(ids) != -(-length // size):
            text = f"{length} tokens in blocks of {size} need {-(-length // size)} hashes, got {len(ids)}"
            raise BadLine(text, field="input_sequence_hashes")
        self._origin = now if self._origin is None else self._origin
        calls_tool = isinstance(ended, Mapping) and bool(ended.get("tool_calls"))
        return [Request(now - self._origin, length, outputs, ids, size, session, calls_tool)]


class Azure:
    """Azure's traces: lines such as 2023-11-16 18:17:03.9799600,4808,10. The first request arrives at time 0."""

    def __init__(self) -> None:
        self._origin: np.datetime64 | None = None

    def __call__(self, line: str) -> list[Request]:
        if _AZURE_LINE.fullmatch(line) is None:
            raise BadLine(f"expected time, tokens in, tokens out; got {line[:60]!r}", field="TIMESTAMP")
        time, tokens_in, tokens_out = line.split(",")
        try:
            now = np.datetime64(time, "ns")
        except ValueError as error:
            raise BadLine(f"'TIMESTAMP' is no time: {error}", field="TIMESTAMP") from None
        self._origin = now if self._origin is None else self._origin
        arrival = float((now - self._origin) / np.timedelta64(1, "s"))
        return [Request(arrival, int(tokens_in), int(tokens_out), np.empty(0, np.int64))]


class BurstGPT:
    """BurstGPT's table, a data set of vLLM's bench: seconds, model, tokens in, tokens out, their sum, kind."""

    def __call__(self, line: str) -> list[Request]:
        cells = line.split(",")
        if len(cells) != len(_NAMES):
            raise BadLine(f"expected {len(_NAMES)} columns, got {line[:60]!r}", field=_NAMES[0])
        row: dict[str, object] = dict(zip(_NAMES, cells))
        lengths = {name: _number(row, name) for name in _NAMES[2:4]}
        inputs, outputs = (count(lengths, name) for name in _NAMES[2:4])
        return [Request(seconds(row, _NAMES[0]), inputs, outputs, np.empty(0, np.int64))]


def _number(row: Mapping[str, object], name: str) -> object:
    """Return a cell as a number if it is one: "12" -> 12, and pandas' "12.0" too."""
    text = str(row[name]).removesuffix(".0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else row[name]


TABLES: dict[str, type[RecordForm]] = {AZURE_HEADER: Azure, BURST_HEADER: BurstGPT}
"""Header -> the form of the lines below it."""
