"""The settings of a tier, chosen before a cache exists that knows how large its records are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from kvpagoda.abc import Driver
from kvpagoda.errors import BadInput, did_you_mean, shown
from kvpagoda.tiers.records import RecordBuffer
from kvpagoda.units import name_of, parse_bytes, path_of, real_number, truth, whole_number

if TYPE_CHECKING:
    from typing_extensions import Unpack

When = Literal["commit", "evict", "reuse"]


class TierSettings(TypedDict, total=False):
    """The keywords of a tier; see ``TierSpec``."""

    write: When
    record_nbytes: int | str
    staging: int | str | None
    timeout: float
    workers: int
    checksum: bool
    is_private: bool


@dataclass(frozen=True)
class TierSpec:
    """The settings of one tier of ``KVCache(tiers=[...])``, where the fastest comes first.

    ``host_tier``, ``disk_tier`` and others return one. ``make(buffer)`` returns the driver: any driver that passes
    ``kvpagoda.testing``.

    Args:
        name: in reports and metrics.
        make: ``make(buffer)`` returns the driver: any driver that passes ``kvpagoda.testing``.
        write: which blocks the cache stores there: all that are published (``"commit"``), those that it evicts
            (``"evict"``), or those that a second request reuses (``"reuse"``).
        record_nbytes: the least bytes of a record; several blocks of a small model share one.
        staging: host memory for records that are being stored or loaded; None: 64 MiB, or more if two checkpoints need
            it.
        timeout: the most seconds that one ``open`` spends in this tier in all, and that one store takes.
        workers: threads that call the driver.
        checksum: whether payloads have one; only a tier with ``is_private``, whose records are in memory of this
            process, may do without.
        is_private: the records are in memory of this process, and no other can read them.

    Raises:
        BadInput: a setting out of range.
    """

    name: str
    make: Callable[[RecordBuffer], Driver]
    write: When = "commit"
    record_nbytes: int | str = 1
    staging: int | str | None = None
    timeout: float = 1.0
    workers: int = 2
    checksum: bool = True
    is_private: bool = False

    def __post_init__(self) -> None:
        parse_bytes(self.record_nbytes)
        if self.staging is not None:
            parse_bytes(self.staging)
        if not (truth(self.checksum, "checksum") or truth(self.is_private, "is_private")):
            text = f"tier {self.name!r} needs checksums: only memory of this process can go without them"
            raise BadInput(text, field="checksum", needed=self.name)
        object.__setattr__(self, "timeout", real_number(self.timeout, "timeout"))
        object.__setattr__(self, "workers", whole_number(self.workers, "workers", bits=10))
        is_known = isinstance(self.write, str) and self.write in get_args(When)
        if not (is_known and self.timeout and self.workers):
            raise BadInput(
                f"tier {self.name!r} needs write= one of {', '.join(get_args(When))}, a finite timeout above 0 and "
                f"at least one worker; got {shown(self.write)}, {self.timeout} s and {self.workers} workers",
                field=self.name, needed=(self.write, self.timeout, self.workers),
            )  # fmt: skip


def host_tier(nbytes: int | str, **settings: Unpack[TierSettings]) -> TierSpec:
    """Return a tier of this process's memory, by default for what is evicted (``write="evict"``). See ``host_driver``.

    Args:
        nbytes: the most bytes, as a number or as text.
        **settings: of ``TierSpec``.
    """
    from kvpagoda.tiers.slots import host_driver

    make = partial(host_driver, nbytes=parse_bytes(nbytes))
    merged: TierSettings = {"write": "evict", "is_private": True, **settings}
    return TierSpec("host", make, **merged)


def disk_tier(
    folder: str | PathLike[str],
    nbytes: int | str,
    *,
    direct: bool = False,
    admit_all: bool = False,
    **settings: Unpack[TierSettings],
) -> TierSpec:
    """Return a tier in a file, whose records survive a restart. See ``disk_driver``.

    Args:
        folder: of the file.
        nbytes: the most bytes, as a number or as text.
        direct: see ``disk_driver``.
        admit_all: see ``disk_driver``.
        **settings: of ``TierSpec``.
    """
    from kvpagoda.tiers.disk import disk_driver

    path, size = path_of(folder, "the folder of a disk tier"), parse_bytes(nbytes)
    make = partial(disk_driver, path, nbytes=size, direct=direct, admit_all=admit_all)
    return TierSpec("disk", make, **settings)


def redis_tier(url: str, **settings: Unpack[TierSettings]) -> TierSpec:
    """Return a tier on a Redis or Valkey server or cluster, which many machines may share. See ``redis_driver``.

    Args:
        url: of the server.
        **settings: of ``TierSpec``.
    """
    from kvpagoda.tiers.redis import redis_driver

    make = partial(redis_driver, url=name_of(url, "the url of a tier"))
    merged: TierSettings = {"record_nbytes": "1MiB", "timeout": 2.0, **settings}
    return TierSpec("redis", make, **merged)


def mooncake_tier(master: str, **settings: Any) -> TierSpec:
    """Return a tier on a Mooncake Store: the memory of many machines as one store.

    **Its ports are open to all hosts that can reach them**: see ``kvpagoda.tiers.mooncake``.

    Args:
        master: see ``mooncake_driver``.
        **settings: those of ``mooncake_driver`` and of ``TierSpec``.
    """
    from kvpagoda.tiers.mooncake import mooncake_driver

    of_driver = {name: settings.pop(name) for name in signature(mooncake_driver).parameters if name in settings}
    make = partial(mooncake_driver, master=name_of(master, "the master of a tier"), **of_driver)
    return TierSpec("mooncake", make, **{"record_nbytes": "1MiB", "timeout": 3.0, **settings})


def tier_from_text(text: str, **settings: Any) -> TierSpec:
    """Return the tier that a text on a command line describes.

    Args:
        text: ``host:4GiB``, ``disk:FOLDER:50GiB``, ``redis://..``, ``rediss://..``, ``unix:///..``,
            ``redis+sentinel://..``, ``mooncake://HOST:PORT``.
        **settings: those of ``TierSpec``.

    Raises:
        BadInput: another text, or a setting out of range.
    """
    kind, _, rest = name_of(text, "a tier, as on a command line,").partition(":")
    if kind == "host":
        return host_tier(rest, **settings)
    if kind == "disk" and ":" in rest:
        folder, _, nbytes = rest.rpartition(":")
        return disk_tier(folder, nbytes, **settings)
    if kind.partition("+")[0] in ("redis", "rediss", "unix"):
        return redis_tier(text, **settings)
    if kind == "mooncake" and rest.startswith("//"):
        return mooncake_tier(rest[2:], **settings)
    hint = did_you_mean(kind, ("host", "disk", "redis", "rediss", "unix", "redis+sentinel", "mooncake"))
    raise BadInput(
        f"no tier is written like {kind + ':..'!r}; write host:4GiB, disk:FOLDER:50GiB, redis://HOST:PORT, rediss://, "
        f"unix:///PATH, redis+sentinel://HOST:PORT#NAME or mooncake://HOST:PORT" + (f"; {hint}" if hint else ""),
        needed=text, hint=hint,
    )  # fmt: skip
