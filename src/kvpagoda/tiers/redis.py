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
    """Return a driver that keeps records of ``buffer`` in the Redis or Valkey at ``url``; connects on the first call.

    ``redis://user:password@host:port/database``, ``rediss://`` with TLS, ``unix:///path``, or, for the master that
    sentinels call ``name``, ``redis+sentinel://user:password@host:port,host:port/database#name``. For a cluster, give
    any of its servers; while one of them fails, the keys of the others are served. Options of redis-py follow a ``?``:
    ``rediss://host?ssl_ca_certs=/etc/ca.pem``. The system resolves host names without a deadline; a ``Tier`` above the
    driver still answers in time. Raises BadInput for another URL, for records of more than 512 MiB, and without the
    package redis.
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
    except (ValueError, LookupError, TypeError, RedisError):  # the error is not shown: the URL may hold a password
        raise BadInput(
            "a url is redis://user:password@host:port/database?option=value, rediss:// for TLS, unix:///path, or "
            "redis+sentinel://host:port,host:port#name"
        ) from None
