"""Runs transformers models with their whole cache in a ``KVCache``: ``Generator`` with continuous batching,
``PagedCache`` for ``model.generate``. Needs the ``hf`` extra."""

from kvpagoda.errors import MissingExtra

_LACKING = "kvpagoda.hf needs torch and transformers (tested with 5.23 and 5.24); pip install 'kvpagoda[hf]'"
with MissingExtra.unless("torch", _LACKING), MissingExtra.unless("transformers", _LACKING):
    from kvpagoda.hf.generator import Generator, Request
    from kvpagoda.hf.paged_cache import PagedCache
    from kvpagoda.hf.sampling import Sampling
    from kvpagoda.hf.scales import calibrated_scales, checkpoint_scales
    from kvpagoda.hf.weights import weights_digest

__all__ = [
    "Generator", "PagedCache", "Request", "Sampling", "calibrated_scales", "checkpoint_scales", "weights_digest",
]  # fmt: skip
