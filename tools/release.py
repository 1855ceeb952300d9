"""Check that what is checked out may be released: that it is committed, and that its tag and CHANGELOG name its version.

    python tools/release.py

``make release`` runs this before it builds. Needs git and the standard library only.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def git(root: Path, *arguments: str) -> list[str]:
    """Return the lines that a git command prints in ``root``."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def version_of(root: Path) -> str:
    """Return ``kvpagoda.__version__`` of the checkout ``root``."""
    found = re.search(r'^__version__ = "(.+)"$', (root / "src/kvpagoda/__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def hindrances(root: Path) -> list[str]:
    """Return why the checkout ``root`` may not be released, each with the next step; [] if it may."""
    version, why = version_of(root), []
    dirty = git(root, "status", "--porcelain")
    if dirty:
        why.append(f"{len(dirty)} files are not committed ({dirty[0][3:]}, ..); commit or remove them")
    tags = [tag for tag in git(root, "tag", "--points-at", "HEAD") if tag.startswith("v")]
    if tags != [f"v{version}"]:
        named = " and ".join(tags) or "no version"
        why.append(f"the tags of this commit name {named}, kvpagoda.__version__ is {version}; git tag v{version}")
    if not re.search(
        rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE
    ):
        why.append(
            f'CHANGELOG.md has no heading "## {version} (YYYY-MM-DD)"; write it, and begin a new "## Unreleased" later'
        )
    return why


if __name__ == "__main__":
    for line in (found := hindrances(ROOT)):
        print(f"not to be released: {line}", file=sys.stderr)
    sys.exit(bool(found))
