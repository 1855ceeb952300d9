"""What ``make test`` leaves to ``make long`` is there, and something of the same kind stays in ``make test``."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from pathlib import Path

import pytest

import parts
from parts import LONG, QUICK

TESTS = Path(__file__).parent


@cache
def functions(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((TESTS / file).read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", sorted({*QUICK, *LONG, *LONG.values()}))
def test_each_test_that_is_named_exists(name: str) -> None:
    file, _, function = name.partition("::")
    assert function in functions(file)


def test_each_test_keeps_a_case_or_has_a_smaller_one() -> None:
    assert all(QUICK.values()) and not {*QUICK} & {*LONG}
    assert not {*LONG} & {*LONG.values()}


class Case:
    """The part of a pytest item that ``mark_long`` uses."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self.marks = nodeid, [*marks]

    def iter_markers(self, name: str) -> list[str]:
        return [mark for mark in self.marks if mark == name]

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)


def test_cases_are_long_by_number_by_words_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "QUICK", {"a.py::test_number": 2, "b/a.py::test_words": ("b-", "d]")})
    monkeypatch.setattr(parts, "LONG", {"a.py::test_whole": "a.py::test_number"})
    cases = [Case("tests/a.py::test_number[5]", "slow"), Case("tests/a.py::test_number[6]", "gpu")]
    cases += [Case(f"tests/a.py::test_number[{i}]") for i in range(4)]
    cases += [Case(f"tests/b/a.py::test_words[{word}]") for word in ("a-d", "b-1", "b", "da")]
    cases += [Case("tests/a.py::test_whole"), Case("tests/a.py::test_number_and_more"), Case("tests/c.py::test_whole")]
    parts.mark_long(cases)  # type: ignore[arg-type]
    long = [case.nodeid.partition("::")[2] for case in cases if "long" in case.marks]
    assert long == ["test_number[1]", "test_number[3]", "test_words[b]", "test_words[da]", "test_whole"]


def test_a_test_that_would_begin_too_late_is_skipped() -> None:
    parts.skip_after(3600)
    with pytest.raises(pytest.skip.Exception, match="not run: the 0 seconds of --seconds are over"):
        parts.skip_after(0)


def test_what_was_committed_last_comes_first() -> None:
    command = ["git", "log", "--format=", "--name-only", "--", "tests"]
    told = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False).stdout.split()
    if not told:
        pytest.skip("not a git repository")
    newest, oldest = told[0], [*dict.fromkeys(told)][-1]
    cases = [Case(f"{name}::test") for name in (oldest, newest, "tests/never_committed.py")]
    parts.newest_first(cases)  # type: ignore[arg-type]
    assert [case.nodeid for case in cases] == [f"{name}::test" for name in ("tests/never_committed.py", newest, oldest)]
