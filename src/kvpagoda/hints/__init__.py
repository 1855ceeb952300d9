"""Hints: what an application knows about the future of a text, in the envelope that vLLM and SGLang carry. A hint is
advice; every one is answered with numbers, and none is waited for. ``docs/hints.md`` defines the actions."""

from kvpagoda.core.cache.outcome import Outcome
from kvpagoda.hints.envelope import Action, read_envelope
from kvpagoda.hints.hints import Hints
from kvpagoda.hints.options import HintLimits

__all__ = ["Action", "HintLimits", "Hints", "Outcome", "read_envelope"]
