"""Forms of tables with commas: arrivals and lengths, without ids, so that nothing can be looked up."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from kvpagoda.errors import BadLine
from kvpagoda.replay.readers.records import Form, Request, count, seconds

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
_AZURE_LINE = re.compile(r"[0-9]{4}-[0-9-]+[ T][0-9:.]+,[0-9]{1,9},[0-9]{1,9}")
_NAMES = BURST_HEADER.split(",")


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


TABLES: dict[str, type[Form]] = {AZURE_HEADER: Azure, BURST_HEADER: BurstGPT}
"""Header -> the form of the lines below it."""
