"""KV events for routers: which blocks a cache has in each group, and how many tokens of a prompt it could reuse."""

from kvpagoda.core.cache.event_log import EventLog
from kvpagoda.events.follower import Follower, namespace_name
from kvpagoda.events.index import Resumable
from kvpagoda.events.publisher import Publisher, Subscriber
from kvpagoda.events.router import Router
from kvpagoda.events.server import RouterServer
from kvpagoda.events.stream import EventStream
from kvpagoda.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Encoding, EventBatch

__all__ = [
    "AllBlocksCleared", "BlockRemoved", "BlockStored", "Encoding", "EventBatch", "EventLog", "EventStream", "Follower",
    "Publisher", "Resumable", "Router", "RouterServer", "Subscriber", "namespace_name",
]  # fmt: skip
