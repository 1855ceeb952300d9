"""Writes the commit into what is built in a git checkout, so that an installed package can say where it comes from.

All settings are in ``pyproject.toml``.
"""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "src"))

from kvpagoda.version import commit  # noqa: E402


def write_commit(package: Path) -> None:
    """Write the commit into the folder ``package`` that is being built; a source distribution has it already."""
    file, made_of = package / "commit.txt", commit(ROOT)
    file.unlink(missing_ok=True)
    if made_of is not None:
        file.write_text(f"{made_of}\n")


class BuildWithCommit(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_commit(Path(self.build_lib) / "kvpagoda")


class SdistWithCommit(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir) / "src" / "kvpagoda")


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit})
