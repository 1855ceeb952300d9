"""What tells one model's rows from another's."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import torch

from kvpagoda.tiers.checksum import xxh3_128

_UNTOLD = {"_name_or_path", "_commit_hash", "transformers_version", "architectures"}  # say nothing of what is computed


def weights_digest(model: Any) -> str:
    """16 bytes in hex over the config and every parameter and buffer of ``model``: names, dtypes, shapes and bytes.

    Reads all of them once: seconds for a large model. Rows that were computed with the same digest mean the same, up to the
    rounding of the kernels that computed them.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in _UNTOLD}
    digest = blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        digest.update(xxh3_128(content.data))
    return digest.hexdigest()
