"""A driver that keeps records in Redis or Valkey: one server, a cluster, or the master that sentinels name.

It uses the pools, logins, TLS, cluster map and sentinels of redis-py, and adds deadlines.

store    SET kvpagoda:<key in hex> <record> NX          load      GET
lookup   STRLEN, which also counts as a use             discard   DEL

A value of another type or length is not a record: it is a miss, and the next store overwrites it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from math import inf
from threading import Lock
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from kvpagoda.abc import DriverStats, Lease, Status
from kvpagoda.errors import BadInput, MissingExtra
from kvpagoda.tiers.records import RecordBuffer
from kvpagoda.units import format_bytes, name_of

try:
    from redis import Redis, RedisCluster
    from redis.backoff import NoBackoff
    from redis.exceptions import AskError, OutOfMemoryError, RedisError, SlotNotCoveredError
    from redis.exceptions import TimeoutError as RedisTimeoutError
    from redis.retry import Retry

    from kvpagoda.tiers.redis_connections import Asked, call_deadline, connections, exchange, seconds_left
except ImportError as error:
    _ABSENT = str(error)
else:
    _ABSENT = ""

PREFIX = b"kvpagoda:"
INFO_SECONDS = 1.0
_MOST_NBYTES = 512 << 20  # the protocol's limit for a value
_PART_NBYTES = 1 << 20  # records per pipeline; with more, server and client wake each other more often for fewer bytes
_PART_NAMES = 1024  # commands per pipeline without records
_KEPT_SHARE = 0.1  # of the time of a call that asks several servers: to hand over what the others answered


class RedisDriver:
    """See ``redis_driver``. ``last_error``: why a call failed, in words, for logs.

    If a server answers MOVED, it belongs to a cluster: redis-py then reads the cluster's map and keeps it. Raises
    ValueError, LookupError, TypeError or RedisError for a URL that it does not understand.
    """

    def __init__(self, buffer: RecordBuffer, url: str) -> None:
        self.last_error = ""
        self._records, self._record_nbytes = [row.data for row in buffer.rows], buffer.record_nbytes
        self._url, self._pool = url, connections(url)
        self._pool.make_connection()  # checks the options, and does not connect yet
        self._pool.reset()
        self._cluster: Any = None
        self._mapping, self._lock = Lock(), Lock()  # locks of the cluster map, and of the counters
        self._suspects: set[str] = set()  # servers that failed since the cluster map was read
        self._is_closed = False
        self._rejected = 0
        self._info: WeakKeyDictionary[Any, tuple[float, dict[str, Any]]] = WeakKeyDictionary()  # pool -> time, INFO

    def store(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """See ``Driver``. REJECTED: the server is full and may not evict."""
        replies = self._ask("SET", keys, deadline, rows, b"NX")
        kept = [i for i, reply in enumerate(replies) if reply is None]  # keys that have a value already
        if kept:
            found = self._lookup([keys[i] for i in kept], deadline)
            for i, status in zip(kept, found):
                # a miss here means that the value is no record: overwrite it
                replies[i] = self._ask("SET", [keys[i]], deadline, [rows[i]])[0] if status is Status.MISS else status
        statuses = [_status(reply, True, Status.OK) for reply in replies]
        with self._lock:
            self._rejected += statuses.count(Status.REJECTED)
        return statuses

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
        """See ``Driver``. Servers have no leases: found records count as used, and the lease ends at once."""
        return Lease(tuple(keys), tuple(self._lookup(keys, deadline)), monotonic())

    def _lookup(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        """Return OK for each key whose value has the length of a record, MISS for other values."""
        replies = self._ask("STRLEN", keys, deadline)
        statuses = [_status(reply, reply == self._record_nbytes, Status.MISS) for reply in replies]
        return [Status.MISS if status is Status.CORRUPT else status for status in statuses]

    def load(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """See ``Driver``. CORRUPT: a value of another type or length."""
        replies = self._ask("GET", keys, deadline, rows)
        return [_status(reply, isinstance(reply, memoryview), Status.CORRUPT) for reply in replies]

    def discard(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        """See ``Driver``."""
        return [_status(reply, bool(reply), Status.MISS) for reply in self._ask("DEL", keys, deadline)]

    def shard_of(self, key: bytes) -> str:
        """See ``Driver``: the server of a cluster that has ``key``, as host:port. "" without a cluster or a server."""
        return self._server_of(_name(key))

    def stats(self) -> DriverStats:
        """Return what the servers reported when this driver last stored, at most a second before its last store.

        The counts are of all data of the servers, also of other users, by the servers' own count of memory. The
        capacity is ``maxmemory``, or the whole memory of a server where that is 0.
        """
        with self._lock:
            reports = [info for _, info in self._info.values()]
        used, most, memory, evicted = (
            sum(int(info.get(name, 0)) for info in reports)
            for name in ("used_memory", "maxmemory", "total_system_memory", "evicted_keys")
        )
        records = sum(value["keys"] for info in reports for name, value in info.items() if re.fullmatch(r"db\d+", name))
        return DriverStats(records, used, most or memory, 0, evicted, self._rejected)

    def close(self) -> None:
        """See ``Driver``. Closes the idle connections now; those in use are closed when the driver is deleted."""
        self._is_closed = True
        nodes = [] if self._cluster is None else self._cluster.get_nodes()
        for pool in (self._pool, *[node.redis_connection.connection_pool for node in nodes if node.redis_connection]):
            pool.disconnect(inuse_connections=False)

    def _ask(
        self, command: str, keys: Sequence[bytes], deadline: float, rows: Sequence[int] = (), *more: bytes
    ) -> list[Any]:
        """Send ``command`` for each key and return the replies of redis-py; a fault is a ``Status``.

        SET stores the records ``rows``, with the arguments ``more``. GET reads into ``rows``; its reply is the record
        if the value has the length of a record. O(n), and one round trip to each server for each MiB of records or 1024
        keys. Redirected keys are asked for one by one.
        """
        if self._is_closed or monotonic() >= deadline:
            return [Status.UNAVAILABLE if self._is_closed else Status.TIMEOUT] * len(keys)
        names, records = [_name(key) for key in keys], [self._records[row] for row in rows]
        asked: list[Asked] = [
            ((command, name, record, *more), None) if command == "SET" else ((command, name), record)
            for name, record in zip_longest(names, records)
        ]
        step = max(1, _PART_NBYTES // self._record_nbytes) if rows else _PART_NAMES
        replies: list[Any] = [None] * len(keys)
        token = call_deadline.set(deadline)
        try:
            kept = _KEPT_SHARE * seconds_left()
            suspects = self._read_map_again(names)
            groups: dict[str, list[int]] = {}
            for i, name in enumerate(names):
                groups.setdefault(self._server_of(name), []).append(i)
            end = deadline if len(groups) == 1 else deadline - kept
            # Suspects come last, and each server gets an equal share of the time that is left.
            for num_asked, server in enumerate(sorted(groups, key=suspects.__contains__)):
                group = groups[server]
                call_deadline.set(monotonic() + (end - monotonic()) / (len(groups) - num_asked))
                for i, reply in zip(group, self._exchange(server, [asked[i] for i in group], step)):
                    told = self._redirected(*asked[i]) if isinstance(reply, AskError) else reply
                    replies[i] = self._fault(told, names[i]) if isinstance(told, Exception) else told
            call_deadline.set(deadline)
            if command == "SET":
                stored = [name for name, reply in zip(names, replies) if not isinstance(reply, Status)]
                for server in {self._server_of(name) for name in stored}:
                    self._note(self._pool_of(server))
        except Exception as error:  # redis-py may raise any exception for an unexpected answer
            replies = [self._fault(error, name) for name in names]
        finally:
            call_deadline.reset(token)
        return replies

    def _server_of(self, name: bytes) -> str:
        """Return the server of the cluster that has the key ``name``; "" without a cluster, or if no server has it."""
        try:
            return "" if self._cluster is None else str(self._cluster.get_node_from_key(name).name)
        except SlotNotCoveredError:
            return ""

    def _pool_of(self, server: str) -> Any:
        """Return the connections to ``server``. Raises LookupError if the cluster has no such server."""
        if self._cluster is None:
            return self._pool
        node = self._cluster.get_node(node_name=server) if server else None
        if node is None:
            raise LookupError("no server of the cluster has this key now")
        return self._cluster.get_redis_connection(node).connection_pool

    def _exchange(self, server: str, asked: Sequence[Asked], step: int) -> list[Any]:
        """See the function ``exchange``."""
        try:
            return exchange(self._pool_of(server), asked, step)
        except LookupError as error:
            return [error] * len(asked)

    def _redirected(self, words: tuple[Any, ...], target: memoryview | None) -> Any:
        """Return the reply of the server to which the asked server redirects this command."""
        try:
            reply = self._known_cluster().execute_command(*words)
        except Exception as error:
            return error
        if target is None or reply is None or len(reply) != len(target):
            return reply
        target[:] = reply
        return target

    def _fault(self, error: Exception, name: bytes) -> Status:
        """Return the status for ``error``; after most errors the server of the key ``name`` is a suspect."""
        self.last_error = str(error) or type(error).__name__
        if isinstance(error, OutOfMemoryError):
            return Status.REJECTED
        if self.last_error.startswith("WRONGTYPE"):
            return Status.CORRUPT
        self._suspects.add(self._server_of(name))
        return Status.TIMEOUT if isinstance(error, (TimeoutError, RedisTimeoutError)) else Status.UNAVAILABLE

    def _known_cluster(self) -> Any:
        """Return redis-py's client of the cluster, made on first use."""
        with self._mapping:
            if self._cluster is None:
                self._cluster = RedisCluster.from_url(
                    "redis" + self._url[self._url.index(":") :],  # with "rediss" its own class would replace ours
                    connection_class=self._pool.connection_class,
                    protocol=2,
                    require_full_coverage=False,
                    retry=Retry(NoBackoff(), 0),
                )
            return self._cluster

    def _read_map_again(self, names: Sequence[bytes]) -> set[str]:
        """Read the cluster map again if a server that has one of the keys ``names`` failed; return all that failed.

        In at most half of the time left, because the server that is asked for it may be the one that is down.
        """
        suspects = set(self._suspects)
        if self._cluster is not None and any(self._server_of(name) in suspects for name in names):
            token = call_deadline.set(monotonic() + seconds_left() / 2)
            with suppress(Exception):
                self._cluster.nodes_manager.initialize()
                self._suspects.clear()
            call_deadline.reset(token)
        return suspects

    def _note(self, pool: Any) -> None:
        """Ask the server of ``pool`` for its INFO, if the last one is older than ``INFO_SECONDS``."""
        if monotonic() >= self._info.get(pool, (-inf, {}))[0] + INFO_SECONDS:
            with suppress(Exception):
                answer = monotonic(), Redis(connection_pool=pool).info()
                with self._lock:
                    self._info[pool] = answer
                    if pool is not self._pool:  # its server is one of the cluster, and counted there
                        self._info.pop(self._pool, None)


