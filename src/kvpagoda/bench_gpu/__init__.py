"""Measures this library on a GPU: ``kvpagoda bench gpu``, and the short form of ``kvpagoda doctor``."""
