"""Looks for wrong cached tokens in a server from outside: ``kvpagoda audit``. Needs httpx (extra ``audit``)."""
