"""What a cache counts where it happens: plain integers, which ``stats`` reads. Nobody is told."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from secrets import token_bytes

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


@dataclass
class Counters:
    """Since the cache was made. ``secret`` makes labels of namespaces that nobody can guess; empty: drawn at random."""

    secret: bytes = b""
    closed: int = 0
    stopped: int = 0
    """Requests that were closed or suspended."""
    passed: int = 0
    """Places where states should have been copied, and steps went on past them."""
    short_requests: Counter[str] = field(default_factory=Counter)
    """What cut a hit short -> requests."""
    short_tokens: Counter[str] = field(default_factory=Counter)
    """What cut a hit short -> tokens that were found and had to be computed all the same."""
    found: Counter[str] = field(default_factory=Counter)
    """Group -> tokens of prompts for which it had what a request needs."""
    _tallies: dict[bytes, Tally] = field(default_factory=dict)
    _by_key: dict[bytes, Tally] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.secret = self.secret or token_bytes(16)

    def began(self, namespace: bytes, match: PrefixMatch, prompt: int, *, is_new: bool = True) -> None:
        """A request began where ``match`` says, after ``prompt`` tokens were looked up; or, if not ``is_new``, began again."""
        tally = self._by_key.get(namespace) or self.tally(namespace)
        tally.requests += is_new
        tally.prompt += prompt
        tally.cached += match.resumable
        tally.loaded += match.loaded
        if match.limited_by != "nothing":
            self.short_requests[match.limited_by] += 1
            self.short_tokens[match.limited_by] += match.num_tokens - match.resumable
        for name, tokens in match.groups.items():
            self.found[name] += tokens

    def tally(self, namespace: bytes) -> Tally:
        """The counters of a namespace, by its key in the tree; the same ones after it was invalidated."""
        tally = self._by_key.get(namespace)
        if tally is None:
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
            shown.append("salt-" + blake2b(own, key=self.secret[:64], digest_size=4).hexdigest())
        return "/".join(shown) or "default"
