"""The programs in the documents run, and print what the documents say they print."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.DOTALL)
PROGRAMS = [
    pytest.param(code, expected, id=f"{name}-{number}")
    for name in ("README.md", "docs/adapters.md", "docs/events.md", "docs/layouts.md")
    for number, (code, expected) in enumerate(BLOCK.findall((ROOT / name).read_text()))
]


@pytest.mark.parametrize(("code", "expected"), PROGRAMS)
def test_documented_programs_run(code: str, expected: str) -> None:
    if "kvpagoda.hf" in code:
        pytest.importorskip("transformers")
    if "kvpagoda.events" in code:
        pytest.importorskip("msgspec")
        pytest.importorskip("zmq")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "document", "exec"), {})
    assert out.getvalue() == expected


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 2
