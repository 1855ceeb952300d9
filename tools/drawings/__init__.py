"""The drawings and plots of the documents, as SVG files in ``docs/assets``.

    python -m tools.drawings        writes all of them; tests/test_drawings.py compares them with the committed files

Drawings are made from caches that run, plots from ``benchmarks/results``.
"""
