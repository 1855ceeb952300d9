"""What a cache counts where it happens: plain integers, which ``stats`` reads. Nobody is told."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from os import urandom

from kvpagoda.cache.namespace import fields_of, owner_of
from kvpagoda.cache.prefix_match import PrefixMatch

MOST_NAMESPACES = 256
"""Namespaces with counters of their own; what comes later is counted together, as ``OTHERS``."""
OTHERS = "others"


@dataclass(slots=True)
class Tally:
    """Of one namespace: requests opened, and tokens. ``prompt``: looked up; ``cached``: of these, not computed; ``loaded``: of
    these, from tiers; ``computed``: committed by requests that are over, or that were set aside and had to begin again."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    loaded: int = 0
    computed: int = 0


class Counters:
    """Since the cache was made. ``secret`` makes labels of namespaces that nobody can guess; empty: drawn at random.

    ``closed``: requests that are over; ``stopped``: closed or suspended. ``passed``: places where states should have been
    copied, and steps went on past them. ``short_requests``, ``short_tokens``: what cut a hit short -> requests, and tokens
    that were found and had to be computed all the same. ``found``: group -> tokens of prompts for which it had what a
    request needs.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret[:64] or urandom(16)
        self.closed = self.stopped = self.passed = 0
        self.short_requests, self.short_tokens, self.found = Counter[str](), Counter[str](), Counter[str]()
        self._tallies: dict[bytes, Tally] = {}
        self._by_key: dict[bytes, Tally] = {}

    def began(self, namespace: bytes, match: PrefixMatch, prompt: int) -> Tally:
        """A request began, or began again, where ``match`` says, after ``prompt`` tokens were looked up. Returns the counters
        of its namespace."""
        try:
            tally = self._by_key[namespace]
        except KeyError:
            tally = self.tally(namespace)
        known, resumable, limited_by, groups, _, loaded = match
        tally.prompt += prompt
        tally.cached += resumable
        if loaded:
            tally.loaded += loaded
        if limited_by != "nothing":
            self.short_requests[limited_by] += 1
            self.short_tokens[limited_by] += known - resumable
        found = self.found
        for name in groups:
            found[name] += groups[name]
        return tally

    def tally(self, namespace: bytes) -> Tally:
        """The counters of a namespace, by its key in the tree; the same ones after it was invalidated."""
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
        """Each namespace, by its label."""
        return [(self.label(own), tally) for own, tally in [*self._tallies.items()]]

    def label(self, own: bytes) -> str:
        """A name for the namespace of ``namespace_key`` that anybody may see: its adapter, and a keyed digest for its salt,
        which is a secret."""
        if not own:
            return OTHERS
        salt, adapter, weights = fields_of(own)
        shown = [part.decode("utf-8", "replace") for part in (adapter, weights) if part is not None]
        if salt is not None:
            shown.append("salt-" + blake2b(own, key=self._secret, digest_size=4).hexdigest())
        return "/".join(shown) or "default"
