"""Other engines' cache managers over this library's core: each answers the calls that the engine's own scheduler makes.

A file is named after the engine whose calls it answers. None imports that engine: what it is handed is taken by its
attributes, so a simulator or a test may hand over objects of its own.
"""
