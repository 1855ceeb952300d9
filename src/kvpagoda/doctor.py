"""What of the library works on this machine: every part is tried, none is taken for granted."""

from __future__ import annotations

import importlib
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import numpy as np
import torch

from kvpagoda.errors import CheckFailed
from kvpagoda.kv_cache import KVCache
from kvpagoda.loading import read_json
from kvpagoda.schema import Attention, Layer, Schema
from kvpagoda.tiers import RecordBuffer, Status, Tier, TierSpec, disk_tier, tier_from_text
from kvpagoda.units import format_bytes

EXTRAS: dict[str, list[str]] = read_json("kvpagoda", "extras.json")["extras"]
"""Packages that are not needed by the core: the extra that brings each, and what it is for."""
_RECORDS, _PAYLOAD = 4, 1 << 20
_distributions = cache(packages_distributions)  # it reads the files of everything that is installed


class _Absent(Exception):
    """An extra that is not installed."""


@dataclass(frozen=True)
class Finding:
    """``state``: "ok", "absent" for an extra or a GPU that is not there, or "broken"."""

    name: str
    state: Literal["ok", "absent", "broken"]
    detail: str

    def to_dict(self) -> dict[str, str]:
        """The same as plain data."""
        return asdict(self)


def examine(tiers: Sequence[str] = ()) -> Iterator[Finding]:
    """Try the core on every device, what is optional, and ``tiers``, written as for ``tier_from_text``; one after the other.

    A tier of a file is tried in a folder of its own with at most 64 MiB, inside the one that is named or, where there is none
    yet, inside the next one above; it is removed. Records in a shared store are dropped again. Raises BadInput for a tier that
    is not written like one, before anything.
    """
    specs = [(text, tier_from_text(text)) for text in tiers]
    yield Finding("python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    yield Finding("kvpagoda", "ok", f"{version('kvpagoda')}, torch {torch.__version__}, numpy {np.__version__}")
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    for device in devices:
        yield _tried(f"cache on {device}", _serve, torch.device(device))
    if len(devices) == 1:
        yield Finding("gpu", "absent", f"{_no_gpu()}; caches are on the CPU")
    for name, (extra, purpose) in EXTRAS.items():
        yield (package := _tried(name, _import, name, extra, purpose))
        if name == "xxhash" and package.state == "ok":
            yield _tried("file", _try_file)
    for text, spec in specs:
        yield _tried(text, _try_tier, text, spec)


def _tried(name: str, what: Callable[..., str], *arguments: Any) -> Finding:
    """What ``what(*arguments)`` says, or how it failed."""
    try:
        return Finding(name, "ok", what(*arguments))
    except _Absent as error:
        return Finding(name, "absent", str(error))
    except Exception as error:  # whatever it is, a person wants to know, and the rest is tried too
        return Finding(name, "broken", " ".join(f"{type(error).__name__}: {error}".split()))


def _no_gpu() -> str:
    """Why torch sees none."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} is built without CUDA and ROCm: install the one for your GPU, if there is one"
        )
    return f"torch {torch.__version__} finds no device: see nvidia-smi or rocm-smi, and CUDA_VISIBLE_DEVICES"


def _import(name: str, extra: str, purpose: str) -> str:
    """A package may lie there and not work."""
    top = name.partition(".")[0]
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in (name, top):
            raise _Absent(f"{purpose}: pip install 'kvpagoda[{extra}]'") from None
        raise
    packages = _distributions().get(top)
    return f"{purpose} ({version(packages[0]) if packages else 'of unknown version'})"


def _serve(device: torch.device) -> str:
    """Write a request, let a second one find it, suspend and resume it, and compare the rows of both."""
    schema = Schema((Layer(0, "full_attention", (Attention(2, 8, 8, "float32"),)),))
    tokens = np.arange(10, dtype=np.int32)
    with closing(KVCache(schema, num_blocks=16, block_size=4, max_requests=2, device=device, poison=True)) as cache:
        first = cache.open(tokens)
        view = cache.batch([first], [len(tokens)]).layer(0)
        rows = torch.arange(len(tokens) * 16, dtype=torch.float32, device=device).reshape(len(tokens), 2, 8)
        places = view.slot_mapping.long()
        view["k"][places // 4, places % 4] = rows
        first.commit(tokens)
        second = cache.open(tokens)
        if second.cached_tokens != 8:
            raise CheckFailed(f"of the same {len(tokens)} tokens {second.cached_tokens} were found, 8 should be")
        first.suspend()
        first.resume()
        cache.check()
        for number, sequence in enumerate((first, second)):
            sequence.extend(1)
            view = cache.batch([sequence], [1]).layer(0)
            found = view["k"][view.block_table[0, :3].long()].reshape(-1, 2, 8)[: sequence.length]
            if not torch.equal(found, rows[: sequence.length]):
                raise CheckFailed(f"request {number} reads other rows than were written")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores"
    return f"{name}: written, shared, suspended and resumed, every row as it was"


def _try_tier(text: str, spec: TierSpec) -> str:
    if spec.name != "disk":
        return _store_and_load(spec)
    named = Path(text.removeprefix("disk:").rpartition(":")[0])
    return _try_file(next(folder for folder in (named, *named.parents) if folder.exists()))


def _try_file(folder: Path | None = None) -> str:
    with tempfile.TemporaryDirectory(prefix="kvpagoda-doctor-", dir=folder) as inside:
        return _store_and_load(disk_tier(inside, "64MiB"))


def _store_and_load(spec: TierSpec) -> str:
    """Records of random bytes are stored, read back, compared and dropped."""
    buffer = RecordBuffer(2 * _RECORDS, _PAYLOAD)
    source, target = buffer.acquire(_RECORDS), buffer.acquire(_RECORDS)
    buffer.payloads[source] = np.random.default_rng().integers(0, 256, (_RECORDS, _PAYLOAD), np.uint8)
    keys = [os.urandom(32) for _ in source]
    driver = spec.make(buffer)
    tier = Tier(driver, buffer, os.urandom(32), workers=spec.workers)
    wait = 5 * spec.timeout
    try:
        took = []
        for call, rows in ((tier.store, source), (tier.load, target)):
            begin = monotonic()
            told = call(keys, rows, begin + wait).result()
            took.append(1e3 * (monotonic() - begin) / _RECORDS)
            if any(status is not Status.OK for status in told):
                why = tier.stats().last_error or getattr(driver, "last_error", "")
                raise CheckFailed(f"{call.__name__} says {', '.join(sorted({status.value for status in told}))}: {why}")
        if not np.array_equal(buffer.payloads[target], buffer.payloads[source]):
            raise CheckFailed("what was read is not what was stored")
    finally:
        tier.discard(keys, monotonic() + wait).result()
        tier.close(monotonic() + wait)
    return (
        f"{_RECORDS} records of {format_bytes(_PAYLOAD)} stored in {took[0]:.1f} ms each, read back in {took[1]:.1f} ms"
    )
