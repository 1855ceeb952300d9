"""WHO owns an id: the free list, block tables, and the blocks of a group."""

from kvpagoda.core.blocks.block_table import BlockTable
from kvpagoda.core.blocks.free_list import FreeList, FreeStack

__all__ = ["BlockTable", "FreeList", "FreeStack"]
