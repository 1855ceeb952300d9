"""Memory of a CUDA device that a sleeping cache gives back. Needs torch and ``pip install 'kvpagoda[cuda]'``."""

from kvpagoda.core.memory.virtual import VirtualMemory

__all__ = ["VirtualMemory"]
