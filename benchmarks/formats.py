"""What each form of the cache saves in bytes and costs in bits, for the model that ``kvpagoda generate`` brings.

``lost_millibits``: thousandths of a bit more for each byte of the text that the model was not trained on, beside float32 rows.
"""

from __future__ import annotations

import torch

from benchmarks.timing import Options, Row
from kvpagoda.schema.from_hf import KV_FORMATS

QUESTION = "What does each form of the cache save, and what does it cost on held-out text?"


def measure(options: Options) -> list[Row]:
    from kvpagoda.hf.embedded import embedded_model, held_out_text
    from kvpagoda.hf.held_out import Cost, format_cost

    torch.set_num_threads(1)
    model, text = embedded_model(), held_out_text()[: 200 if options.quick else None]
    raw, rows = Cost.of(model, "raw", text), list[Row]()
    for kv_format in KV_FORMATS:
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
