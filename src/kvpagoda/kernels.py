"""Operations that write, read and copy rows and states: the entry points of ``kvpagoda.core.kernels``. Needs torch."""

from kvpagoda.core.kernels import (
    append_rows,
    append_scaled,
    append_swa,
    conv_steps,
    copy_rows,
    delta_steps,
    gather_rows,
    gather_scaled,
    ssd_steps,
)

__all__ = [
    "append_rows", "append_scaled", "append_swa", "conv_steps", "copy_rows", "delta_steps", "gather_rows", "gather_scaled",
    "ssd_steps",
]  # fmt: skip
