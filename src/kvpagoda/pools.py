"""WHERE rows live, for cache managers of your own: memory, block tables on a device, the arrays of a step. Needs torch."""

from kvpagoda.core.batch.step import Step
from kvpagoda.core.memory.arena import Arena, dtype_name
from kvpagoda.core.memory.block_rows import BlockRows
from kvpagoda.core.memory.device_blocks import DeviceBlocks
from kvpagoda.core.memory.device_memory import page_locks
from kvpagoda.core.memory.pool import Pool
from kvpagoda.core.memory.staging import Staging

__all__ = ["Arena", "BlockRows", "DeviceBlocks", "Pool", "Staging", "Step", "dtype_name", "page_locks"]
