"""Tests which parts of the library work on this machine. Every part is run, none is assumed to work."""

from __future__ import annotations

import importlib
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, version
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import numpy as np
import torch

import kvpagoda
from kvpagoda import KVCache
from kvpagoda.bench_gpu.card import Card, no_gpu
from kvpagoda.bench_gpu.measure import short
from kvpagoda.errors import CheckFailed
from kvpagoda.loading import read_json
from kvpagoda.schema import Attention, Layer, Schema
from kvpagoda.tiers import RecordBuffer, Status, Tier, TierSpec, disk_tier, tier_from_text
from kvpagoda.units import format_bytes
from kvpagoda.upstream import FOLLOWED, lost

EXTRAS: dict[str, list[str]] = read_json("kvpagoda", "extras.json")["extras"]
"""Optional package -> the extra that installs it, and its purpose."""
_RECORDS, _PAYLOAD = 4, 1 << 20  # records to store in a tier, bytes of each
_distributions = cache(packages_distributions)  # it reads the files of all installed packages


class _Absent(Exception):
    """The package of an extra is not installed."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one test.

    ``state``: "ok", "absent" if an extra is not installed, this library is not installed as a package or there is no GPU, or
    "broken". ``detail``: one line for
    people.
    """

    name: str
    state: Literal["ok", "absent", "broken"]
    detail: str

    def to_dict(self) -> dict[str, str]:
        """Return the fields as plain data."""
        return asdict(self)


def examine(tiers: Sequence[str] = ()) -> Iterator[CheckResult]:
    """Test the core on every device, every optional package, and ``tiers``, one after the other; yield a finding for
    each. A GPU is named and measured for some seconds.

    ``tiers``: texts as ``tier_from_text`` reads them. A disk tier is tested with at most 64 MiB in a temporary folder,
    inside the named folder or, if that does not exist, inside its nearest existing parent; the temporary folder is
    removed. Test records in a shared store are dropped. Raises BadInput for a malformed tier, before the first test.
    """
    specs = [(text, tier_from_text(text)) for text in tiers]
    yield CheckResult("python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    yield CheckResult("kvpagoda", "ok", f"{kvpagoda.__version__}, torch {torch.__version__}, numpy {np.__version__}")
    yield _tried("package", _package)
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    for device in devices:
        yield _tried(f"cache on {device}", _serve, torch.device(device))
        if device != "cpu":
            yield _tried(f"gpu {device}", _measure_gpu, torch.device(device))
    if len(devices) == 1:
        yield CheckResult("gpu", "absent", f"{no_gpu()}; caches are on the CPU")
    for name, (extra, purpose) in EXTRAS.items():
        yield (package := _tried(name, _import, name, extra, purpose))
        if name == "xxhash" and package.state == "ok":
            yield _tried("file", _try_file)
    for text, spec in specs:
        yield _tried(text, _try_tier, text, spec)


def _tried(name: str, what: Callable[..., str], *arguments: Any) -> CheckResult:
    """Call ``what(*arguments)``, and return its text, or its error, as the finding ``name``."""
    try:
        return CheckResult(name, "ok", what(*arguments))
    except _Absent as error:
        return CheckResult(name, "absent", str(error))
    except Exception as error:  # any error is a finding, and the other tests still run
        return CheckResult(name, "broken", " ".join(f"{type(error).__name__}: {error}".split()))


def _package() -> str:
    """Say as what this library is installed. Raises _Absent if Python finds no package of it, or not its command."""
    why = "some tests then fail; pip install it, or -e . in a checkout"
    try:
        found = distribution("kvpagoda")
    except PackageNotFoundError:
        where = Path(kvpagoda.__file__).parent
        raise _Absent(f"imported from {where}, which is not installed as a package (no metadata): {why}") from None
    commands = [entry.name for entry in found.entry_points if entry.group == "console_scripts"]
    if "kvpagoda" not in commands:
        raise _Absent(f"the package of version {found.version} has no entry point, so no command kvpagoda: {why}")
    return f"installed as a package, version {found.version}, with the command kvpagoda"


def _measure_gpu(device: torch.device) -> str:
    """Name the card, and run the short form of ``kvpagoda bench gpu`` on it."""
    card = Card(device)
    facts = card.facts()
    memory, driver = format_bytes(int(str(facts["card_nbytes"]))), facts["driver"] or "unknown"
    return f"{card.name}, {memory}, driver {driver}: {short(card)} (kvpagoda bench gpu has more)"


def _import(name: str, extra: str, purpose: str) -> str:
    """Import module ``name``: an installed package may still not work. Raises _Absent if it is not installed."""
    top = name.partition(".")[0]
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in (name, top):
            raise _Absent(f"{purpose}: pip install 'kvpagoda[{extra}]'") from None
        raise
    if missing := lost(top):
        needs = f"{top} below {FOLLOWED[top]['below']}"
        raise ImportError(f"{top} {version(top)} has no {', '.join(missing)}: install {needs}, or a newer kvpagoda")
    packages = _distributions().get(top)
    return f"{purpose} ({version(packages[0]) if packages else 'of unknown version'})"


def _serve(device: torch.device) -> str:
    """Write the rows of a request, open a second one with the same tokens, suspend and resume the first, compare the
    rows."""
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
            raise CheckFailed(f"{second.cached_tokens} of the same {len(tokens)} tokens were found, expected 8")
        first.suspend()
        first.resume()
        cache.check()
        for number, sequence in enumerate((first, second)):
            sequence.extend(1)
            view = cache.batch([sequence], [1]).layer(0)
            found = view["k"][view.block_table[0, :3].long()].reshape(-1, 2, 8)[: sequence.length]
            if not torch.equal(found, rows[: sequence.length]):
                raise CheckFailed(f"request {number} reads rows that differ from those that were written")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores"
    return f"{name}: rows written, shared, suspended and resumed, and read back unchanged"


def _try_tier(text: str, spec: TierSpec) -> str:
    if spec.name != "disk":
        return _store_and_load(spec)
    named = Path(text.removeprefix("disk:").rpartition(":")[0])
    return _try_file(next(folder for folder in (named, *named.parents) if folder.exists()))


def _try_file(folder: Path | None = None) -> str:
    with tempfile.TemporaryDirectory(prefix="kvpagoda-doctor-", dir=folder) as inside:
        return _store_and_load(disk_tier(inside, "64MiB"))


def _store_and_load(spec: TierSpec) -> str:
    """Store records of random bytes in the tier of ``spec``, load them, compare and drop them. Raises CheckFailed."""
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
            done = call(keys, rows, begin + wait).result()
            took.append(1e3 * (monotonic() - begin) / _RECORDS)
            if any(status is not Status.OK for status in done):
                why = tier.stats().last_error or getattr(driver, "last_error", "")
                raise CheckFailed(f"{call.__name__} says {', '.join(sorted({status.value for status in done}))}: {why}")
        if not np.array_equal(buffer.payloads[target], buffer.payloads[source]):
            raise CheckFailed("the bytes that were loaded differ from those that were stored")
    finally:
        tier.discard(keys, monotonic() + wait).result()
        tier.close(monotonic() + wait)
    return f"{_RECORDS} records of {format_bytes(_PAYLOAD)} stored in {took[0]:.1f} ms each, loaded in {took[1]:.1f} ms"
