"""What is installed: the version, the commit, and the extras."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import kvpagoda
from kvpagoda.loading import read_json

COMMIT = Path(__file__).with_name("commit.txt")
"""Written by ``setup.py`` into the wheels and source distributions that are built in a git checkout."""


class Installed(NamedTuple):
    """``commit``: see ``commit``. ``extras``: names of the extras whose packages are all installed, sorted."""

    version: str
    commit: str | None
    extras: list[str]

    def __str__(self) -> str:
        made_of = f" (commit {self.commit})" if self.commit else ""
        return f"kvpagoda {self.version}{made_of}\nextras installed: {', '.join(self.extras) or 'none'}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, for JSON."""
        return self._asdict()


def installed() -> Installed:
    """Find out what is installed. It imports none of the optional packages."""
    return Installed(kvpagoda.__version__, commit(), extras())


def commit(root: Path = Path(__file__).parents[2]) -> str | None:
    """Return the commit that the package is made from; None if it is not known.

    If ``root`` is a git checkout of this project, the commit that is checked out, followed by "-dirty" if files were
    changed. Else the commit that was checked out when the package was built.
    """
    with suppress(OSError, subprocess.SubprocessError):
        if (root / ".git").exists() and (root / "src" / "kvpagoda" / "version.py").samefile(__file__):
            command = ["git", "-C", str(root), "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=12"]
            done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, timeout=5, check=True)
            return done.stdout.strip() or None
    with suppress(OSError):
        return COMMIT.read_text().strip() or None
    return None


def extras() -> list[str]:
    """Return the names of the extras whose own packages are all installed."""
    packages: dict[str, list[str]] = {}
    for package, (extra, _) in read_json("kvpagoda", "extras.json")["extras"].items():
        packages.setdefault(extra, []).append(package.partition(".")[0])
    return sorted(extra for extra, needed in packages.items() if all(map(_is_there, needed)))


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a module in sys.modules without a spec
        return True
