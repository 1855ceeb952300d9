"""transformers models on top: a continuous batching generator whose cache is a ``KVCache``. Needs the ``hf`` extra."""

from kvpagoda.hf.generator import Generator, Request
from kvpagoda.hf.sampling import Sampling

__all__ = ["Generator", "Request", "Sampling"]
