"""KV events for routers: which blocks a cache has in each group, and how many tokens of a prompt it could reuse."""

from typing import TYPE_CHECKING

from kvpagoda.loading import load_when_used

if TYPE_CHECKING:
    from kvpagoda.events.event_log import EventLog
    from kvpagoda.events.follower import Follower, namespace_name
    from kvpagoda.events.index import Resumable
    from kvpagoda.events.publisher import Publisher, Subscriber
    from kvpagoda.events.router import Router
    from kvpagoda.events.server import RouterServer
    from kvpagoda.events.stream import EventStream
    from kvpagoda.events.vllm import VllmFollower
    from kvpagoda.events.vllm_index import NextHit
    from kvpagoda.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Encoding, EventBatch

__all__ = [
    "AllBlocksCleared", "BlockRemoved", "BlockStored", "Encoding", "EventBatch", "EventLog", "EventStream", "Follower",
    "NextHit", "Publisher", "Resumable", "Router", "RouterServer", "Subscriber", "VllmFollower", "namespace_name",
]  # fmt: skip

_NAMES = {
    "event_log": ("EventLog",), "follower": ("Follower", "namespace_name"), "index": ("Resumable",),
    "publisher": ("Publisher", "Subscriber"), "router": ("Router",), "server": ("RouterServer",), "stream": ("EventStream",),
    "vllm": ("VllmFollower",), "vllm_index": ("NextHit",),
    "wire": ("AllBlocksCleared", "BlockRemoved", "BlockStored", "Encoding", "EventBatch"),
}  # fmt: skip
if not TYPE_CHECKING:
    __getattr__ = load_when_used(__name__, {f"{__name__}.{module}": names for module, names in _NAMES.items()})
