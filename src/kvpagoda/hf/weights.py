"""A model's weights: a digest, which keeps the rows of different models apart, and a watch, which notices changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any
from weakref import ref

import torch

from kvpagoda import KVCache
from kvpagoda.tiers.records import xxh3_128

Tensor = torch.Tensor

_IGNORED = {"_name_or_path", "_commit_hash", "transformers_version", "architectures"}  # they do not change the results
_SAMPLES = 16
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def weights_digest(model: Any) -> str:
    """Return a digest, 16 bytes in hex, of the config and of every parameter and buffer: names, dtypes, shapes, bytes.

    It reads all of them once, which takes seconds for a large model. Rows of models with the same digest are equal, up
    to the rounding of the kernels that computed them.

    Args:
        model: of torch.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in _IGNORED}
    digest = blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        digest.update(xxh3_128(content.data))
    return digest.hexdigest()


class WeightsWatch:
    """Notices that the weights of a model changed, and invalidates the cache, whose rows were computed with them.

    Watched are the modules, the parameters and the persistent buffers: which objects they are, the addresses of their
    values, the counters of changes that torch keeps, and 16 values of each tensor, evenly spread over it. The counter
    alone would miss what is written through ``.data``, through numpy, or by a fused kernel.

    Not noticed: a change behind torch's back of a few values that are not among the 16 (a row of an embedding, written
    through ``.data``); the values of tensors with a class of their own (quantised or distributed ones), if their
    counter stays; tensors on the meta device, which are loaded for each pass; buffers that are not persistent; and what
    is no tensor, such as a config field or an adapter that is switched on.

    RWKV rescales its weights in its first pass, which counts as a change: what that pass cached is not found again.

    A check reads nothing but the samples, in one copy from each device. O(modules + tensors): 0.8 ms for 201 tensors in
    293 modules, on one core of a CPU.

    Args:
        model: that is watched.
        cache: that is invalidated.
    """

    def __init__(self, model: Any, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._note()

    def follow(self) -> None:
        """Invalidate the cache if the weights are not those of the last call. Called before a prompt is looked up."""
        if self._is_changed():
            self.invalidate()

    def invalidate(self, weights: str | None = None) -> None:
        """Invalidate the cache: the weights are new.

        Args:
            weights: see ``KVCache.invalidate``.
        """
        self._cache.invalidate(weights=weights)
        self._note()

    def _note(self) -> None:
        parts, self._marks = _parts_and_marks(self._model)
        self._parts = list(map(ref, parts))
        """Weak: parts that the model drops are freed, and no new part is taken for one that had its address."""

    def _is_changed(self) -> bool:
        parts, marks = _parts_and_marks(self._model)
        if len(parts) != len(self._parts) or marks != self._marks:
            return True
        return any(noted() is not part for noted, part in zip(self._parts, parts))


def _parts_and_marks(model: Any) -> tuple[list[Any], list[Any]]:
    """Return the watched parts of ``model``, modules and tensors, and what differs after most changes of their values:
    addresses, counters and samples."""
    modules = list(model.modules())
    tensors = [tensor for module in modules for tensor in _tensors(module)]
    plain = [tensor for tensor in tensors if type(tensor) in _PLAIN and tensor.layout == torch.strided]
    addresses = [tensor.data_ptr() for tensor in plain]
    counters = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    return [*modules, *tensors], [addresses, counters, _samples(plain)]


def _tensors(module: torch.nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and persistent buffers of ``module`` itself that have values."""
    for tensor in module._parameters.values():
        if tensor is not None and not tensor.is_meta:
            yield tensor
    for name, buffer in module._buffers.items():
        if buffer is not None and not buffer.is_meta and name not in module._non_persistent_buffers_set:
            yield buffer


@torch.no_grad()
def _samples(tensors: list[Tensor]) -> list[bytes]:
    """Return the bytes of a few values of each of ``tensors``: one copy and one synchronisation for each device."""
    kinds: dict[torch.device, dict[torch.dtype, list[Tensor]]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault(tensor.device, {}).setdefault(tensor.dtype, []).append(_diagonal(tensor))
    return [
        torch.cat([torch.cat(views).view(torch.uint8) for views in by_dtype.values()]).cpu().numpy().tobytes()
        for by_dtype in kinds.values()
    ]


def _diagonal(tensor: Tensor) -> Tensor:
    """Return a view of at most 16 values of ``tensor``, evenly spread: over all its values if they are contiguous, else
    along its diagonal."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    if tensor.is_contiguous():
        shape, strides = (tensor.numel(),), (1,)
    count = min(_SAMPLES, max(shape))
    step = sum((size - 1) // max(1, count - 1) * stride for size, stride in zip(shape, strides))
    return tensor.as_strided((count,), (step,), tensor.storage_offset())
