"""Measurements, one question a file: ``python -m benchmarks.match [--json] [--save]``."""
