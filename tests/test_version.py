"""What is said to be installed is what is installed, and asking never fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kvpagoda
from kvpagoda import version
from kvpagoda.version import Installed, commit, extras, installed

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git checkout with one commit, in which the module ``version`` seems to lie."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    file = tmp_path / "src" / "kvpagoda" / "version.py"
    file.parent.mkdir(parents=True)
    shutil.copy(version.__file__, file)
    monkeypatch.setattr(version, "__file__", str(file))
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "--no-verify", "-m", "all"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, capture_output=True)
    return tmp_path


def head(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout[:12]


def test_a_checkout_says_its_commit_and_whether_files_differ(checkout: Path) -> None:
    assert commit(checkout) == head(checkout)
    (checkout / "src" / "kvpagoda" / "version.py").write_text("changed")
    assert commit(checkout) == f"{head(checkout)}-dirty"


def test_another_repository_around_the_package_is_not_taken_for_its_own(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "COMMIT", tmp_path / "none.txt")
    (checkout / "src" / "kvpagoda" / "version.py").rename(checkout / "version.py")
    monkeypatch.setattr(version, "__file__", str(checkout / "version.py"))
    assert commit(checkout) is None


def test_a_built_package_says_what_was_written_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "COMMIT", tmp_path / "commit.txt")
    assert commit(tmp_path) is None
    (tmp_path / "commit.txt").write_text("0123456789ab\n")
    assert commit(tmp_path) == "0123456789ab"


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 5), subprocess.CalledProcessError(128, "git")],
)
def test_a_git_that_fails_is_no_error(
    error: Exception, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(version, "COMMIT", tmp_path / "none.txt")
    monkeypatch.setattr(version.subprocess, "run", fail)
    assert commit(checkout) is None


def test_an_extra_is_installed_when_all_of_its_packages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"xxhash", "msgspec", "typer", "rich"}
    monkeypatch.setattr(version, "find_spec", lambda name: name if name in there else None)
    assert extras() == ["cli", "disk"], "msgspec without zmq is not events"


def test_the_text_has_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = installed()
    assert found.version == kvpagoda.__version__ and "numpy" not in found.extras
    assert str(Installed("1.2.3", "abc", ["cli", "hf"])) == "kvpagoda 1.2.3 (commit abc)\nextras installed: cli, hf"
    assert str(Installed("1.2.3", None, [])) == "kvpagoda 1.2.3\nextras installed: none"
