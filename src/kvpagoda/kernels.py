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
from kvpagoda.core.kernels.append_swa import warm_up_swa
from kvpagoda.core.kernels.packed_rows import append_parts, gather_parts

__all__ = [
    "append_parts",
    "append_rows",
    "append_scaled",
    "append_swa",
    "conv_steps",
    "copy_rows",
    "delta_steps",
    "gather_parts",
    "gather_rows",
    "gather_scaled",
    "ssd_steps",
    "warm_up_swa",
]  # fmt: skip
