"""WHO owns an id: block tables, the blocks of a group, where they lie."""

from kvpagoda.core.blocks.block_table import BlockTable

__all__ = ["BlockTable"]