def _name(key: bytes) -> bytes:
    """Return the name of the record of ``key`` on the servers."""
    return PREFIX + key.hex().encode()


def _status(reply: Any, is_ours: bool, other: Status) -> Status:
    """Return the status that ``reply`` means: OK if it ``is_ours``, MISS if it is None, else ``other``."""
    if isinstance(reply, Status):
        return reply
    return Status.OK if is_ours else Status.MISS if reply is None else other


def redis_driver(buffer: RecordBuffer, url: str) -> RedisDriver:
    """Return a driver that keeps records in Redis or Valkey; it connects on the first call.

    The system resolves host names without a deadline; a ``Tier`` above the driver still answers in time. While a server
    of a cluster fails, the keys of the others are served.

    Args:
        buffer: the records, of at most 512 MiB each.
        url: ``redis://user:password@host:port/database``, ``rediss://`` with TLS, ``unix:///path``, or, for the master
            that sentinels call ``name``, ``redis+sentinel://user:password@host:port,host:port/database#name``; for a
            cluster any of its servers. Options of redis-py follow a ``?``: ``rediss://host?ssl_ca_certs=/etc/ca.pem``.

    Raises:
        BadInput: another URL, or longer records.
        MissingExtra: the package redis is not installed.
    """
    if buffer.record_nbytes > _MOST_NBYTES:
        text = f"a value is at most {format_bytes(_MOST_NBYTES)}, a record is {format_bytes(buffer.record_nbytes)}"
        raise BadInput(text, needed=buffer.record_nbytes, available=_MOST_NBYTES)
    name_of(url, "the url of a tier")
    if _ABSENT:
        raise MissingExtra(f"Redis needs the package redis ({_ABSENT}); pip install 'kvpagoda[redis]'", name="redis")
    try:
        return RedisDriver(buffer, url)
    except (ValueError, LookupError, TypeError, RedisError):  # the error is not shown: the URL may hold a password
        raise BadInput(
            "a url is redis://user:password@host:port/database?option=value, rediss:// for TLS, unix:///path, or "
            "redis+sentinel://host:port,host:port#name",
            needed="url",
        ) from None
