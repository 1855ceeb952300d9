"""Layouts as values: what kernels demand of a cache's bytes, and rows packed as they can read them."""

from kvpagoda.layouts.judge import Verdict, judge

__all__ = ["Verdict", "judge"]
