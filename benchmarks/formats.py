"""How many bytes each KV format saves, and how much it costs in quality, for the model of ``kvpagoda generate``.

``lost_millibits``: how many thousandths of a bit per byte of held-out text the model needs more than with float32 rows.
"""

from __future__ import annotations

import torch

from benchmarks.timing import Options, Row
from kvpagoda.formats.encoding import RAW
from kvpagoda.schema.kv_format import KV_FORMATS

QUESTION = "What does each form of the cache save, and what does it cost on held-out text?"


def measure(options: Options) -> list[Row]:
    from kvpagoda.hf.embedded import embedded_model, held_out_text
    from kvpagoda.hf.held_out import Cost, format_cost

    torch.set_num_threads(1)
    model, text = embedded_model(), held_out_text()[: 200 if options.quick else None]
    raw, rows = Cost.of(model, "raw", text), list[Row]()
    for kv_format in (name for name, each in KV_FORMATS.items() if name == "raw" or each.entries != RAW):
        cost = format_cost(model, kv_format, text, raw)
        rows.append({
            "kv_format": kv_format,
            "bytes_per_token": cost.packed.bytes_per_token,
            "saved_percent": 100 * cost.saved,
            "bytes_per_request": cost.packed.bytes_per_request,
            "bits_per_byte": cost.packed.bits_per_byte,
            "lost_millibits": 1000 * cost.lost_bits_per_byte,
        })  # fmt: skip
    return rows
