"""transformers models on top: a continuous batching generator whose cache is a ``KVCache``. Needs the ``hf`` extra."""

from kvpagoda.hf.generator import Generator, Request
from kvpagoda.hf.sampling import Sampling
from kvpagoda.hf.weights import weights_digest

__all__ = ["Generator", "Request", "Sampling", "weights_digest"]
