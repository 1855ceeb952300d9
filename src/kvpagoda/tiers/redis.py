"""Records in Redis or Valkey: one server, a cluster, or the master that sentinels name.

store    SET kvpagoda:<key in hex> <record> NX          load      GET
lookup   STRLEN, which also counts as a use             discard   DEL

A value of another type or length is none of ours: a miss, and overwritten by the next store.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvpagoda.errors import BadInput
from kvpagoda.tiers.driver import DriverStats, Lease, Status
from kvpagoda.tiers.records import RecordBuffer
from kvpagoda.units import format_bytes

if TYPE_CHECKING:
    from kvpagoda.tiers.redis_client import RedisClient

PREFIX = b"kvpagoda:"
_MOST_NBYTES = 512 << 20  # of a value, by the protocol


class RedisDriver:
    """See ``redis_driver``. ``last_error``: why something was not available, for people."""

    def __init__(self, buffer: RecordBuffer, client: RedisClient) -> None:
        self._records, self._record_nbytes = [row.data for row in buffer.rows], buffer.record_nbytes
        self._client = client
        self._lock, self._rejected = Lock(), 0

    @property
    def last_error(self) -> str:
        return self._client.last_error

    def store(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """See ``Driver``. REJECTED: the server is full and may not evict."""
        names, records = _names(keys), [self._records[row] for row in rows]
        replies = self._client.ask("SET", names, deadline, records, b"NX")
        kept = [i for i, reply in enumerate(replies) if reply is None]
        for i, status in zip(kept, self._lookup([names[i] for i in kept], deadline) if kept else ()):
            if status is Status.MISS:  # something lies there that is no record
                (replies[i],) = self._client.ask("SET", [names[i]], deadline, [records[i]])
            else:
                replies[i] = status
        statuses = [reply if isinstance(reply, Status) else Status.OK for reply in replies]
        with self._lock:
            self._rejected += statuses.count(Status.REJECTED)
        return statuses

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
        """See ``Driver``. A server knows no leases: what was found counts as used, and ``until`` is now."""
        return Lease(tuple(keys), tuple(self._lookup(_names(keys), deadline)), monotonic())

    def load(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """See ``Driver``. CORRUPT: a value of another type or length."""
        replies = self._client.ask("GET", _names(keys), deadline, [self._records[row] for row in rows])
        return [_status(reply, isinstance(reply, memoryview), Status.CORRUPT) for reply in replies]

    def discard(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        """See ``Driver``."""
        replies = self._client.ask("DEL", _names(keys), deadline)
        return [_status(reply, bool(reply), Status.MISS) for reply in replies]

    def stats(self) -> DriverStats:
        """What the servers said of themselves with a store of this driver, a second before the last one at most: all that
        they hold, for whomever, by their own count of memory, beside ``maxmemory``, or their whole memory if that is 0."""
        told = self._client.info()
        used, most, memory, evicted = (
            sum(int(info.get(name, 0)) for info in told)
            for name in ("used_memory", "maxmemory", "total_system_memory", "evicted_keys")
        )
        records = sum(value["keys"] for info in told for name, value in info.items() if re.fullmatch(r"db\d+", name))
        return DriverStats(records, used, most or memory, 0, evicted, self._rejected)

    def close(self) -> None:
        """See ``Driver``."""
        self._client.close()

    def _lookup(self, names: Sequence[bytes], deadline: float) -> list[Status]:
        told = [
            _status(reply, reply == self._record_nbytes, Status.MISS)
            for reply in self._client.ask("STRLEN", names, deadline)
        ]
        return [Status.MISS if status is Status.CORRUPT else status for status in told]


def redis_driver(buffer: RecordBuffer, url: str) -> RedisDriver:
    """Keep records of ``buffer`` in the Redis or Valkey at ``url``. Nobody is asked before the first call.

    ``redis://user:password@host:port/database``, ``rediss://`` with TLS, ``unix:///path``, or, for the master that sentinels
    call ``name``, ``redis+sentinel://user:password@host:port,host:port/database#name``. Any server of a cluster will do.
    Options of redis-py follow a ``?``: ``rediss://host?ssl_ca_certs=/etc/ca.pem``. The system looks names up without a
    deadline: a ``Tier`` answers in time all the same. Raises BadInput for another URL, for records of 512 MiB and more, and
    without the package redis.
    """
    if buffer.record_nbytes > _MOST_NBYTES:
        raise BadInput(
            f"a value is at most {format_bytes(_MOST_NBYTES)}, a record is {format_bytes(buffer.record_nbytes)}"
        )
    try:
        from redis.exceptions import RedisError

        from kvpagoda.tiers.redis_client import RedisClient
    except ImportError as error:
        raise BadInput(f"Redis needs the package redis ({error}); install kvpagoda[redis]") from None
    try:
        return RedisDriver(buffer, RedisClient(url))
    except (
        ValueError,
        LookupError,
        TypeError,
        RedisError,
    ):  # and do not say what it was: there may be a password in it
        raise BadInput(
            "a url is redis://user:password@host:port/database?option=value, rediss:// for TLS, unix:///path, or "
            "redis+sentinel://host:port,host:port#name"
        ) from None


def _names(keys: Sequence[bytes]) -> list[bytes]:
    return [PREFIX + key.hex().encode() for key in keys]


def _status(reply: Any, is_ours: bool, other: Status) -> Status:
    """What a reply says of a record: OK where it ``is_ours``, MISS where there is none, else ``other``."""
    if isinstance(reply, Status):
        return reply
    return Status.OK if is_ours else Status.MISS if reply is None else other
