"""Readers of published traces, plain or gzip. ``docs/replay.md`` has the table of forms.

``requests`` has the forms with a request on each line, ``sessions`` those of conversations, texts and benchmarks;
``files`` tells a form by its first line, and reads the lines.
"""

from kvpagoda.replay.readers.files import Lines, OnBad, Source, placed, read_requests
from kvpagoda.replay.readers.records import Ids, Request

__all__ = ["Ids", "Lines", "OnBad", "Request", "Source", "placed", "read_requests"]
