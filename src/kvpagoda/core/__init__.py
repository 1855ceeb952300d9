"""What an engine needs of kvpagoda: requests, prefixes, blocks, memory, kernels, steps. Private: others import
``kvpagoda`` and ``kvpagoda.abc``."""
