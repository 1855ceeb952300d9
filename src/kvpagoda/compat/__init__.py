"""The interfaces of four existing cache designs, each a thin layer over the core, with the names that they use."""
