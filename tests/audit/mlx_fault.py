"""mlx-lm's server with a fault planted in its prompt cache: ``FAULT OPTIONS``; "" plants none. It is run where mlx-lm is."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace

from mlx_lm import server
from mlx_lm.models import cache as caches

Prompts = caches.LRUPromptCache
fetch, insert = Prompts.fetch_nearest_cache, Prompts.insert_cache


def one_too_long(self, model, tokens):  # type: ignore[no-untyped-def]
    """A hit is one token longer than what is cached."""
    found, rest = fetch(self, model, tokens)
    return found, rest[1:] if found is not None and len(rest) > 1 else rest


def rows_of_another_place(self, model, tokens):  # type: ignore[no-untyped-def]
    """Of one layer of a hit, 16 rows are those of another place."""
    found, rest = fetch(self, model, tokens)
    for one in found or ():
        if getattr(one, "keys", None) is not None and getattr(one, "offset", 0) > 48:
            n = one.offset
            one.keys[..., n - 32 : n - 16, :] = one.keys[..., n - 48 : n - 32, :]
            break
    return found, rest


def _keyed(tokens):  # type: ignore[no-untyped-def]
    return [*[0] * 16, *tokens[16:]] if len(tokens) > 16 else tokens


def key_without_its_beginning(self, model, tokens):  # type: ignore[no-untyped-def]
    """Texts that differ in their first 16 tokens alone have the same key."""
    found, rest = fetch(self, model, _keyed(list(tokens)))
    return found, list(tokens)[len(tokens) - len(rest) :]


def plant(fault: str) -> None:
    """Change mlx-lm so that ``fault`` happens."""
    if fault == "too long":
        Prompts.fetch_nearest_cache = one_too_long
    elif fault == "rows":
        Prompts.fetch_nearest_cache = rows_of_another_place
    elif fault == "key":
        Prompts.fetch_nearest_cache = key_without_its_beginning
        Prompts.insert_cache = lambda self, model, tokens, *a, **k: insert(self, model, _keyed(list(tokens)), *a, **k)
    elif fault == "not copied":  # a hit is handed out as it is, and grows
        caches.copy = SimpleNamespace(deepcopy=lambda one: one, copy=copy.copy)
    elif fault:
        raise SystemExit(f"no fault {fault!r}")


if __name__ == "__main__":
    plant(sys.argv.pop(1))
    server.main()
