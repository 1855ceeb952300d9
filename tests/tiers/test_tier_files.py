"""What tiers have left in a folder: it is shown as it is, and deleted only if nobody uses it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from kvpagoda.errors import BadInput
from kvpagoda.pages import PAGE
from kvpagoda.tiers import RecordBuffer, disk_driver
from kvpagoda.tiers.disk import _SUPERBLOCK, FILE_NAME, TierFile, delete_tier_files, tier_files
from kvpagoda.tiers.records import pack_record, xxh3_128
from raises import raises

SIZE = RecordBuffer.nbytes_for(1, 9000)


def fill(folder: Path, count: int) -> Any:
    """Return an open driver in ``folder`` that has stored ``count`` records."""
    buffer = RecordBuffer(count, 9000)
    driver = disk_driver(folder, buffer, PAGE + 8 * SIZE)
    keys = [bytes([i]) * 32 for i in range(count)]
    for row, key in zip(buffer.acquire(count), keys):
        pack_record(buffer.rows[row], key, bytes(32))
    assert all(status.value == "ok" for status in driver.store(keys, range(count), monotonic() + 5))
    return driver


def test_files_of_all_engines_and_ranks_are_shown_and_deleted(tmp_path: Path) -> None:
    first, second = fill(tmp_path, 3), fill(tmp_path / "rank1", 5)
    (tmp_path / "notes.txt").write_text("kept")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / FILE_NAME).write_bytes(b"something else")
    os.chmod(tmp_path / "other" / FILE_NAME, 0o600)
    for nbytes in (1, PAGE + 1, 2**64 - 1):  # no slots of a tier
        (tmp_path / str(nbytes)).mkdir()
        start = _SUPERBLOCK.pack(b"KVPGSLAB", 1, PAGE, nbytes)
        (tmp_path / str(nbytes) / FILE_NAME).write_bytes(start + xxh3_128(start) + bytes(2 * PAGE))
    files = {file.path: file for file in tier_files(tmp_path)}
    assert {files[tmp_path / name / FILE_NAME].record_nbytes for name in ("1", str(PAGE + 1), str(2**64 - 1))} == {0}
    nbytes = PAGE + 8 * SIZE
    assert files[tmp_path / FILE_NAME] == TierFile(tmp_path / FILE_NAME, nbytes, 3, SIZE, True)
    assert files[tmp_path / "rank1" / FILE_NAME].num_records == 5
    assert files[tmp_path / "other" / FILE_NAME].record_nbytes == 0
    first.close()
    with raises(BadInput, needed=[str(tmp_path / "rank1" / "records.slab")]):
        delete_tier_files(tmp_path)
    assert (tmp_path / FILE_NAME).exists(), "nothing is deleted if one is in use"
    second.close()
    assert not any(file.is_in_use for file in tier_files(tmp_path))
    assert delete_tier_files(tmp_path) >= 2 * nbytes - PAGE
    assert tier_files(tmp_path) == [] and (tmp_path / "notes.txt").read_text() == "kept"
    with raises(BadInput, needed=str(tmp_path / "none")):
        tier_files(tmp_path / "none")


def test_the_command(tmp_path: Path, here: Callable[..., Any]) -> None:
    driver = fill(tmp_path, 2)
    shown = here("tier", str(tmp_path))
    assert "2 records of" in shown.stdout and "in use" in shown.stdout
    refused = here("tier", str(tmp_path), "--clean")
    assert refused.returncode == 2 and "stop it first" in refused.stderr
    driver.close()
    assert "deleted" in here("tier", str(tmp_path), "--clean").stdout
    assert "no disk tier in" in here("tier", str(tmp_path)).stdout
