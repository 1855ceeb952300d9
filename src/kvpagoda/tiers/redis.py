"""A driver that keeps records in Redis or Valkey: one server, a cluster, or the master that sentinels name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpagoda.errors import BadInput
from kvpagoda.tiers.records import RecordBuffer
from kvpagoda.units import format_bytes

if TYPE_CHECKING:
    from kvpagoda.tiers.redis_client import RedisDriver

_MOST_NBYTES = 512 << 20  # the protocol's limit for a value


def redis_driver(buffer: RecordBuffer, url: str) -> RedisDriver:
    """Keep records of ``buffer`` in the Redis or Valkey at ``url``. Nobody is asked before the first call.

    ``redis://user:password@host:port/database``, ``rediss://`` with TLS, ``unix:///path``, or, for the master that
    sentinels call ``name``, ``redis+sentinel://user:password@host:port,host:port/database#name``. Any server of a
    cluster will do. Options of redis-py follow a ``?``: ``rediss://host?ssl_ca_certs=/etc/ca.pem``. The system looks
    names up without a deadline: a ``Tier`` answers in time all the same. Raises BadInput for another URL, for records
    of 512 MiB and more, and without the package redis.
    """
    if buffer.record_nbytes > _MOST_NBYTES:
        raise BadInput(
            f"a value is at most {format_bytes(_MOST_NBYTES)}, a record is {format_bytes(buffer.record_nbytes)}"
        )
    try:
        from redis.exceptions import RedisError

        from kvpagoda.tiers.redis_client import RedisDriver
    except ImportError as error:
        raise BadInput(f"Redis needs the package redis ({error}); install kvpagoda[redis]") from None
    try:
        return RedisDriver(buffer, url)
    except (ValueError, LookupError, TypeError, RedisError):  # and do not say what: there may be a password in it
        raise BadInput(
            "a url is redis://user:password@host:port/database?option=value, rediss:// for TLS, unix:///path, or "
            "redis+sentinel://host:port,host:port#name"
        ) from None
