"""WHERE rows live: the arena, pools over it, tables from requests to blocks, the two-device engine."""

from kvpagoda.storage.arena import Arena, default_device

__all__ = ["Arena", "default_device"]
