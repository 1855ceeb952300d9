"""Plain integers that a cache counts as things happen, for ``stats``. Nothing is notified."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from os import urandom
from typing import NamedTuple

from kvpagoda.core.cache.prefix_cache import PrefixMatch
from kvpagoda.namespace import fields_of, owner_of
from kvpagoda.tiers.health import Histogram

MOST_NAMESPACES = 256
"""The most namespaces with counters of their own; later ones are counted together, as ``OTHERS``."""
OTHERS = "others"
HIT_TOKENS = (0, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
"""Upper bounds of the buckets of hit lengths, in tokens; the first is of requests that found nothing."""


class ResidencyStats(NamedTuple):
    """Seconds in the life of sampled blocks, of all groups."""

    lifetime: Histogram
    """From the moment when a block could be shared to its eviction."""
    idle: Histogram
    """From its last use (a request that found it, or its publication) to its eviction."""
    reuse_gap: Histogram
    """Between two uses."""


@dataclass(slots=True)
class Tally:
    """The counters of one namespace: requests opened, and tokens.

    ``prompt``: looked up. ``cached``: of these, not computed. ``loaded``: of the cached ones, loaded from tiers.
    ``computed``: committed by requests that ended, or that were suspended and had to start again."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    loaded: int = 0
    computed: int = 0


class Counters:
    """The counters of a cache, since it was made. ``secret``: the key of the digests in labels of namespaces; empty: a
    random one.

    ``closed``: requests that ended; ``dropped``: of these, ended because their sequences were collected. ``failed``:
    errors while publishing, other than lack of memory. ``stopped``: how often a running one was closed or suspended.
    ``sleeps``: how often the cache gave its memory back. ``passed``: positions where states should have been copied, but
    steps went past them. ``short_requests``, ``short_tokens``: what cut a hit short -> requests, and tokens that were found
    but had to be computed nevertheless.
    ``found``: group -> prompt tokens for which it had what a request needs. ``hit_counts``: requests by the length of
    their hit, in the buckets of ``HIT_TOKENS``; ``hit_total``: the tokens of all hits."""

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret[:64] or urandom(16)
        self.closed = self.stopped = self.passed = self.sleeps = 0
        self.dropped = self.failed = 0
        self.short_requests, self.short_tokens, self.found = Counter[str](), Counter[str](), Counter[str]()
        self.hit_counts, self.hit_total = [0] * (len(HIT_TOKENS) + 1), 0
        self._tallies: dict[bytes, Tally] = {}
        self._by_key: dict[bytes, Tally] = {}

    def began(self, namespace: bytes, match: PrefixMatch, prompt: int) -> Tally:
        """Count a request that began, or began again, from ``match``, after ``prompt`` tokens were looked up. Return
        the counters of its namespace."""
        try:
            tally = self._by_key[namespace]
        except KeyError:
            tally = self.tally(namespace)
        known, resumable, limited_by, groups, _, loaded, _ = match
        tally.prompt += prompt
        tally.cached += resumable
        if loaded:
            tally.loaded += loaded
        self.hit_counts[bisect_left(HIT_TOKENS, resumable)] += 1
        self.hit_total += resumable
        if limited_by != "nothing":
            self.short_requests[limited_by] += 1
            self.short_tokens[limited_by] += known - resumable
        found = self.found
        for name in groups:
            found[name] += groups[name]
        return tally

    def tally(self, namespace: bytes) -> Tally:
        """Return the counters of a namespace, by its key in the tree. An invalidation does not change them: its new key
        has the same counters."""
        try:
            return self._by_key[namespace]
        except KeyError:
            own = owner_of(namespace)
            if own not in self._tallies and len(self._tallies) >= MOST_NAMESPACES:
                own = b""
            if len(self._by_key) > 4 * MOST_NAMESPACES:
                self._by_key.clear()
            tally = self._by_key[namespace] = self._tallies.setdefault(own, Tally())
            return tally

    def tallies(self) -> list[tuple[str, Tally]]:
        """Return the label and the counters of each namespace."""
        return [(self.label(own), tally) for own, tally in [*self._tallies.items()]]

    def name(self, own: bytes) -> str:
        """Return the label of the counters in which a namespace is counted."""
        return self.label(own if own in self._tallies else b"")

    def label(self, own: bytes) -> str:
        """Return a public name for a namespace, by its ``namespace_key``: its adapter and weights, and a keyed digest
        in place of its salt, which is a secret."""
        if not own:
            return OTHERS
        salt, adapter, weights = fields_of(own)
        shown = [part.decode("utf-8", "replace") for part in (adapter, weights) if part is not None]
        if salt is not None:
            shown.append("salt-" + blake2b(own, key=self._secret, digest_size=4).hexdigest())
        return "/".join(shown) or "default"
