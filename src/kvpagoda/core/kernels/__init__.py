"""Operations that write, read and copy rows and states: one per file, with its torch reference, kernel and entry point."""

from kvpagoda.core.kernels.append_swa import append_swa
from kvpagoda.core.kernels.copy_rows import copy_rows
from kvpagoda.core.kernels.packed_rows import append_rows, gather_rows
from kvpagoda.core.kernels.scaled_rows import append_scaled, gather_scaled
from kvpagoda.core.kernels.state_steps import conv_steps, delta_steps, ssd_steps

__all__ = [
    "append_rows", "append_scaled", "append_swa", "conv_steps", "copy_rows", "delta_steps", "gather_rows", "gather_scaled",
    "ssd_steps",
]  # fmt: skip
