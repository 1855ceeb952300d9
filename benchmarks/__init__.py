"""Measurements. Each module answers one question: ``python -m benchmarks.match [--json] [--save]``."""
