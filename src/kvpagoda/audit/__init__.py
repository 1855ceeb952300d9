"""Looks for wrong cached tokens in a server from outside: ``kvpagoda audit``. Needs httpx (extra ``audit``)."""

from typing import TYPE_CHECKING

from kvpagoda.loading import load_when_used

if TYPE_CHECKING:
    from kvpagoda.audit.command import audit
    from kvpagoda.audit.report import Report

__all__ = ["Report", "audit"]

if not TYPE_CHECKING:
    __getattr__ = load_when_used(__name__, {"kvpagoda.audit.command": ("audit",), "kvpagoda.audit.report": ("Report",)})
