"""transformers models on top: a continuous batching generator whose cache is a ``KVCache``. Needs the ``hf`` extra."""

from kvpagoda.hf.generator import Generator, Request

__all__ = ["Generator", "Request"]
