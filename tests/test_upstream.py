"""Names of other packages that we build upon though they may change: a newer version that lost one is named here."""

from __future__ import annotations

import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import kvpagoda
from kvpagoda.doctor import examine
from kvpagoda.upstream import FOLLOWED, lost

SRC = Path(kvpagoda.__file__).parent


@pytest.mark.parametrize("package", FOLLOWED)
def test_the_installed_version_has_every_name(package: str) -> None:
    pytest.importorskip(package)
    files = FOLLOWED[package]["where"]
    assert not lost(package), f"{package} {version(package)} moved: {files} use what it lost"


@pytest.mark.parametrize("package", FOLLOWED)
def test_the_files_use_these_names(package: str) -> None:
    text = "".join((SRC / file).read_text() for file in FOLLOWED[package]["where"].split(", "))
    unused = [name for name in FOLLOWED[package]["names"] if name.partition(":")[2].split(".")[-1] not in text]
    assert not unused


def test_doctor_says_what_a_newer_version_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("redis") is None:
        pytest.skip("redis is not installed")
    monkeypatch.setitem(sys.modules, "redis._parsers", ModuleType("redis._parsers"))
    finding = next(one for one in examine() if one.name == "redis")
    assert finding.state == "broken" and "redis._parsers:_RESP2Parser.on_connect" in finding.detail


def test_a_package_that_we_do_not_follow_lost_nothing() -> None:
    assert lost("numpy") == []
