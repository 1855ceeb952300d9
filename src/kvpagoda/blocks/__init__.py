"""WHO owns an id: the free list, block tables, and the blocks of a group."""

from kvpagoda.blocks.free_list import FreeList, FreeStack
from kvpagoda.blocks.group import BlockTable

__all__ = ["BlockTable", "FreeList", "FreeStack"]
