"""A digest of a model's weights, which keeps the rows of different models apart."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import torch

from kvpagoda.tiers.checksum import xxh3_128

_IGNORED = {"_name_or_path", "_commit_hash", "transformers_version", "architectures"}  # they do not change the results


def weights_digest(model: Any) -> str:
    """Return a digest, 16 bytes in hex, of the config and of every parameter and buffer of ``model``: names, dtypes,
    shapes, bytes.

    It reads all of them once, which takes seconds for a large model. Rows of models with the same digest are equal, up
    to the rounding of the kernels that computed them.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in _IGNORED}
    digest = blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        digest.update(xxh3_128(content.data))
    return digest.hexdigest()
