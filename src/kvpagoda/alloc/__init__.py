"""WHO owns an id: one free list, three faces (blocks, tokens, slots), and the table of blocks.

The faces that hand out tensors, ``alloc.blocks`` and ``alloc.tokens``, are imported from their own files: the rest of
this room works without torch.
"""

from kvpagoda.alloc.free_list import FreeList, FreeStack
from kvpagoda.alloc.slots import SlotAllocator
from kvpagoda.alloc.table import BlockTable

__all__ = ["BlockTable", "FreeList", "FreeStack", "SlotAllocator"]
